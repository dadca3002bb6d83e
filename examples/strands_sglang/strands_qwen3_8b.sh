#!/usr/bin/env bash
# An agent of the Strands SDK with a Python tool: GRPO on Qwen3-8B with DAPO's problems; one machine with 8 GPUs.
#
#   usage: bash examples/strands_sglang/strands_qwen3_8b.sh [flags of train.py]   a flag that is given here overrides the script's
#
#   pip install 'strands-agents[openai]'
#   hf download Qwen/Qwen3-8B --local-dir $SLIME_HOME/Qwen3-8B
#   hf download --repo-type dataset zhuzilin/dapo-math-17k --local-dir $SLIME_HOME/dapo-math-17k
#   hf download --repo-type dataset zhuzilin/aime-2024 --local-dir $SLIME_HOME/aime-2024
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. scripts/common.sh
. scripts/models/qwen3-8B.sh
MODEL=Qwen3-8B
. scripts/recipe.sh
recipe_checkpoints Qwen3-8B_strands

ROLLOUT_ARGS=(
    --prompt-data "$SLIME_HOME/dapo-math-17k/dapo-math-17k.jsonl"
    --input-key prompt
    --label-key label
    --rollout-shuffle
    --custom-generate-function-path examples.strands_sglang.generate_with_strands.generate
    --custom-rm-path examples.strands_sglang.generate_with_strands.reward_func
    --num-rollout 3000
    --rollout-batch-size 16
    --n-samples-per-prompt 8
    --rollout-max-response-len 16384
    --rollout-temperature 1
    --global-batch-size 128
    --balance-data
)
EVAL_ARGS=(
    --eval-interval 20
    --eval-prompt-data aime "$SLIME_HOME/aime-2024/aime-2024.jsonl"
    --n-samples-per-eval-prompt 16
    --eval-max-response-len 16384
    --eval-top-p 1
)
recipe_grpo 0.00
recipe_perf 2 18432
SGLANG_ARGS=(
    --rollout-num-gpus-per-engine 2
    --sglang-mem-fraction-static 0.4
)
MISC_ARGS+=(--colocate)

recipe_train "$@"
