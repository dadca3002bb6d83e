#!/usr/bin/env bash
# Supervised fine-tuning of Qwen3-235B-A22B on OpenHermes 2.5: 8 machines with 8 GPUs each. What is not here is in scripts/sft.sh.
#
#   usage: bash scripts/run-qwen3-235B-A22B-sft.sh [flags of train.py]     a flag that is given here overrides the script's
#          bash scripts/run-qwen3-235B-A22B-sft.sh --dry-run               only the plan of the run: needs no GPU, no weights and no data
#
#   hf download Qwen/Qwen3-235B-A22B --local-dir $SLIME_HOME/Qwen3-235B-A22B
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/common.sh
. scripts/models/qwen3-235B-A22B.sh
MODEL=Qwen3-235B-A22B
NUM_NODES=8
. scripts/sft.sh

PERF_ARGS=(
    --tensor-model-parallel-size 4
    --sequence-parallel
    --pipeline-model-parallel-size 4
    --decoder-last-pipeline-num-layers 22
    --context-parallel-size 1
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

recipe_train "$@"
