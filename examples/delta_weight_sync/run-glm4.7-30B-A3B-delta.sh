#!/usr/bin/env bash
# Weights reach the engines as the bytes that changed, over a shared directory: GLM-4.7-Flash, 2 machines of trainer and 2 of engines, 8 GPUs each.
#
#   usage: bash examples/delta_weight_sync/run-glm4.7-30B-A3B-delta.sh [flags of train.py]   a flag that is given here overrides the script's
#
#   hf download zai-org/GLM-4.7-Flash --local-dir $SLIME_HOME/GLM-4.7-Flash
#   hf download --repo-type dataset zhuzilin/dapo-math-17k --local-dir $SLIME_HOME/dapo-math-17k
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. scripts/common.sh
. scripts/models/glm4.7-30B-A3B.sh
MODEL=GLM-4.7-Flash NUM_NODES=2
. scripts/recipe.sh
recipe_checkpoints GLM-4.7-Flash_delta

ROLLOUT_ARGS=(
    --prompt-data "${DATA_PATH:-$SLIME_HOME/dapo-math-17k/dapo-math-17k.jsonl}"
    --input-key prompt
    --label-key label
    --apply-chat-template
    --rollout-shuffle
    --rm-type deepscaler
    --num-rollout 3
    --rollout-batch-size 32
    --n-samples-per-prompt 4
    --rollout-max-response-len 8192
    --rollout-temperature 1
    --global-batch-size 128
    --balance-data
)
recipe_grpo 0.00
PERF_ARGS=(
    --tensor-model-parallel-size 2
    --sequence-parallel
    --pipeline-model-parallel-size 2
    --decoder-first-pipeline-num-layers 23
    --context-parallel-size 2
    --expert-model-parallel-size 8
    --expert-tensor-parallel-size 1
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
    --use-dynamic-batch-size
    --max-tokens-per-gpu 32768
)
SGLANG_ARGS=(
    --rollout-num-gpus 16
    --rollout-num-gpus-per-engine 8
    --sglang-mem-fraction-static 0.7
    --sglang-enable-dp-attention
    --sglang-dp-size 8
)
# Both directories: the first is seen by all machines, the second is each engine host's own.
SYNC_ARGS=(
    --update-weight-mode delta
    --update-weight-transport disk
    --update-weight-disk-dir "${DISK_DIR:-$SLIME_HOME/weights}"
    --update-weight-local-checkpoint-dir "${LOCAL_DIR:-/tmp/slime-weights}"
    --update-weight-delta-encoding xor
    --update-weight-delta-checksum xxh3-128
)
MISC_ARGS+=("${SYNC_ARGS[@]}")

recipe_train "$@"
