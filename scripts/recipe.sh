# What the recipes (dapo_math.sh, gsm8k.sh, sft.sh) have in common: where things are, optimizer, logging, devices, and the run itself.
#
# A run script sets MODEL, the directory of the HF checkpoint below SLIME_HOME; sources a recipe; and sets what depends on the model:
# MODEL_ARGS (scripts/models/), PERF_ARGS, SGLANG_ARGS. `recipe_train "$@"` then runs it; flags given there override all others.
# What it may set before it sources the recipe:
#   ENGINE_MODEL   another directory, of the model in the format that engines run it in (fp8); the trainer starts from MODEL
#   NUM_NODES      machines (1); more than one through RAY_ADDRESS, see common.sh
#   NUM_GPUS       GPUs of each (8)
#
# Environment variables: SLIME_HOME (/root), where models and data are and the checkpoints go; WANDB_API_KEY turns Weights & Biases on.

SLIME_HOME="${SLIME_HOME:-/root}"
ENGINE_MODEL="${ENGINE_MODEL:-$MODEL}"
NUM_NODES="${NUM_NODES:-1}"
NUM_GPUS="${NUM_GPUS:-8}"

# recipe_checkpoints NAME: go on from, and save to, a directory of that name below SLIME_HOME.
recipe_checkpoints() {
    CKPT_ARGS=(
        --hf-checkpoint "$SLIME_HOME/$ENGINE_MODEL"
        --ref-load "$SLIME_HOME/$MODEL"
        --load "$SLIME_HOME/$1"
        --save "$SLIME_HOME/$1"
        --save-interval 20
    )
}

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
    --wandb-group "$ENGINE_MODEL"
)
[ -n "${WANDB_API_KEY:-}" ] || WANDB_ARGS=()

MISC_ARGS=(
    --accelerator cuda
    --actor-num-nodes "$NUM_NODES"
    --actor-num-gpus-per-node "$NUM_GPUS"
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --accumulate-allreduce-grads-in-fp32
    --attention-softmax-in-fp32
    --attention-backend flash
)

EVAL_ARGS=() GRPO_ARGS=() SGLANG_ARGS=()

# recipe_grpo KL: GRPO with a KL term of that weight, which --kl-loss-coef 0 only measures.
recipe_grpo() {
    GRPO_ARGS=(
        --advantage-estimator grpo
        --use-kl-loss
        --kl-loss-coef "$1"
        --kl-loss-type low_var_kl
        --entropy-coef 0.00
        --eps-clip 0.2
        --eps-clip-high 0.28
    )
}

# recipe_perf TP TOKENS [EP]: the trainer's layout, and how many tokens a GPU takes at a time.
recipe_perf() {
    PERF_ARGS=(
        --tensor-model-parallel-size "$1"
        --sequence-parallel
        --pipeline-model-parallel-size 1
        --context-parallel-size 1
        --expert-model-parallel-size "${3:-1}"
        --expert-tensor-parallel-size 1
        --recompute-granularity full
        --recompute-method uniform
        --recompute-num-layers 1
        --use-dynamic-batch-size
        --max-tokens-per-gpu "$2"
    )
}

recipe_train() {
    slime_train "${MODEL_ARGS[@]}" "${CKPT_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${EVAL_ARGS[@]}" "${PERF_ARGS[@]}" "${GRPO_ARGS[@]}" \
        "${OPTIMIZER_ARGS[@]}" "${WANDB_ARGS[@]}" "${SGLANG_ARGS[@]}" "${MISC_ARGS[@]}" "$@"
}
