# What both run scripts of Qwen3-8B share; they set TEACHER_ARGS and source it: 2 GPUs train, 4 serve.
. scripts/models/qwen3-8B.sh
MODEL=Qwen3-8B NUM_GPUS=2
. scripts/recipe.sh
recipe_checkpoints "$SAVE_AS"

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
    "${TEACHER_ARGS[@]}"
)
recipe_perf 2 16384
SGLANG_ARGS=(
    --rollout-num-gpus 4
    --rollout-num-gpus-per-engine 1
    --sglang-mem-fraction-static 0.4
)
