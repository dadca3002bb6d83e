#!/usr/bin/env bash
# Supervised fine-tuning of Qwen3-4B-Base on OpenHermes 2.5: one machine with 8 GPUs. What is not here is in scripts/sft.sh.
#
#   usage: bash scripts/run-qwen3-4B-base-sft.sh [flags of train.py]     a flag that is given here overrides the script's
#          bash scripts/run-qwen3-4B-base-sft.sh --dry-run               only the plan of the run: needs no GPU, no weights and no data
#
#   hf download Qwen/Qwen3-4B-Base --local-dir $SLIME_HOME/Qwen3-4B-Base
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/common.sh
. scripts/models/qwen3-4B.sh
MODEL=Qwen3-4B-Base
. scripts/sft.sh

PERF_ARGS=(
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 1
    --context-parallel-size 1
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
    --use-dynamic-batch-size
    --max-tokens-per-gpu 9216
)

recipe_train "$@"
