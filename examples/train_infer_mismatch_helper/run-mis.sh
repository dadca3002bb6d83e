#!/usr/bin/env bash
# The quick start's GRPO run with engines that get new weights every 8 rollouts, corrected by masked importance sampling.
#
#   usage: bash examples/train_infer_mismatch_helper/run-mis.sh        6 minutes on two cores, of it SFT 3
#
# Environment variables:
#   OUTPUT      directory of everything that is made               (outputs/mis)
#   SEED        seed of model, demonstrations and sampling         (0)
#   STEPS       GRPO steps                                         (40)
#   INTERVAL    rollouts between two weight syncs                  (8)
#   SFT_FROM    OUTPUT of a run of scripts/run-tiny-cpu.sh: start from its SFT model and data instead of making them
#   CONFIG      settings; CONFIG= runs without a correction        (examples/train_infer_mismatch_helper/mis.yaml)
#   GRPO_FLAGS  more flags for the GRPO run
#
# Read next: examples/train_infer_mismatch_helper/README.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. scripts/common.sh

OUTPUT="${OUTPUT:-outputs/mis}"
SEED="${SEED:-0}"
STEPS="${STEPS:-40}"
INTERVAL="${INTERVAL:-8}"
SFT_FROM="${SFT_FROM:-}"
CONFIG="${CONFIG-examples/train_infer_mismatch_helper/mis.yaml}"
GRPO_FLAGS="${GRPO_FLAGS:-}"

if [ -z "$SFT_FROM" ]; then
    OUTPUT="$OUTPUT/start" SEED="$SEED" GRPO_STEPS=0 bash scripts/run-tiny-cpu.sh
    SFT_FROM="$OUTPUT/start"
fi

slime_env --cpu
# shellcheck disable=SC2086  # GRPO_FLAGS holds several words
"$PYTHON" train_async.py --accelerator cpu --seed "$SEED" --rollout-seed "$SEED" --output-dir "$OUTPUT/grpo" --fresh-output \
    --actor-num-gpus-per-node 1 --rollout-num-gpus 1 --update-weights-interval "$INTERVAL" \
    --hf-checkpoint "$SFT_FROM/sft/hf" --model-args-from-hf \
    --prompt-data "$SFT_FROM/data/train.jsonl" --input-key prompt --label-key label --apply-chat-template --rollout-shuffle \
    --custom-rm-path examples.tiny_cpu.reward:exact_match --advantage-estimator grpo \
    --num-rollout "$STEPS" --rollout-batch-size 64 --n-samples-per-prompt 8 --global-batch-size 512 \
    --rollout-max-response-len 5 --rollout-temperature 1 \
    --use-dynamic-batch-size --max-tokens-per-gpu 8192 \
    --lr 2e-4 --lr-decay-style constant --weight-decay 0 \
    --eval-config "$SFT_FROM/data/eval.yaml" --eval-interval "$STEPS" \
    ${CONFIG:+--custom-config-path "$CONFIG"} $GRPO_FLAGS

"$PYTHON" examples/train_infer_mismatch_helper/summarize.py "$OUTPUT/grpo"
