#!/usr/bin/env bash
# GRPO on Qwen2.5-0.5B-Instruct with GSM8K, the same numbers in every run: one machine with 8 GPUs. What is not here is in scripts/gsm8k.sh.
#
#   usage: bash scripts/run-qwen2.5-0.5B-reproducibility.sh [flags of train.py]     a flag that is given here overrides the script's
#          bash scripts/run-qwen2.5-0.5B-reproducibility.sh --dry-run               only the plan of the run: needs no GPU, no weights and no data
#
#   hf download Qwen/Qwen2.5-0.5B-Instruct --local-dir $SLIME_HOME/Qwen2.5-0.5B-Instruct
#
# Run it twice, the second time with --load and --save of another directory, and compare metrics.jsonl of the two.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/common.sh
. scripts/models/qwen2.5-0.5B.sh
MODEL=Qwen2.5-0.5B-Instruct
. scripts/gsm8k.sh

PERF_ARGS=(
    --tensor-model-parallel-size 1
    --use-dynamic-batch-size
    --max-tokens-per-gpu 9216
)

SGLANG_ARGS=(
    --rollout-num-gpus-per-engine 1
    --sglang-mem-fraction-static 0.7
    --sglang-enable-deterministic-inference
    --sglang-attention-backend triton
)

# Kernels and collectives that add in the same order each time.
MISC_ARGS+=(
    --deterministic-mode
    --train-env-vars '{"NCCL_ALGO": "Ring"}'
    --seed 1234
    --rollout-seed 42
)

recipe_train "$@"
