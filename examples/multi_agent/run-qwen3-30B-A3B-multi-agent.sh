#!/usr/bin/env bash
# Solvers, rewriters and a selector: GRPO on Qwen3-30B-A3B with DAPO's problems; one machine with 8 GPUs.
#
#   usage: bash examples/multi_agent/run-qwen3-30B-A3B-multi-agent.sh [flags of train.py]   a flag that is given here overrides the script's
#
#   hf download Qwen/Qwen3-30B-A3B --local-dir $SLIME_HOME/Qwen3-30B-A3B
#   hf download --repo-type dataset zhuzilin/dapo-math-17k --local-dir $SLIME_HOME/dapo-math-17k
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. scripts/common.sh
. scripts/models/qwen3-30B-A3B.sh
MODEL=Qwen3-30B-A3B
. scripts/recipe.sh
recipe_checkpoints Qwen3-30B-A3B_multi-agent

ROLLOUT_ARGS=(
    --prompt-data "$SLIME_HOME/dapo-math-17k/dapo-math-17k.jsonl"
    --input-key prompt
    --label-key label
    --rollout-shuffle
    --custom-generate-function-path examples.multi_agent.rollout_with_multi_agents.generate_with_multi_agents
    --rm-type deepscaler
    --num-rollout 3000
    --rollout-batch-size 32
    --n-samples-per-prompt 8
    --rollout-max-context-len 16384
    --rollout-max-response-len 8192
    --rollout-temperature 1
    --global-batch-size 256
    --balance-data
)
recipe_grpo 0.00
GRPO_ARGS+=(
    --use-rollout-logprobs
)
OPTIMIZER_ARGS+=(
    --optimizer-cpu-offload
    --overlap-cpu-optimizer-d2h-h2d
    --use-precision-aware-optimizer
)
recipe_perf 4 20480 8
SGLANG_ARGS=(
    --rollout-num-gpus-per-engine 8
    --sglang-mem-fraction-static 0.7
    --sglang-cuda-graph-bs 1 2 4 8 16 24 32 40 48 56 64 72 80 88 96 104 112 120 128 136 144 152 160 168 176 184 192 200 208 216 224 232 240 248 256
)
MISC_ARGS+=(--colocate)

recipe_train "$@"
