#!/usr/bin/env bash
# A tiny Qwen3-VL learns to count squares in images: SFT on demonstrations of which three in ten are wrong, then GRPO, without a GPU.
#
#   usage: bash examples/tiny_vlm/run-tiny.sh
#
# Environment variables: OUTPUT, SEED, SFT_STEPS (250), GRPO_STEPS (40), SFT_FROM, GRPO_FLAGS, as examples/tiny.sh has them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
NAME=tiny_vlm SFT_STEPS="${SFT_STEPS:-250}" GRPO_STEPS="${GRPO_STEPS:-40}"
MODEL_FLAGS="--family qwen3_vl --layers 2 --hidden-size 64 --ffn-size 128 --vision-layers 2 --vision-hidden-size 64 --init-std 0.04"
. examples/tiny.sh
images=(--train-backend fsdp --multimodal-keys '{"image": "images"}')

tiny_data
tiny_sft "${images[@]}" --lr 2e-3 --lr-warmup-iters 30 --adam-beta2 0.98
tiny_grpo "${images[@]}" --prompt-data "$OUTPUT/data/train.jsonl" --input-key prompt --label-key label --apply-chat-template --rollout-shuffle \
    --custom-rm-path examples.tiny_cpu.reward:exact_match \
    --rollout-batch-size 32 --n-samples-per-prompt 16 --global-batch-size 512 --rollout-max-response-len 3
