#!/usr/bin/env bash
# GRPO on Qwen3-4B with the mathematics problems of DAPO: engines in fp8, trainer in bf16, one machine with 8 GPUs. What is not here is in scripts/dapo_math.sh.
#
#   usage: bash scripts/low_precision/run-qwen3-4b-fp8.sh [flags of train.py]     a flag that is given here overrides the script's
#          bash scripts/low_precision/run-qwen3-4b-fp8.sh --dry-run               only the plan of the run: needs no GPU, no weights and no data
#
#   hf download Qwen/Qwen3-4B --local-dir $SLIME_HOME/Qwen3-4B
#   hf download Qwen/Qwen3-4B-FP8 --local-dir $SLIME_HOME/Qwen3-4B-FP8
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. scripts/common.sh
. scripts/models/qwen3-4B.sh
MODEL=Qwen3-4B
ENGINE_MODEL=Qwen3-4B-FP8
. scripts/dapo_math.sh

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
    --sglang-mem-fraction-static 0.7
)

recipe_train "$@"
