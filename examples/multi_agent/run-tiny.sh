#!/usr/bin/env bash
# A tiny model learns to solve, rewrite and select: SFT on demonstrations, then GRPO on all three roles, without a GPU.
#
#   usage: bash examples/multi_agent/run-tiny.sh
#
# Environment variables: OUTPUT, SEED, SFT_STEPS (250), GRPO_STEPS (12), SFT_FROM, GRPO_FLAGS, as examples/tiny.sh has them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
NAME=multi_agent GRPO_STEPS="${GRPO_STEPS:-12}"
. examples/tiny.sh

tiny_data
tiny_sft
tiny_grpo --prompt-data "$OUTPUT/data/train.jsonl" --input-key prompt --label-key label --rollout-shuffle \
    --custom-generate-function-path examples.multi_agent.rollout_with_multi_agents.generate_with_multi_agents \
    --custom-config-path "$OUTPUT/data/multi_agent.yaml" --rm-type math \
    --rollout-batch-size 16 --n-samples-per-prompt 8 --global-batch-size 128 --rollout-max-response-len 8
