#!/usr/bin/env bash
# GRPO on Kimi-K2-Thinking with the mathematics problems of DAPO: engines in int4, trainer in bf16, 32 machines with 8 GPUs each. What is not here is in scripts/dapo_math.sh.
#
#   usage: bash scripts/low_precision/run-kimi-k2-Thinking-int4.sh [flags of train.py]     a flag that is given here overrides the script's
#          bash scripts/low_precision/run-kimi-k2-Thinking-int4.sh --dry-run               only the plan of the run: needs no GPU, no weights and no data
#
#   hf download moonshotai/Kimi-K2-Thinking --local-dir $SLIME_HOME/Kimi-K2-Thinking
#   python tools/convert_k2_thinking_int4_to_bf16.py --model-dir $SLIME_HOME/Kimi-K2-Thinking --output-dir $SLIME_HOME/Kimi-K2-Thinking-bf16
#
# The trainer is in bf16; every weight sync rounds its experts to int4 (docs/int4.md). --dry-run finds int4 in the engines' config.json,
# and plans for 16 bit without.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. scripts/common.sh
. scripts/models/kimi-k2-thinking.sh
MODEL=Kimi-K2-Thinking-bf16
ENGINE_MODEL=Kimi-K2-Thinking
NUM_NODES=32
. scripts/dapo_math.sh

PERF_ARGS=(
    --tensor-model-parallel-size 8
    --sequence-parallel
    --pipeline-model-parallel-size 8
    --decoder-last-pipeline-num-layers 5
    --context-parallel-size 4
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
    --rollout-num-gpus-per-engine 16
    --sglang-mem-fraction-static 0.88
)

# Long chains of thought; and no KL loss, whose reference would take host memory of every machine.
ROLLOUT_ARGS+=(--rollout-max-response-len 32768)
EVAL_ARGS+=(--eval-max-response-len 32768)
GRPO_ARGS=(
    --advantage-estimator grpo
    --eps-clip 0.2
    --eps-clip-high 0.28
)

MISC_ARGS+=(--trust-remote-code) # the tokenizer is code that comes with the checkpoint

recipe_train "$@"
