#!/usr/bin/env bash
# LoRA: GRPO on adapters of Qwen3-30B-A3B with the mathematics problems of DAPO: 4 GPUs. What is not here is in scripts/dapo_math.sh.
#
#   usage: bash scripts/run-qwen3-30B-A3B-lora.sh [flags of train.py]     a flag that is given here overrides the script's
#          bash scripts/run-qwen3-30B-A3B-lora.sh --dry-run               only the plan of the run: needs no GPU, no weights and no data
#
#   hf download Qwen/Qwen3-30B-A3B --local-dir $SLIME_HOME/Qwen3-30B-A3B
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/common.sh
. scripts/models/qwen3-30B-A3B.sh
MODEL=Qwen3-30B-A3B
NUM_GPUS="${NUM_GPUS:-4}"
. scripts/dapo_math.sh
recipe_checkpoints "${MODEL}_lora"
recipe_perf 4 20480 4

# About ten times the learning rate of full training (docs/lora.md).
LORA_ARGS=(
    --transformer-impl local
    --lora-rank 32
    --lora-alpha 64
    --lora-exclude-modules experts
    --lr 1e-5
)

SGLANG_ARGS=(
    --rollout-num-gpus-per-engine 4
    --sglang-mem-fraction-static 0.7
)

recipe_train "${LORA_ARGS[@]}" "$@"
