#!/usr/bin/env bash
# GRPO on Qwen3-4B with the mathematics problems of DAPO, evaluated on AIME 2024: one machine with 8 GPUs, which trainer and
# engines share.
#
#   usage: bash scripts/run-qwen3-4B.sh [flags of train.py]     a flag that is given here overrides the script's
#          bash scripts/run-qwen3-4B.sh --dry-run               only the plan of the run: needs no GPU, no weights and no data
#
# Environment variables: SLIME_HOME (/root), where models and data are and the checkpoints go; WANDB_API_KEY turns Weights & Biases on.
# What has to be there:
#   hf download Qwen/Qwen3-4B --local-dir $SLIME_HOME/Qwen3-4B
#   hf download --repo-type dataset zhuzilin/dapo-math-17k --local-dir $SLIME_HOME/dapo-math-17k
#   hf download --repo-type dataset zhuzilin/aime-2024 --local-dir $SLIME_HOME/aime-2024
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/common.sh
. scripts/models/qwen3-4B.sh

SLIME_HOME="${SLIME_HOME:-/root}"

CKPT_ARGS=(
    --hf-checkpoint "$SLIME_HOME/Qwen3-4B"
    --ref-load "$SLIME_HOME/Qwen3-4B"
    --load "$SLIME_HOME/Qwen3-4B_slime"
    --save "$SLIME_HOME/Qwen3-4B_slime"
    --save-interval 20
)

ROLLOUT_ARGS=(
    --prompt-data "$SLIME_HOME/dapo-math-17k/dapo-math-17k.jsonl"
    --input-key prompt
    --label-key label
    --apply-chat-template
    --rollout-shuffle
    --rm-type deepscaler
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
    --eval-prompt-data aime "$SLIME_HOME/aime-2024/aime-2024.jsonl"
    --n-samples-per-eval-prompt 16
    --eval-max-response-len 16384
    --eval-top-p 1
)

PERF_ARGS=(
    --tensor-model-parallel-size 2
    --sequence-parallel
    --pipeline-model-parallel-size 1
    --context-parallel-size 1
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
    --use-dynamic-batch-size
    --max-tokens-per-gpu 9216
)

GRPO_ARGS=(
    --advantage-estimator grpo
    --use-kl-loss
    --kl-loss-coef 0.00
    --kl-loss-type low_var_kl
    --entropy-coef 0.00
    --eps-clip 0.2
    --eps-clip-high 0.28
)

OPTIMIZER_ARGS=(
    --optimizer adam
    --lr 1e-6
    --lr-decay-style constant
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.98
)

WANDB_ARGS=(
    --use-wandb
    --wandb-project slime
    --wandb-group qwen3-4B
)
[ -n "${WANDB_API_KEY:-}" ] || WANDB_ARGS=()

SGLANG_ARGS=(
    --rollout-num-gpus-per-engine 2
    --sglang-mem-fraction-static 0.7
)

MISC_ARGS=(
    --accelerator cuda
    --actor-num-nodes 1
    --actor-num-gpus-per-node 8
    --colocate
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --accumulate-allreduce-grads-in-fp32
    --attention-softmax-in-fp32
    --attention-backend flash
)

slime_train "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${EVAL_ARGS[@]}" "${PERF_ARGS[@]}" "${GRPO_ARGS[@]}" \
    "${OPTIMIZER_ARGS[@]}" "${WANDB_ARGS[@]}" "${SGLANG_ARGS[@]}" "${MISC_ARGS[@]}" "$@"
