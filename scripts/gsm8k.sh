# The problems of GSM8K with GRPO, on GPUs that trainer and engines share: small and quick. What a run script sets, and environment
# variables: scripts/recipe.sh.
#
# What has to be there, beside the model:
#   hf download --repo-type dataset zhuzilin/gsm8k --local-dir $SLIME_HOME/gsm8k
. scripts/recipe.sh
recipe_checkpoints "${ENGINE_MODEL}_gsm8k"

ROLLOUT_ARGS=(
    --prompt-data "$SLIME_HOME/gsm8k/train.parquet"
    --input-key messages
    --label-key label
    --apply-chat-template
    --rollout-shuffle
    --rm-type math
    --num-rollout 100
    --rollout-batch-size 32
    --n-samples-per-prompt 8
    --rollout-max-response-len 1024
    --rollout-temperature 1
    --global-batch-size 256
)

EVAL_ARGS=(
    --eval-interval 20
    --eval-prompt-data gsm8k "$SLIME_HOME/gsm8k/test.parquet"
    --n-samples-per-eval-prompt 1
    --eval-max-response-len 1024
    --eval-top-k 1
)

GRPO_ARGS=(
    --advantage-estimator grpo
    --eps-clip 0.2
    --eps-clip-high 0.28
)

MISC_ARGS+=(--colocate)
