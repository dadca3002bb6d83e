#!/usr/bin/env bash
# Does it run at all? Three small rollouts of GRPO on Qwen2.5-0.5B-Instruct with GSM8K, on the one GPU of an NVIDIA GB10 (DGX Spark). What is not here is in scripts/gsm8k.sh.
#
#   usage: bash scripts/run-qwen2.5-0.5B-gb10-smoke.sh [flags of train.py]     a flag that is given here overrides the script's
#          bash scripts/run-qwen2.5-0.5B-gb10-smoke.sh --dry-run               only the plan of the run: needs no GPU, no weights and no data
#
#   hf download Qwen/Qwen2.5-0.5B-Instruct --local-dir $SLIME_HOME/Qwen2.5-0.5B-Instruct
#
# A GB10 has one memory for CPU and GPU: moving what is not needed out of the GPU's way would free nothing.
# Planned only: it has not been run on such a machine yet.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/common.sh
. scripts/models/qwen2.5-0.5B.sh
MODEL=Qwen2.5-0.5B-Instruct
NUM_GPUS=1
. scripts/gsm8k.sh

CKPT_ARGS=(--hf-checkpoint "$SLIME_HOME/$MODEL")
EVAL_ARGS=()
ROLLOUT_ARGS+=(
    --num-rollout 3
    --rollout-batch-size 8
    --global-batch-size 64
    --rollout-max-response-len 256
)

PERF_ARGS=(
    --tensor-model-parallel-size 1
    --use-dynamic-batch-size
    --max-tokens-per-gpu 4096
)

SGLANG_ARGS=(
    --rollout-num-gpus-per-engine 1
    --sglang-mem-fraction-static 0.3
    --sglang-attention-backend triton
    --sglang-sampling-backend pytorch
)

MISC_ARGS+=(--no-offload-train --no-offload-rollout)

recipe_train "$@"
