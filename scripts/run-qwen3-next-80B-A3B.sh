#!/usr/bin/env bash
# GRPO on Qwen3-Next-80B-A3B-Thinking with the mathematics problems of DAPO: 4 machines with 8 GPUs each. What is not here is in scripts/dapo_math.sh.
#
#   usage: bash scripts/run-qwen3-next-80B-A3B.sh [flags of train.py]     a flag that is given here overrides the script's
#          bash scripts/run-qwen3-next-80B-A3B.sh --dry-run               only the plan of the run: needs no GPU, no weights and no data
#
#   hf download Qwen/Qwen3-Next-80B-A3B-Thinking --local-dir $SLIME_HOME/Qwen3-Next-80B-A3B-Thinking
#
# Gated delta nets gain little from context parallelism: a micro-batch holds whole samples.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/common.sh
. scripts/models/qwen3-next-80B-A3B.sh
MODEL=Qwen3-Next-80B-A3B-Thinking
NUM_NODES=4
. scripts/dapo_math.sh

PERF_ARGS=(
    --tensor-model-parallel-size 2
    --sequence-parallel
    --pipeline-model-parallel-size 2
    --context-parallel-size 1
    --expert-model-parallel-size 16
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
    --rollout-num-gpus-per-engine 8
    --sglang-mem-fraction-static 0.7
)

recipe_train "$@"
