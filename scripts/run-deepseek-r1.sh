#!/usr/bin/env bash
# GRPO on DeepSeek-R1 with the mathematics problems of DAPO: 16 machines with 8 GPUs each. What is not here is in scripts/dapo_math.sh.
#
#   usage: bash scripts/run-deepseek-r1.sh [flags of train.py]     a flag that is given here overrides the script's
#          bash scripts/run-deepseek-r1.sh --dry-run               only the plan of the run: needs no GPU, no weights and no data
#
#   hf download deepseek-ai/DeepSeek-R1 --local-dir $SLIME_HOME/DeepSeek-R1
#
# Engines run the checkpoint's weights in fp8, the trainer bf16 ones that it makes of them. --dry-run finds the fp8 in its config.json, and
# plans for 16 bit without: hf download deepseek-ai/DeepSeek-R1 config.json --local-dir $SLIME_HOME/DeepSeek-R1
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/common.sh
. scripts/models/deepseek-v3.sh
MODEL=DeepSeek-R1
NUM_NODES=16
. scripts/dapo_math.sh

PERF_ARGS=(
    --tensor-model-parallel-size 8
    --sequence-parallel
    --pipeline-model-parallel-size 4
    --decoder-last-pipeline-num-layers 13
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
    --sglang-mem-fraction-static 0.8
)

# Long chains of thought; and no KL loss, whose reference would take 200 GB of each machine's memory.
ROLLOUT_ARGS+=(--rollout-max-response-len 32768)
EVAL_ARGS+=(--eval-max-response-len 32768)
GRPO_ARGS=(
    --advantage-estimator grpo
    --eps-clip 0.2
    --eps-clip-high 0.28
)

recipe_train "$@"
