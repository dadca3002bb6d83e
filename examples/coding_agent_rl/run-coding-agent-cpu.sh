#!/usr/bin/env bash
# A tiny model learns to fix repositories of one file through an agent in a sandbox, without a GPU.
#
#   usage: bash examples/coding_agent_rl/run-coding-agent-cpu.sh
#
# Environment variables: OUTPUT (outputs/coding-agent), SEED, SFT_STEPS (120), GRPO_STEPS (6), SFT_FROM, GRPO_FLAGS, as examples/tiny.sh has them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
OUTPUT="${OUTPUT:-outputs/coding-agent}" NAME=coding_agent_rl GRPO_STEPS="${GRPO_STEPS:-6}" SFT_STEPS="${SFT_STEPS:-120}"
. examples/tiny.sh

tiny_data --eval-samples 4
tiny_sft
# 64 samples are few, and Adam takes steps of one size, whatever rewards say. With a large eps, what says little moves the model little.
# By tokens, for by samples the two tokens of "done" would count ten times those of a repair, and so would their noise.
tiny_grpo --adam-eps 1e-2 --lr 1.1e-3 --calculate-per-token-loss --prompt-data "$OUTPUT/data/train.jsonl" --input-key prompt --rollout-shuffle \
    --custom-generate-function-path slime.agent.generate --custom-config-path "$OUTPUT/data/agent.yaml" --sglang-tool-call-parser qwen25 \
    --rollout-batch-size 8 --n-samples-per-prompt 8 --global-batch-size 64 --rollout-max-response-len 32 --rollout-max-context-len 512
