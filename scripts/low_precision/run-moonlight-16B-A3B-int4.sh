#!/usr/bin/env bash
# GRPO on Moonlight-16B-A3B-Instruct with the mathematics problems of DAPO: engines in int4, trainer in bf16, one machine with 8 GPUs. What is not here is in scripts/dapo_math.sh.
#
#   usage: bash scripts/low_precision/run-moonlight-16B-A3B-int4.sh [flags of train.py]     a flag that is given here overrides the script's
#          bash scripts/low_precision/run-moonlight-16B-A3B-int4.sh --dry-run               only the plan of the run: needs no GPU, no weights and no data
#
#   hf download moonshotai/Moonlight-16B-A3B-Instruct --local-dir $SLIME_HOME/Moonlight-16B-A3B-Instruct
#   python tools/convert_hf_to_int4_direct.py --model-dir $SLIME_HOME/Moonlight-16B-A3B-Instruct --save-dir $SLIME_HOME/Moonlight-16B-A3B-Instruct-int4
#
# The trainer is in bf16; every weight sync rounds its experts to int4 (docs/int4.md). --dry-run finds int4 in the engines' config.json,
# and plans for 16 bit without.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. scripts/common.sh
. scripts/models/moonlight.sh
MODEL=Moonlight-16B-A3B-Instruct
ENGINE_MODEL=Moonlight-16B-A3B-Instruct-int4
. scripts/dapo_math.sh

PERF_ARGS=(
    --tensor-model-parallel-size 2
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
    --max-tokens-per-gpu 8192
)

SGLANG_ARGS=(
    --rollout-num-gpus-per-engine 2
    --sglang-mem-fraction-static 0.7
)

MISC_ARGS+=(--trust-remote-code) # the tokenizer is code that comes with the checkpoint

recipe_train "$@"
