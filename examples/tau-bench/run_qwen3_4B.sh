#!/usr/bin/env bash
# tau-bench: GRPO on Qwen3-4B-Instruct-2507, which serves customers of the retail domain; 2 GPUs that trainer and engines share.
#
#   usage: bash examples/tau-bench/run_qwen3_4B.sh [flags of train.py]   a flag that is given here overrides the script's
#
# Before: install tau2 (https://github.com/sierra-research/tau2-bench), give litellm the key of the user's model (GEMINI_API_KEY), and
#   hf download Qwen/Qwen3-4B-Instruct-2507 --local-dir $SLIME_HOME/Qwen3-4B-Instruct-2507
#   python examples/tau-bench/tau1_mock.py --local_dir $SLIME_HOME/tau-bench --env retail
# Without tau2, against a shop of ours whose user is a model behind an OpenAI-compatible server:
#   TAU_ENV=shop bash examples/tau-bench/run_qwen3_4B.sh --custom-config-path my.yaml     (tau: {env: shop, user_url: ..., user_model: ...})
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. scripts/common.sh
. scripts/models/qwen3-4B-Instruct-2507.sh
MODEL=Qwen3-4B-Instruct-2507 NUM_GPUS=2
. scripts/recipe.sh
recipe_checkpoints Qwen3-4B-Instruct-2507_tau-bench
export PYTHONPATH="$PWD/examples/tau-bench${PYTHONPATH:+:$PYTHONPATH}"
TAU_ENV="${TAU_ENV:-retail}"

ROLLOUT_ARGS=(
    --prompt-data "$SLIME_HOME/tau-bench/${TAU_ENV}_train_tasks.jsonl"
    --input-key index
    --rollout-shuffle
    --custom-generate-function-path generate_with_tau.generate
    --max-turns 30
    --log-multi-turn
    --num-rollout 500
    --rollout-batch-size 32
    --n-samples-per-prompt 8
    --rollout-max-response-len 1024
    --rollout-temperature 1
    --global-batch-size 256
    --dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std
    --balance-data
)
EVAL_ARGS=(
    --eval-interval 5
    --eval-prompt-data "$TAU_ENV-test" "$SLIME_HOME/tau-bench/${TAU_ENV}_test_tasks.jsonl"
    --n-samples-per-eval-prompt 1
    --eval-max-response-len 1024
    --eval-top-k 1
)
recipe_grpo 0.00
recipe_perf 2 9216
SGLANG_ARGS=(
    --rollout-num-gpus-per-engine 1
    --sglang-mem-fraction-static 0.7
)
MISC_ARGS+=(--colocate)

recipe_train "$@"
