#!/usr/bin/env bash
# GRPO on Qwen3-235B-A22B with the mathematics problems of DAPO: engines in int4, trainer in bf16, 8 machines with 8 GPUs each. What is not here is in scripts/dapo_math.sh.
#
#   usage: bash scripts/low_precision/run-qwen3-235B-A22B-int4.sh [flags of train.py]     a flag that is given here overrides the script's
#          bash scripts/low_precision/run-qwen3-235B-A22B-int4.sh --dry-run               only the plan of the run: needs no GPU, no weights and no data
#
#   hf download Qwen/Qwen3-235B-A22B --local-dir $SLIME_HOME/Qwen3-235B-A22B
#   python tools/convert_hf_to_int4_direct.py --model-dir $SLIME_HOME/Qwen3-235B-A22B --save-dir $SLIME_HOME/Qwen3-235B-A22B-int4
#
# The trainer is in bf16; every weight sync rounds its experts to int4 (docs/int4.md). --dry-run finds int4 in the engines' config.json,
# and plans for 16 bit without.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. scripts/common.sh
. scripts/models/qwen3-235B-A22B.sh
MODEL=Qwen3-235B-A22B
ENGINE_MODEL=Qwen3-235B-A22B-int4
NUM_NODES=8
. scripts/dapo_math.sh

PERF_ARGS=(
    --tensor-model-parallel-size 4
    --sequence-parallel
    --pipeline-model-parallel-size 4
    --decoder-last-pipeline-num-layers 22
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
    --rollout-num-gpus-per-engine 8
    --sglang-mem-fraction-static 0.8
)

recipe_train "$@"
