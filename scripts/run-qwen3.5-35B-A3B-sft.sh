#!/usr/bin/env bash
# Supervised fine-tuning of Qwen3.5-35B-A3B on OpenHermes 2.5: one machine with 8 GPUs. What is not here is in scripts/sft.sh.
#
#   usage: bash scripts/run-qwen3.5-35B-A3B-sft.sh [flags of train.py]     a flag that is given here overrides the script's
#          bash scripts/run-qwen3.5-35B-A3B-sft.sh --dry-run               only the plan of the run: needs no GPU, no weights and no data
#
#   hf download Qwen/Qwen3.5-35B-A3B --local-dir $SLIME_HOME/Qwen3.5-35B-A3B
#
# Gated delta nets gain little from context parallelism: a micro-batch holds whole samples.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/common.sh
. scripts/models/qwen3.5-35B-A3B.sh
MODEL=Qwen3.5-35B-A3B
. scripts/sft.sh

PERF_ARGS=(
    --tensor-model-parallel-size 2
    --sequence-parallel
    --pipeline-model-parallel-size 1
    --context-parallel-size 1
    --expert-model-parallel-size 8
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

recipe_train "$@"
