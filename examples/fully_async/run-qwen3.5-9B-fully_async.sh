#!/usr/bin/env bash
# Fully async GRPO on Qwen3.5-9B: 8 GPUs, 4 of them for the trainer, the others for engines that never wait.
#
#   usage: bash examples/fully_async/run-qwen3.5-9B-fully_async.sh [flags of train.py]   a flag that is given here overrides the script's
#
#   hf download Qwen/Qwen3.5-9B --local-dir $SLIME_HOME/Qwen3.5-9B
#   hf download --repo-type dataset zhuzilin/dapo-math-17k --local-dir $SLIME_HOME/dapo-math-17k
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. scripts/common.sh
. scripts/models/qwen3.5-9B.sh
MODEL=Qwen3.5-9B NUM_GPUS="${ACTOR_GPUS:-4}" DRIVER=train_async.py
. scripts/recipe.sh
recipe_checkpoints Qwen3.5-9B_fully-async
[ -z "${MODEL_DIR:-}" ] || CKPT_ARGS+=(--hf-checkpoint "$MODEL_DIR" --ref-load "$MODEL_DIR")

ROLLOUT_ARGS=(
    --prompt-data "${DATA_PATH:-$SLIME_HOME/dapo-math-17k/dapo-math-17k.jsonl}"
    --input-key prompt
    --label-key label
    --apply-chat-template
    --rollout-shuffle
    --rm-type deepscaler
    --num-rollout 3
    --rollout-batch-size 8
    --n-samples-per-prompt 4
    --rollout-max-response-len 2048
    --rollout-temperature 1
    --global-batch-size 32
    --balance-data
    --rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async
    --use-rollout-logprobs
)
recipe_grpo 0.00
PERF_ARGS=(
    --tensor-model-parallel-size 2
    --sequence-parallel
    --pipeline-model-parallel-size 1
    --context-parallel-size 1
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
    --use-dynamic-batch-size
    --max-tokens-per-gpu 4096
)
SGLANG_ARGS=(
    --rollout-num-gpus "${ROLLOUT_GPUS:-$((${NUM_GPUS_IN_ALL:-8} - NUM_GPUS))}"
    --rollout-num-gpus-per-engine 2
    --sglang-mem-fraction-static 0.7
)

recipe_train "$@"
