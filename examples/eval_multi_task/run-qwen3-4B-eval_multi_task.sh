#!/usr/bin/env bash
# GRPO on Qwen3-4B, evaluated on AIME, GPQA and IFBench, each with a reward of its own; one machine with 8 GPUs.
#
#   usage: bash examples/eval_multi_task/run-qwen3-4B-eval_multi_task.sh [flags of train.py]   a flag that is given here overrides the script's
#
#   hf download Qwen/Qwen3-4B --local-dir $SLIME_HOME/Qwen3-4B
#   hf download --repo-type dataset zhuzilin/dapo-math-17k --local-dir $SLIME_HOME/dapo-math-17k
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. scripts/common.sh
. scripts/models/qwen3-4B.sh
MODEL=Qwen3-4B
. scripts/dapo_math.sh

# The data sets and what is different for each are in the file.
EVAL_ARGS=(
    --eval-interval 20
    --eval-config examples/eval_multi_task/multi_task.yaml
)
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
