#!/usr/bin/env bash
# GRPO on GLM-4.7 with the mathematics problems of DAPO: 8 machines with 8 GPUs each. What is not here is in scripts/dapo_math.sh.
#
#   usage: bash scripts/run-glm4.7-355B-A32B.sh [flags of train.py]     a flag that is given here overrides the script's
#          bash scripts/run-glm4.7-355B-A32B.sh --dry-run               only the plan of the run: needs no GPU, no weights and no data
#
#   hf download zai-org/GLM-4.7 --local-dir $SLIME_HOME/GLM-4.7
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/common.sh
. scripts/models/glm4.5-355B-A32B.sh # GLM-4.7 has the shape of GLM-4.5
MODEL=GLM-4.7
NUM_NODES=8
. scripts/dapo_math.sh

PERF_ARGS=(
    --tensor-model-parallel-size 8
    --sequence-parallel
    --pipeline-model-parallel-size 4
    --context-parallel-size 2
    --expert-model-parallel-size 16
    --expert-tensor-parallel-size 1
    --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
    --use-dynamic-batch-size
    --max-tokens-per-gpu 16384
    --optimizer-cpu-offload
)

SGLANG_ARGS=(
    --rollout-num-gpus-per-engine 16
    --sglang-mem-fraction-static 0.8
)

# A reasoning model: long chains of thought.
ROLLOUT_ARGS+=(--rollout-max-response-len 32768)
EVAL_ARGS+=(--eval-max-response-len 32768)

recipe_train "$@"
