#!/usr/bin/env bash
# A tiny model learns to serve the customers of a shop, with tools and a user who talks: SFT on demonstrations, then GRPO, without a GPU.
#
#   usage: bash examples/tau-bench/run-tiny.sh
#
# Environment variables: OUTPUT, SEED, SFT_STEPS (250), GRPO_STEPS (12), SFT_FROM, GRPO_FLAGS, as examples/tiny.sh has them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
NAME=tau-bench GRPO_STEPS="${GRPO_STEPS:-12}"
. examples/tiny.sh

tiny_data
tiny_sft
tiny_grpo --prompt-data "$OUTPUT/data/shop_train_tasks.jsonl" --input-key index --rollout-shuffle \
    --custom-generate-function-path generate_with_tau.generate --custom-config-path "$OUTPUT/data/tau.yaml" --max-turns 8 --log-multi-turn \
    --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256 --rollout-max-response-len 12 --rollout-max-context-len 256
