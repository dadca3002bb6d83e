#!/usr/bin/env bash
# GRPO on GLM-5 with the mathematics problems of DAPO: 32 machines with 8 GPUs each. What is not here is in scripts/dapo_math.sh.
#
#   usage: bash scripts/run-glm5-744B-A40B.sh [flags of train.py]     a flag that is given here overrides the script's
#          bash scripts/run-glm5-744B-A40B.sh --dry-run               only the plan of the run: needs no GPU, no weights and no data
#
#   hf download zai-org/GLM-5 --local-dir $SLIME_HOME/GLM-5
#
# Engines run in 16 bit: nobody has run sparse attention in fp8 on a GPU (docs/fp8.md).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/common.sh
. scripts/models/glm5-744B-A40B.sh
MODEL=GLM-5
NUM_NODES=32
. scripts/dapo_math.sh

PERF_ARGS=(
    --tensor-model-parallel-size 8
    --sequence-parallel
    --pipeline-model-parallel-size 8
    --decoder-last-pipeline-num-layers 8
    --context-parallel-size 1
    --expert-model-parallel-size 32
    --expert-tensor-parallel-size 1
    --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
    --use-dynamic-batch-size
    --max-tokens-per-gpu 8192
    --optimizer-cpu-offload
)

SGLANG_ARGS=(
    --rollout-num-gpus-per-engine 32
    --sglang-mem-fraction-static 0.85
)

recipe_train "$@"
