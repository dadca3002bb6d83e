#!/usr/bin/env bash
# GRPO on GLM-4.7-Flash with the mathematics problems of DAPO: one machine with 8 GPUs. What is not here is in scripts/dapo_math.sh.
#
#   usage: bash scripts/run-glm4.7-30B-A3B.sh [flags of train.py]     a flag that is given here overrides the script's
#          bash scripts/run-glm4.7-30B-A3B.sh --dry-run               only the plan of the run: needs no GPU, no weights and no data
#
#   hf download zai-org/GLM-4.7-Flash --local-dir $SLIME_HOME/GLM-4.7-Flash
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/common.sh
. scripts/models/glm4.7-30B-A3B.sh
MODEL=GLM-4.7-Flash
. scripts/dapo_math.sh

PERF_ARGS=(
    --tensor-model-parallel-size 4
    --sequence-parallel
    --pipeline-model-parallel-size 1
    --context-parallel-size 2
    --expert-model-parallel-size 8
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
    --rollout-num-gpus-per-engine 4
    --sglang-mem-fraction-static 0.7
)

# A reasoning model: long chains of thought.
ROLLOUT_ARGS+=(--rollout-max-response-len 32768)
EVAL_ARGS+=(--eval-max-response-len 32768)

recipe_train "$@"
