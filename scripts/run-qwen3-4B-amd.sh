#!/usr/bin/env bash
# GRPO on Qwen3-4B with the mathematics problems of DAPO: one machine with 8 AMD GPUs. What is not here is in scripts/dapo_math.sh.
#
#   usage: bash scripts/run-qwen3-4B-amd.sh [flags of train.py]     a flag that is given here overrides the script's
#          bash scripts/run-qwen3-4B-amd.sh --dry-run               only the plan of the run: needs no GPU, no weights and no data
#
#   hf download Qwen/Qwen3-4B --local-dir $SLIME_HOME/Qwen3-4B
#
# scripts/setup_env.sh knows no ROCm: SLIME_PYTHON=/path/to/python names an environment with torch and SGLang for it, as the ROCm images of
# SGLang have one. Memory is not released in turns, since the library for that is CUDA's: trainer and engine share a GPU side by side.
# Planned only: it has not been run on such a machine yet.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/common.sh
. scripts/models/qwen3-4B.sh
MODEL=Qwen3-4B
. scripts/dapo_math.sh

if [ -z "${SLIME_PYTHON:-}" ] && ! slime_only_asks "$@"; then
    slime_say "set SLIME_PYTHON=/path/to/python, of an environment with torch and SGLang for ROCm"
    exit 2
fi

PERF_ARGS=(
    --tensor-model-parallel-size 2
    --sequence-parallel
    --pipeline-model-parallel-size 1
    --context-parallel-size 1
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
    --use-dynamic-batch-size
    --max-tokens-per-gpu 9216
)

SGLANG_ARGS=(
    --rollout-num-gpus-per-engine 2
    --sglang-mem-fraction-static 0.4
)

MISC_ARGS+=(--no-offload-train --no-offload-rollout)

recipe_train "$@"
