#!/usr/bin/env bash
# The quick start with LoRA: GRPO trains adapters over the SFT model, and the engine serves each version of them.
#
#   usage: bash examples/lora/run-tiny.sh
#
# Environment variables: those of scripts/run-tiny-cpu.sh (OUTPUT is outputs/lora, GRPO_STEPS is 40), and
#   RANK        rows of A and columns of B of every adapter        (16)
#   LR          learning rate, ten times the quick start's         (2e-3)
#
# Read next: examples/lora/README.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

export OUTPUT="${OUTPUT:-outputs/lora}" GRPO_STEPS="${GRPO_STEPS:-40}"
export GRPO_FLAGS="--lora-rank ${RANK:-16} --lr ${LR:-2e-3} ${GRPO_FLAGS:-}"
exec bash scripts/run-tiny-cpu.sh "$@"
