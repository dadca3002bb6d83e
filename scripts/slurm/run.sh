#!/usr/bin/env bash
# A run script as a Slurm job, on as many machines as it takes.
#
#   usage: sbatch --nodes 8 --gpus-per-node 8 scripts/slurm/run.sh scripts/run-glm4.5-355B-A32B.sh [flags of train.py]
#
# From the repository, which all machines see at the same place, with its .venv (`bash scripts/setup_env.sh --cuda`, once). The first machine
# of the job is the Ray head and runs the script; the others join it (scripts/ray_worker.sh).
#
# Environment variables: MASTER_ADDR, the first machine's address for the others (the first of `hostname -I`); MASTER_PORT (from the job's
# number, so that two jobs can share a machine); SLIME_SRUN_ARGS, more arguments of srun (--container-image=...); RAY_AUTH_TOKEN, the token of
# the job's Ray (a random one).
#SBATCH --job-name=slime
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --output=slime-%j.log
set -euo pipefail

say() { printf '[slime] %s\n' "$*" >&2; }

# sbatch runs a copy of this file.
cd "${SLURM_SUBMIT_DIR:-$(dirname "${BASH_SOURCE[0]}")/../..}"
if [ ! -f scripts/common.sh ]; then
    say "$PWD is not the repository: call sbatch there"
    exit 2
fi
if [ -z "${SLURM_JOB_ID:-}" ] || [ $# -eq 0 ] || [ ! -f "$1" ]; then
    say "usage: sbatch --nodes N --gpus-per-node 8 scripts/slurm/run.sh scripts/run-NAME.sh [flags of train.py]"
    exit 2
fi
needed="$(sed -n 's/^NUM_NODES=\([0-9]*\)$/\1/p' "$1")"
needed="${needed:-${NUM_NODES:-1}}" given="${SLURM_JOB_NUM_NODES:-1}"
if [ "$given" -lt "$needed" ]; then
    say "$1 takes $needed machines, the job has $given: sbatch --nodes $needed"
    exit 2
fi
# The Ray of one machine listens there only: workers would wait for it in vain, and end the job when they give up.
if [ "$needed" -eq 1 ] && [ "$given" -gt 1 ]; then
    say "$1 takes one machine, the job has $given: sbatch --nodes 1, or NUM_NODES=$given for a run on all of them"
    exit 2
fi

read -r address _ <<<"$(hostname -I)"
export MASTER_ADDR="${MASTER_ADDR:-$address}" MASTER_PORT="${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}"
read -r -a more <<<"${SLIME_SRUN_ARGS:-}"
export SLIME_JOB_NODES="$given"
# The token of the job's Ray. srun hands the environment to the job's machines, where only its user can read it.
RAY_AUTH_TOKEN="${RAY_AUTH_TOKEN:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}"
export RAY_AUTH_TOKEN
say "job $SLURM_JOB_ID on ${SLURM_JOB_NODELIST:-?}, Ray head at $MASTER_ADDR:$MASTER_PORT"
exec srun --ntasks-per-node=1 --kill-on-bad-exit=1 "${more[@]}" bash scripts/slurm/node.sh "$@"
