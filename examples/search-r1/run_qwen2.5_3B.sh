#!/usr/bin/env bash
# Search-R1: GRPO on Qwen2.5-3B (base), which learns to search; 4 GPUs that trainer and engines share.
#
#   usage: bash examples/search-r1/run_qwen2.5_3B.sh [flags of train.py]   a flag that is given here overrides the script's
#
#   hf download Qwen/Qwen2.5-3B --local-dir $SLIME_HOME/Qwen2.5-3B
#   hf download --repo-type dataset PeterJinGo/nq_hotpotqa_train --local-dir $SLIME_HOME/nq_hotpotqa_train
#   hf download --repo-type dataset PeterJinGo/wiki-18-corpus --local-dir $SLIME_HOME/wiki-18 && gunzip $SLIME_HOME/wiki-18/*.gz
#   python examples/search-r1/local_dense_retriever/retrieval_server.py --corpus_path $SLIME_HOME/wiki-18/wiki-18.jsonl &
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. scripts/common.sh
. scripts/models/qwen2.5-3B.sh
MODEL=Qwen2.5-3B NUM_GPUS=4
. scripts/recipe.sh
recipe_checkpoints Qwen2.5-3B_search-r1
export PYTHONPATH="$PWD/examples/search-r1${PYTHONPATH:+:$PYTHONPATH}"

ROLLOUT_ARGS=(
    --prompt-data "$SLIME_HOME/nq_hotpotqa_train/train.parquet"
    --input-key prompt
    --label-key reward_model
    --apply-chat-template
    --rollout-shuffle
    --custom-generate-function-path generate_with_search.generate
    --custom-rm-path generate_with_search.reward_func
    --log-multi-turn
    --num-rollout 3000
    --rollout-batch-size 32
    --n-samples-per-prompt 8
    --rollout-max-response-len 512
    --rollout-max-context-len 8192
    --rollout-temperature 1
    --global-batch-size 256
    --balance-data
)
recipe_grpo 0.001
OPTIMIZER_ARGS+=(--weight-decay 0.01)
recipe_perf 2 9216
SGLANG_ARGS=(
    --rollout-num-gpus-per-engine 2
    --sglang-mem-fraction-static 0.7
)
MISC_ARGS+=(--colocate)

recipe_train "$@"
