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
SAVE_AS=Qwen3-8B_opd
TEACHER_ARGS=(
    --opd-type sglang
    --rm-url "${TEACHER_URL:-http://127.0.0.1:13141/generate}"
    --custom-rm-path slime.rollout.on_policy_distillation.reward_func
    --custom-reward-post-process-path slime.rollout.on_policy_distillation.post_process_rewards
)
. examples/on_policy_distillation/qwen3-8B.sh

recipe_train "$@"
