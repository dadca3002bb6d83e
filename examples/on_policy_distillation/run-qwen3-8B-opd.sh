#!/usr/bin/env bash
# On-policy distillation of Qwen3-8B from a teacher behind an SGLang server: 2 GPUs train, 4 serve.
#
#   usage: bash examples/on_policy_distillation/run-qwen3-8B-opd.sh [flags of train.py]   a flag that is given here overrides the script's
#
#   hf download Qwen/Qwen3-8B --local-dir $SLIME_HOME/Qwen3-8B
#   hf download --repo-type dataset zhuzilin/dapo-math-17k --local-dir $SLIME_HOME/dapo-math-17k
#   python -m sglang.launch_server --model-path $SLIME_HOME/Qwen3-32B --port 13141      on other GPUs, this machine or another
# TEACHER_URL (http://127.0.0.1:13141/generate): where that server is.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. scripts/common.sh
. scripts/models/qwen3-8B.sh
MODEL=Qwen3-8B NUM_GPUS=2
. scripts/recipe.sh
recipe_checkpoints Qwen3-8B_opd
TEACHER_URL="${TEACHER_URL:-http://127.0.0.1:13141/generate}"

ROLLOUT_ARGS=(
    --prompt-data "$SLIME_HOME/dapo-math-17k/dapo-math-17k.jsonl"
    --input-key prompt
    --label-key label
    --apply-chat-template
    --rollout-shuffle
    --num-rollout 300
    --rollout-batch-size 16
    --n-samples-per-prompt 4
    --rollout-max-response-len 16384
    --rollout-temperature 1
    --global-batch-size 64
    --balance-data
)
GRPO_ARGS=(
    --advantage-estimator grpo
    --use-kl-loss
    --kl-loss-coef 0.00
    --kl-loss-type low_var_kl
    --entropy-coef 0.00
    --use-opd
    --opd-kl-coef 1.0
    --opd-type sglang
    --rm-url "$TEACHER_URL"
    --custom-rm-path slime.rollout.on_policy_distillation.reward_func
    --custom-reward-post-process-path slime.rollout.on_policy_distillation.post_process_rewards
)
recipe_perf 2 16384
SGLANG_ARGS=(
    --rollout-num-gpus 4
    --rollout-num-gpus-per-engine 1
    --sglang-mem-fraction-static 0.4
)

recipe_train "$@"
