#!/usr/bin/env bash
# On-policy distillation of Qwen3-8B from a teacher whose weights the trainer holds: 2 GPUs train, 4 serve.
#
#   usage: bash examples/on_policy_distillation/run-qwen3-8B-opd-megatron.sh [flags of train.py]   a flag that is given here overrides the script's
#
#   hf download Qwen/Qwen3-8B --local-dir $SLIME_HOME/Qwen3-8B
#   hf download --repo-type dataset zhuzilin/dapo-math-17k --local-dir $SLIME_HOME/dapo-math-17k
# TEACHER (Qwen3-8B-teacher): directory below SLIME_HOME of a model of the student's shape.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. scripts/common.sh
. scripts/models/qwen3-8B.sh
MODEL=Qwen3-8B NUM_GPUS=2
. scripts/recipe.sh
recipe_checkpoints Qwen3-8B_opd-megatron
TEACHER="${TEACHER:-Qwen3-8B-teacher}"

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
    --opd-type megatron
    --opd-teacher-load "$SLIME_HOME/$TEACHER"
    --rm-type math
)
recipe_perf 2 16384
SGLANG_ARGS=(
    --rollout-num-gpus 4
    --rollout-num-gpus-per-engine 1
    --sglang-mem-fraction-static 0.4
)

recipe_train "$@"
