#!/usr/bin/env bash
# GRPO on Qwen3.5-35B-A3B, which reads problems of geometry off their drawings; 8 GPUs that trainer and engines share.
#
#   usage: bash examples/geo3k_vlm/run_geo3k_qwen35.sh [flags of train.py]   a flag that is given here overrides the script's
#
# Before:
#   hf download Qwen/Qwen3.5-35B-A3B --local-dir $SLIME_HOME/Qwen3.5-35B-A3B
#   hf download --repo-type dataset chenhegu/geo3k_imgurl --local-dir $SLIME_HOME/geo3k_imgurl
#
# Environment variables: SLIME_HOME (/root), WANDB_API_KEY, SLIME_SCRIPT_DATASET_NAME (chenhegu/geo3k_imgurl), SLIME_SCRIPT_NUM_GPUS (8)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. scripts/common.sh
. scripts/models/qwen3.5-35B-A3B-vl.sh
MODEL=Qwen3.5-35B-A3B NUM_GPUS="${SLIME_SCRIPT_NUM_GPUS:-8}"
. scripts/recipe.sh
recipe_checkpoints Qwen3.5-35B-A3B_geo3k
data="$SLIME_HOME/$(basename "${SLIME_SCRIPT_DATASET_NAME:-chenhegu/geo3k_imgurl}")"

ROLLOUT_ARGS=(
    --prompt-data "$data/train.parquet"
    --input-key problem
    --label-key answer
    --multimodal-keys '{"image": "images"}'
    --apply-chat-template
    --rollout-shuffle
    --rm-type deepscaler
    --num-rollout 3000
    --rollout-batch-size 64
    --n-samples-per-prompt 8
    --rollout-max-response-len 4096
    --rollout-temperature 0.8
    --global-batch-size 512
)
EVAL_ARGS=(
    --eval-interval 20
    --eval-prompt-data geo3k "$data/test.parquet"
    --n-samples-per-eval-prompt 1
    --eval-max-response-len 4096
)
recipe_grpo 0.00
recipe_perf 2 9216 8
SGLANG_ARGS=(
    --rollout-num-gpus-per-engine 8
    --sglang-ep-size 8
    --sglang-mem-fraction-static 0.7
    --sglang-max-running-requests 512
)
MISC_ARGS+=(--colocate)

recipe_train "$@"
