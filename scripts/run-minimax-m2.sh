#!/usr/bin/env bash
# GRPO on MiniMax-M2 with the mathematics problems of DAPO: 8 machines with 8 GPUs each. What is not here is in scripts/dapo_math.sh.
#
#   usage: bash scripts/run-minimax-m2.sh [flags of train.py]     a flag that is given here overrides the script's
#          bash scripts/run-minimax-m2.sh --dry-run               only the plan of the run: needs no GPU, no weights and no data
#
#   hf download MiniMaxAI/MiniMax-M2 --local-dir $SLIME_HOME/MiniMax-M2
#   python tools/fp8_cast_bf16.py --input-fp8-hf-path $SLIME_HOME/MiniMax-M2 --output-bf16-hf-path $SLIME_HOME/MiniMax-M2-bf16
#
# It is published in fp8, and engines run it so; the trainer starts from bf16. --dry-run finds the fp8 in config.json, and plans for 16 bit
# without.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/common.sh
. scripts/models/minimax-m2.sh
MODEL=MiniMax-M2-bf16
ENGINE_MODEL=MiniMax-M2
NUM_NODES=8
. scripts/dapo_math.sh

PERF_ARGS=(
    --tensor-model-parallel-size 8
    --sequence-parallel
    --pipeline-model-parallel-size 2
    --context-parallel-size 2
    --expert-model-parallel-size 32
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
    --sglang-ep-size 8 # whole experts on each GPU: an eighth of one is no multiple of fp8's blocks
    --sglang-mem-fraction-static 0.8
)

# A reasoning model: long chains of thought.
ROLLOUT_ARGS+=(--rollout-max-response-len 32768)
EVAL_ARGS+=(--eval-max-response-len 32768)

recipe_train "$@"
