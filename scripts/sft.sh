# Supervised fine-tuning on the conversations of OpenHermes 2.5: no engine is started. What a run script sets, and environment variables:
# scripts/recipe.sh.
#
# What has to be there, beside the model: $SLIME_HOME/openhermes2_5.parquet, whose rows have `messages` as chat templates take them.
#   from datasets import load_dataset
#   roles = {"system": "system", "human": "user", "gpt": "assistant"}
#   rows = load_dataset("teknium/OpenHermes-2.5", split="train").select_columns("conversations")
#   rows = rows.map(lambda row: {"messages": [{"role": roles[turn["from"]], "content": turn["value"]} for turn in row["conversations"]]})
#   rows.select_columns("messages").to_parquet("openhermes2_5.parquet")
. scripts/recipe.sh
recipe_checkpoints "${MODEL}_sft"
CKPT_ARGS+=(--save-interval 1000)

ROLLOUT_ARGS=(
    --loss-type sft_loss
    --rollout-function-path slime.rollout.sft_rollout.generate_rollout
    --debug-train-only
    --disable-compute-advantages-and-returns
    --calculate-per-token-loss
    --prompt-data "$SLIME_HOME/openhermes2_5.parquet"
    --input-key messages
    --loss-mask-type qwen3
    --rollout-shuffle
    --num-rollout 23400 # three times all conversations, of which there are a million
    --rollout-batch-size 128
    --global-batch-size 128
    --balance-data
)

OPTIMIZER_ARGS+=(
    --lr 1e-5
    --min-lr 1e-6
    --lr-decay-style cosine
    --lr-warmup-fraction 0.1
    --adam-beta2 0.95
)
