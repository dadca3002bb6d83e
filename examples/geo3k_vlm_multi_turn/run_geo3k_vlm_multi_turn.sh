#!/usr/bin/env bash
# GRPO on Qwen3.5-35B-A3B, which may have its answers to problems of geometry scored before the last one; 8 GPUs.
#
#   usage: bash examples/geo3k_vlm_multi_turn/run_geo3k_vlm_multi_turn.sh [flags of train.py]   a flag that is given here overrides the script's
#
# Before:
#   hf download Qwen/Qwen3.5-35B-A3B --local-dir $SLIME_HOME/Qwen3.5-35B-A3B
#   hf download --repo-type dataset VeraIsHere/geo3k_imgurl_processed --local-dir $SLIME_HOME/geo3k_imgurl_processed
#
# Environment variables: SLIME_HOME (/root), WANDB_API_KEY, SLIME_SCRIPT_DATASET_NAME (VeraIsHere/geo3k_imgurl_processed), SLIME_SCRIPT_NUM_GPUS (8)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. scripts/common.sh
. scripts/models/qwen3.5-35B-A3B-vl.sh
MODEL=Qwen3.5-35B-A3B NUM_GPUS="${SLIME_SCRIPT_NUM_GPUS:-8}"
. scripts/recipe.sh
recipe_checkpoints Qwen3.5-35B-A3B_geo3k_multi_turn
export PYTHONPATH="$PWD/examples/geo3k_vlm_multi_turn${PYTHONPATH:+:$PYTHONPATH}"
data="$SLIME_HOME/$(basename "${SLIME_SCRIPT_DATASET_NAME:-VeraIsHere/geo3k_imgurl_processed}")"

ROLLOUT_ARGS=(
    --prompt-data "$data/train.parquet"
    --input-key problem
    --label-key answer
    --multimodal-keys '{"image": "images"}'
    --rollout-shuffle
    --rm-type math
    --custom-generate-function-path rollout.generate
    --custom-config-path examples/geo3k_vlm_multi_turn/geo3k_vlm_multi_turn_config.yaml
    --log-multi-turn
    --num-rollout 3000
    --rollout-batch-size 64
    --n-samples-per-prompt 8
    --rollout-max-response-len 4096
    --rollout-temperature 1
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
    --sglang-mem-fraction-static 0.6
    --sglang-max-running-requests 512
)
MISC_ARGS+=(--colocate)

recipe_train "$@"
