#!/usr/bin/env bash
# FSDP2: GRPO on Qwen3-4B with the mathematics problems of DAPO, trained on 4 GPUs of a machine, with engines on the 4 others.
#
#   usage: bash scripts/run-qwen3-4B-fsdp.sh [flags of train.py]     a flag that is given here overrides the script's
#          bash scripts/run-qwen3-4B-fsdp.sh --dry-run               only the plan of the run: needs no GPU, but the weights' config.json
#
#   hf download Qwen/Qwen3-4B --local-dir $SLIME_HOME/Qwen3-4B
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/common.sh
MODEL=Qwen3-4B
. scripts/dapo_math.sh
recipe_checkpoints "${MODEL}_fsdp"

# transformers makes the model of --hf-checkpoint; engines have GPUs of their own, since this trainer cannot sleep yet.
MODEL_ARGS=(--train-backend fsdp)
MISC_ARGS=(
    --accelerator cuda
    --actor-num-nodes 1
    --actor-num-gpus-per-node 4
)
PERF_ARGS=(
    --recompute-granularity full
    --use-dynamic-batch-size
    --max-tokens-per-gpu 9216
)

SGLANG_ARGS=(
    --rollout-num-gpus 4
    --rollout-num-gpus-per-engine 1
)

recipe_train "$@"
