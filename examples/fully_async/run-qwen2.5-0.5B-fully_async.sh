#!/usr/bin/env bash
# Fully async GRPO on Qwen2.5-0.5B-Instruct: 4 GPUs, 1 of them for the trainer, the others for engines that never wait.
#
#   usage: bash examples/fully_async/run-qwen2.5-0.5B-fully_async.sh [flags of train.py]   a flag that is given here overrides the script's
#
#   hf download Qwen/Qwen2.5-0.5B-Instruct --local-dir $SLIME_HOME/Qwen2.5-0.5B-Instruct
#   hf download --repo-type dataset zhuzilin/dapo-math-17k --local-dir $SLIME_HOME/dapo-math-17k
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. scripts/common.sh
. scripts/models/qwen2.5-0.5B.sh
MODEL=Qwen2.5-0.5B-Instruct NUM_GPUS="${ACTOR_GPUS:-1}" DRIVER=train_async.py
. scripts/recipe.sh
recipe_checkpoints Qwen2.5-0.5B-Instruct_fully-async
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
    --rollout-max-response-len 1024
    --rollout-temperature 1
    --global-batch-size 32
    --balance-data
    --rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async
    --use-rollout-logprobs
)
recipe_grpo 0.00
PERF_ARGS=(
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 1
    --context-parallel-size 1
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
    --use-dynamic-batch-size
    --max-tokens-per-gpu 4096
)
SGLANG_ARGS=(
    --rollout-num-gpus "${ROLLOUT_GPUS:-$((${NUM_GPUS_IN_ALL:-4} - NUM_GPUS))}"
    --rollout-num-gpus-per-engine 1
    --sglang-mem-fraction-static 0.55
)

recipe_train "$@"
