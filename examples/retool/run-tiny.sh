#!/usr/bin/env bash
# A tiny model learns to compute with Python programs, which run in sandboxes: SFT on demonstrations, then GRPO, without a GPU.
#
#   usage: bash examples/retool/run-tiny.sh
#
# Environment variables: OUTPUT, SEED, SFT_STEPS (250), GRPO_STEPS (8), SFT_FROM, GRPO_FLAGS, as examples/tiny.sh has them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
NAME=retool GRPO_STEPS="${GRPO_STEPS:-8}"
. examples/tiny.sh

tiny_data
tiny_sft
tiny_grpo --prompt-data "$OUTPUT/data/train.jsonl" --input-key prompt --label-key label --tool-key tools --rollout-shuffle \
    --custom-generate-function-path generate_with_retool.generate --custom-rm-path generate_with_retool.reward_func \
    --reward-key score --eval-reward-key acc --custom-config-path "$OUTPUT/data/tools.yaml" --max-turns 3 --log-multi-turn \
    --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256 --rollout-max-response-len 64
