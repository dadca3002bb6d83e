#!/usr/bin/env bash
# Make this machine part of a run that another machine starts, until the run ends.
#
#   usage: bash scripts/ray_worker.sh HOST:PORT [ADDRESS]     HOST:PORT is MASTER_ADDR:MASTER_PORT of the machine that runs the run script;
#                                                             ADDRESS this machine's own, where it has several
#
# Environment variables: NUM_SLOTS, without GPUs how many slots this machine gives; SLIME_PYTHON as in scripts/common.sh; what NCCL and gloo
# are to know of this machine's network (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME, ...); SLIME_NODES_DEADLINE_S, to wait for HOST:PORT (600).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/common.sh

if [ $# -lt 1 ] || [ $# -gt 2 ] || ! [[ "$1" =~ ^.+:[0-9]+$ ]]; then
    slime_say "usage: bash scripts/ray_worker.sh HOST:PORT [ADDRESS]"
    exit 2
fi
slime_env
slime_ray_join "$@"
