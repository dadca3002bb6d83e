# The mathematics problems of DAPO with GRPO, evaluated on AIME 2024, on GPUs that trainer and engines share. What a run script sets, and
# environment variables: scripts/recipe.sh.
#
# What has to be there, beside the model:
#   hf download --repo-type dataset zhuzilin/dapo-math-17k --local-dir $SLIME_HOME/dapo-math-17k
#   hf download --repo-type dataset zhuzilin/aime-2024 --local-dir $SLIME_HOME/aime-2024
. scripts/recipe.sh
recipe_checkpoints "${ENGINE_MODEL}_slime"

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

MISC_ARGS+=(--colocate)
