# The mathematics problems of DAPO with GRPO, evaluated on AIME 2024, on one machine with 8 GPUs that trainer and engines share.
#
# A run script sets MODEL (the directory of the HF checkpoint below SLIME_HOME), sources this file, and sets what depends on the model:
# MODEL_ARGS (scripts/models/), PERF_ARGS, SGLANG_ARGS. `dapo_math_train "$@"` then runs it; flags given there override all others.
#
# Environment variables: SLIME_HOME (/root), where models and data are and the checkpoints go; WANDB_API_KEY turns Weights & Biases on.
# What has to be there, beside the model:
#   hf download --repo-type dataset zhuzilin/dapo-math-17k --local-dir $SLIME_HOME/dapo-math-17k
#   hf download --repo-type dataset zhuzilin/aime-2024 --local-dir $SLIME_HOME/aime-2024

SLIME_HOME="${SLIME_HOME:-/root}"

CKPT_ARGS=(
    --hf-checkpoint "$SLIME_HOME/$MODEL"
    --ref-load "$SLIME_HOME/$MODEL"
    --load "$SLIME_HOME/${MODEL}_slime"
    --save "$SLIME_HOME/${MODEL}_slime"
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
    --wandb-group "$MODEL"
)
[ -n "${WANDB_API_KEY:-}" ] || WANDB_ARGS=()

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

dapo_math_train() {
    slime_train "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${EVAL_ARGS[@]}" "${PERF_ARGS[@]}" "${GRPO_ARGS[@]}" \
        "${OPTIMIZER_ARGS[@]}" "${WANDB_ARGS[@]}" "${SGLANG_ARGS[@]}" "${MISC_ARGS[@]}" "$@"
}
