#!/usr/bin/env bash
# ReTool's first stage: SFT of Qwen3-4B-Instruct-2507 on demonstrations with programs; 8 GPUs.
#
#   usage: bash examples/retool/retool_qwen3_4b_sft.sh [flags of train.py]   a flag that is given here overrides the script's
#
#   hf download Qwen/Qwen3-4B-Instruct-2507 --local-dir $SLIME_HOME/Qwen3-4B-Instruct-2507
#   hf download --repo-type dataset JoeYing/ReTool-SFT --local-dir $SLIME_HOME/ReTool-SFT
#   python examples/retool/sft_data_processing.py --input $SLIME_HOME/ReTool-SFT/data/*.parquet --output $SLIME_HOME/ReTool-SFT/messages.jsonl
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. scripts/common.sh
. scripts/models/qwen3-4B-Instruct-2507.sh
MODEL=Qwen3-4B-Instruct-2507
. scripts/recipe.sh
recipe_checkpoints Qwen3-4B_retool-sft
CKPT_ARGS+=(--save-hf "$SLIME_HOME/Qwen3-4B_retool-sft-hf")

ROLLOUT_ARGS=(
    --rollout-function-path slime.rollout.sft_rollout.generate_rollout
    --prompt-data "$SLIME_HOME/ReTool-SFT/messages.jsonl"
    --input-key messages
    --tool-key tools
    --rollout-shuffle
    --num-epoch 3
    --rollout-batch-size 128
    --global-batch-size 128
    --loss-type sft_loss
    --calculate-per-token-loss
    --disable-compute-advantages-and-returns
    --debug-train-only
)
OPTIMIZER_ARGS+=(
    --lr 1e-5
    --min-lr 1e-6
    --lr-decay-style cosine
    --lr-warmup-fraction 0.1
    --weight-decay 0.1
    --adam-beta2 0.95
)
PERF_ARGS=(
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 1
    --context-parallel-size 1
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
    --use-dynamic-batch-size
    --max-tokens-per-gpu 9216
)

recipe_train "$@"
