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
SAVE_AS=Qwen3-8B_opd-megatron
TEACHER_ARGS=(
    --opd-type megatron
    --opd-teacher-load "${SLIME_HOME:-/root}/${TEACHER:-Qwen3-8B-teacher}"
    --rm-type math
)
. examples/on_policy_distillation/qwen3-8B.sh

recipe_train "$@"
