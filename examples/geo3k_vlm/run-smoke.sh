#!/usr/bin/env bash
# Two rollouts of a tiny Qwen3-VL with the data, flags and code of the full size, on two cores: what is wrong shows before a GPU is paid for.
# It learns nothing: the model has random weights. examples/tiny_vlm learns.
#
#   usage: bash examples/geo3k_vlm/run-smoke.sh [flags of train.py]
#
# Environment variables:
#   OUTPUT      directory of everything that is made         (outputs/geo3k_smoke)
#   MULTI_TURN  1: with the environment of geo3k_vlm_multi_turn (0)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. scripts/common.sh
OUTPUT="$(realpath -m "${OUTPUT:-outputs/geo3k_smoke}")"
rm -rf "$OUTPUT"
slime_env --cpu
"$PYTHON" tools/make_tiny_model.py --output "$OUTPUT/model" --family qwen3_vl
"$PYTHON" examples/geo3k_vlm/make_data.py --output "$OUTPUT/data" --count 32
how=(--apply-chat-template --rm-type deepscaler)
if [ "${MULTI_TURN:-0}" = 1 ]; then
    export PYTHONPATH="$PWD/examples/geo3k_vlm_multi_turn:$PYTHONPATH"
    how=(--custom-generate-function-path rollout.generate --log-multi-turn --rm-type math
        --custom-config-path examples/geo3k_vlm_multi_turn/geo3k_vlm_multi_turn_config.yaml)
fi
"$PYTHON" train.py --accelerator cpu --colocate --train-backend fsdp --hf-checkpoint "$OUTPUT/model" --model-args-from-hf \
    --prompt-data "$OUTPUT/data/train.jsonl" --input-key problem --label-key answer --multimodal-keys '{"image": "images"}' --rollout-shuffle \
    "${how[@]}" --num-rollout 2 --rollout-batch-size 4 --n-samples-per-prompt 4 --global-batch-size 16 --rollout-max-response-len 32 \
    --eval-interval 2 --eval-prompt-data geo3k "$OUTPUT/data/test.jsonl" --n-samples-per-eval-prompt 1 --eval-max-response-len 32 \
    --advantage-estimator grpo --use-dynamic-batch-size --max-tokens-per-gpu 2048 --lr 1e-3 --output-dir "$OUTPUT/run" "$@"
