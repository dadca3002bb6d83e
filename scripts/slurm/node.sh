#!/usr/bin/env bash
# What scripts/slurm/run.sh runs on each machine of a job: on the first one the run script, on the others a Ray node.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

if [ "${SLURM_PROCID:?scripts/slurm/run.sh starts this}" -eq 0 ]; then
    exec bash "$@"
fi
exec bash scripts/ray_worker.sh "$MASTER_ADDR:$MASTER_PORT"
