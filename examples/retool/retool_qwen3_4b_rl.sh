#!/usr/bin/env bash
# ReTool: GRPO on Qwen3-4B, which solves mathematics problems with Python programs; 4 GPUs that trainer and engines share.
#
#   usage: bash examples/retool/retool_qwen3_4b_rl.sh [flags of train.py]   a flag that is given here overrides the script's
#
# Before: retool_qwen3_4b_sft.sh, whose last --save-hf goes to $SLIME_HOME/Qwen3-4B_retool-sft-hf; and
#   hf download --repo-type dataset zhuzilin/dapo-math-17k --local-dir $SLIME_HOME/dapo-math-17k
#   hf download --repo-type dataset zhuzilin/aime-2024 --local-dir $SLIME_HOME/aime-2024
#   for name in dapo-math-17k aime-2024; do python examples/retool/rl_data_preprocess.py \
#       --input $SLIME_HOME/$name/$name.jsonl --output $SLIME_HOME/$name/retool.jsonl; done
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. scripts/common.sh
. scripts/models/qwen3-4B-Instruct-2507.sh
MODEL=Qwen3-4B_retool-sft-hf NUM_GPUS=4
. scripts/recipe.sh
recipe_checkpoints Qwen3-4B_retool
export PYTHONPATH="$PWD/examples/retool${PYTHONPATH:+:$PYTHONPATH}"

ROLLOUT_ARGS=(
    --prompt-data "$SLIME_HOME/dapo-math-17k/retool.jsonl"
    --input-key prompt
    --label-key label
    --tool-key tools
    --rollout-shuffle
    --custom-generate-function-path generate_with_retool.generate
    --custom-rm-path generate_with_retool.reward_func
    --custom-config-path examples/retool/tools.yaml
    --max-turns 16
    --log-multi-turn
    --reward-key score
    --num-rollout 3000
    --rollout-batch-size 32
    --n-samples-per-prompt 8
    --rollout-max-response-len 8192
    --rollout-temperature 1
    --global-batch-size 256
    --balance-data
)
EVAL_ARGS=(
    --eval-interval 20
    --eval-prompt-data aime "$SLIME_HOME/aime-2024/retool.jsonl"
    --eval-reward-key acc
    --n-samples-per-eval-prompt 16
    --eval-max-response-len 16384
    --eval-top-p 1
)
recipe_grpo 0.00
recipe_perf 2 9216
SGLANG_ARGS=(
    --rollout-num-gpus-per-engine 2
    --sglang-mem-fraction-static 0.7
)
MISC_ARGS+=(--colocate)

recipe_train "$@"
