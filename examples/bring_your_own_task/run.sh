#!/usr/bin/env bash
# Train on the task, and evaluate before and after; flags given here are added.
#   MODEL   HF directory of the model to start from
#   OUTPUT  directory to write (outputs/own-task)
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
slime="${SLIME_REPO:-$here/../..}" # a checkout of slime
python="${SLIME_PYTHON:-$slime/.venv/bin/python}"
output="${OUTPUT:-outputs/own-task}"
model="${MODEL:-outputs/tiny-cpu/sft/hf}"

"$python" "$here/make_data.py" --output "$output/data"
exec "$python" "$slime/train.py" --accelerator cpu --colocate \
    --hf-checkpoint "$model" --model-args-from-hf \
    --prompt-data "$output/data/train.jsonl" --input-key prompt --label-key label --apply-chat-template --rollout-shuffle \
    --custom-generate-function-path "$here/task.py:generate" --custom-rm-path "$here/task.py:reward" \
    --dynamic-sampling-filter-path "$here/task.py:keep" --custom-config-path "$here/settings.yaml" \
    --num-rollout 60 --rollout-batch-size 64 --n-samples-per-prompt 8 --global-batch-size 512 \
    --rollout-max-response-len 5 --use-dynamic-batch-size --max-tokens-per-gpu 8192 \
    --lr 5e-4 --lr-decay-style constant --weight-decay 0 \
    --eval-prompt-data larger "$output/data/eval.jsonl" --eval-interval 30 --n-samples-per-eval-prompt 2 \
    --output-dir "$output/run" "$@"
