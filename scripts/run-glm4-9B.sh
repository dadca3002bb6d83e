#!/usr/bin/env bash
# GRPO on GLM-Z1-9B-0414 with the mathematics problems of DAPO: one machine with 8 GPUs. What is not here is in scripts/dapo_math.sh.
#
#   usage: bash scripts/run-glm4-9B.sh [flags of train.py]     a flag that is given here overrides the script's
#          bash scripts/run-glm4-9B.sh --dry-run               only the plan of the run: needs no GPU, no weights and no data
#
#   hf download THUDM/GLM-Z1-9B-0414 --local-dir $SLIME_HOME/GLM-Z1-9B-0414
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/common.sh
. scripts/models/glm4-9B.sh
MODEL=GLM-Z1-9B-0414
. scripts/dapo_math.sh

PERF_ARGS=(
    --tensor-model-parallel-size 2
    --sequence-parallel
    --pipeline-model-parallel-size 1
    --context-parallel-size 2
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
    --use-dynamic-batch-size
    --max-tokens-per-gpu 4608
)

SGLANG_ARGS=(
    --rollout-num-gpus-per-engine 2
    --sglang-mem-fraction-static 0.7
)

recipe_train "$@"
