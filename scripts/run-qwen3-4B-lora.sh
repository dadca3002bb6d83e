#!/usr/bin/env bash
# LoRA: GRPO on adapters of Qwen3-4B with the mathematics problems of DAPO: one GPU. What is not here is in scripts/dapo_math.sh.
#
#   usage: bash scripts/run-qwen3-4B-lora.sh [flags of train.py]     a flag that is given here overrides the script's
#          bash scripts/run-qwen3-4B-lora.sh --dry-run               only the plan of the run: needs no GPU, no weights and no data
#
#   hf download Qwen/Qwen3-4B --local-dir $SLIME_HOME/Qwen3-4B
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/common.sh
. scripts/models/qwen3-4B.sh
MODEL=Qwen3-4B
NUM_GPUS="${NUM_GPUS:-1}"
. scripts/dapo_math.sh
recipe_checkpoints "${MODEL}_lora"

PERF_ARGS=(
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
    --use-dynamic-batch-size
    --max-tokens-per-gpu 9216
)

# About ten times the learning rate of full training (docs/lora.md).
LORA_ARGS=(
    --transformer-impl local
    --lora-rank 32
    --lora-alpha 64
    --lr 1e-5
)

SGLANG_ARGS=(
    --rollout-num-gpus-per-engine 1
    --sglang-mem-fraction-static 0.7
)

recipe_train "${LORA_ARGS[@]}" "$@"
