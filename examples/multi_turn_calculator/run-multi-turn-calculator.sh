#!/usr/bin/env bash
# A tiny model learns to call a calculator: two-digit products by GRPO over several turns, without a GPU.
#
#   usage: bash examples/multi_turn_calculator/run-multi-turn-calculator.sh
#
# Environment variables: OUTPUT (outputs/multi-turn-calculator), SEED, SFT_STEPS (250), GRPO_STEPS (24), SFT_FROM, GRPO_FLAGS, as examples/tiny.sh has them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
OUTPUT="${OUTPUT:-outputs/multi-turn-calculator}" NAME=multi_turn_calculator GRPO_STEPS="${GRPO_STEPS:-24}"
. examples/tiny.sh

tiny_data
tiny_sft
tiny_grpo --prompt-data "$OUTPUT/data/train.jsonl" --input-key prompt --label-key label --tool-key tools --rollout-shuffle \
    --custom-generate-function-path slime.rollout.multi_turn.generate --custom-config-path "$OUTPUT/data/tools.yaml" \
    --custom-rm-path examples.multi_turn_calculator.reward:right_answer --max-turns 3 --log-multi-turn \
    --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256 --rollout-max-response-len 48
