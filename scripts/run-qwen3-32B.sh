#!/usr/bin/env bash
# GRPO on Qwen3-32B with the mathematics problems of DAPO: one machine with 8 GPUs. What is not here is in scripts/dapo_math.sh.
#
#   usage: bash scripts/run-qwen3-32B.sh [flags of train.py]     a flag that is given here overrides the script's
#          bash scripts/run-qwen3-32B.sh --dry-run               only the plan of the run: needs no GPU, no weights and no data
#
#   hf download Qwen/Qwen3-32B --local-dir $SLIME_HOME/Qwen3-32B
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/common.sh
. scripts/models/qwen3-32B.sh
MODEL=Qwen3-32B
. scripts/dapo_math.sh

PERF_ARGS=(
    --tensor-model-parallel-size 8
    --sequence-parallel
    --pipeline-model-parallel-size 1
    --context-parallel-size 1
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
    --use-dynamic-batch-size
    --max-tokens-per-gpu 16384
    --optimizer-cpu-offload
)

SGLANG_ARGS=(
    --rollout-num-gpus-per-engine 4
    --sglang-mem-fraction-static 0.7
)

recipe_train "$@"
