#!/usr/bin/env bash
# GRPO on Qwen3.5-27B with the mathematics problems of DAPO: one machine with 8 GPUs. What is not here is in scripts/dapo_math.sh.
#
#   usage: bash scripts/run-qwen3.5-27B.sh [flags of train.py]     a flag that is given here overrides the script's
#          bash scripts/run-qwen3.5-27B.sh --dry-run               only the plan of the run: needs no GPU, no weights and no data
#
#   hf download Qwen/Qwen3.5-27B --local-dir $SLIME_HOME/Qwen3.5-27B
#
# Gated delta nets gain little from context parallelism: a micro-batch holds whole samples.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/common.sh
. scripts/models/qwen3.5-27B.sh
MODEL=Qwen3.5-27B
. scripts/dapo_math.sh

PERF_ARGS=(
    --tensor-model-parallel-size 4
    --sequence-parallel
    --pipeline-model-parallel-size 2
    --context-parallel-size 1
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
    --use-dynamic-batch-size
    --max-tokens-per-gpu 8192
    --optimizer-cpu-offload
)

SGLANG_ARGS=(
    --rollout-num-gpus-per-engine 4
    --sglang-mem-fraction-static 0.6
)

recipe_train "$@"
