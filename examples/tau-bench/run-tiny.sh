#!/usr/bin/env bash
# A tiny model learns to serve the customers of a shop, with tools and a user who talks: SFT on demonstrations, then GRPO, without a GPU.
#
#   usage: bash examples/tau-bench/run-tiny.sh
#
# Environment variables:
#   OUTPUT      directory of everything that is made               (outputs/tau-bench)
#   SEED        seed of model, demonstrations and sampling         (0)
#   SFT_STEPS   train steps on demonstrations, a multiple of 10    (250)
#   GRPO_STEPS  GRPO steps                                         (12)
#   SFT_FROM    OUTPUT of an earlier run: start from its SFT model instead of making one
#   GRPO_FLAGS  more flags for the GRPO run
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. scripts/common.sh

OUTPUT="${OUTPUT:-outputs/tau-bench}" SEED="${SEED:-0}" SFT_STEPS="${SFT_STEPS:-250}" GRPO_STEPS="${GRPO_STEPS:-12}"
SFT_FROM="${SFT_FROM:-}" GRPO_FLAGS="${GRPO_FLAGS:-}"
if [ $((SFT_STEPS % 10)) -ne 0 ]; then
    echo "error: SFT_STEPS=$SFT_STEPS: it must be a multiple of 10" >&2
    exit 2
fi
slime_env --cpu
export PYTHONPATH="$PWD/examples/tau-bench:$PYTHONPATH"
source_dir="${SFT_FROM:-$OUTPUT}"
mkdir -p "$OUTPUT"

"$PYTHON" examples/tau-bench/make_data.py --output "$OUTPUT/data" --seed "$SEED" --num-demonstrations $((SFT_STEPS * 128))

if [ -z "$SFT_FROM" ]; then
    mapfile -d '' -t pieces < <("$PYTHON" -c 'from make_data import PIECES; print(*PIECES, sep="\0", end="\0")')
    "$PYTHON" tools/make_tiny_model.py --output "$OUTPUT/model" --seed "$SEED" --extra-tokens "${pieces[@]}"
    "$PYTHON" train.py --accelerator cpu --seed "$SEED" --rollout-seed "$SEED" \
        --hf-checkpoint "$OUTPUT/model" --model-args-from-hf \
        --loss-type sft_loss --debug-train-only --disable-compute-advantages-and-returns --calculate-per-token-loss \
        --rollout-function-path slime.rollout.sft_rollout.generate_rollout \
        --prompt-data "$OUTPUT/data/sft.jsonl" --input-key messages \
        --num-rollout $((SFT_STEPS / 10)) --rollout-batch-size 1280 --global-batch-size 128 \
        --use-dynamic-batch-size --max-tokens-per-gpu 8192 \
        --lr 1e-3 --lr-decay-style constant --weight-decay 0 \
        --save "$OUTPUT/sft" --fresh-output --save-interval $((SFT_STEPS / 10)) --no-save-optim --save-hf "$OUTPUT/sft/hf"
fi

# shellcheck disable=SC2086  # GRPO_FLAGS holds several words
"$PYTHON" train.py --accelerator cpu --colocate --seed "$SEED" --rollout-seed "$SEED" \
    --hf-checkpoint "$source_dir/sft/hf" --model-args-from-hf --ref-load "$source_dir/sft" \
    --prompt-data "$OUTPUT/data/shop_train_tasks.jsonl" --input-key index --rollout-shuffle \
    --custom-generate-function-path generate_with_tau.generate --custom-config-path "$OUTPUT/data/tau.yaml" \
    --max-turns 8 --log-multi-turn --advantage-estimator grpo \
    --num-rollout "$GRPO_STEPS" --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256 \
    --rollout-max-response-len 12 --rollout-max-context-len 256 --rollout-temperature 1 \
    --use-dynamic-batch-size --max-tokens-per-gpu 8192 \
    --lr 2e-4 --lr-decay-style constant --weight-decay 0 \
    --eval-config "$OUTPUT/data/eval.yaml" --eval-interval "$GRPO_STEPS" \
    --save "$OUTPUT/grpo" --fresh-output --save-interval "$GRPO_STEPS" --no-save-optim $GRPO_FLAGS
printf '%d s in all\n' "$SECONDS"
