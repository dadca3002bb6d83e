#!/usr/bin/env bash
# A tiny model sets itself problems and solves them: SFT on demonstrations, then GRPO without any problem to train on, without a GPU.
#
#   usage: bash examples/self_play/run-tiny.sh
#
# Environment variables: OUTPUT, SEED, SFT_STEPS (250), GRPO_STEPS (16), SFT_FROM, GRPO_FLAGS, as examples/tiny.sh has them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
NAME=self_play GRPO_STEPS="${GRPO_STEPS:-16}"
. examples/tiny.sh

tiny_data
tiny_sft
tiny_grpo --prompt-data "$OUTPUT/data/train.jsonl" --input-key prompt --eval-label-key label \
    --custom-generate-function-path examples.self_play.rollout.generate --custom-config-path "$OUTPUT/data/self_play.yaml" \
    --custom-reward-post-process-path examples.self_play.rollout.by_role \
    --rollout-batch-size 16 --n-samples-per-prompt 8 --global-batch-size 128 --rollout-max-response-len 11
