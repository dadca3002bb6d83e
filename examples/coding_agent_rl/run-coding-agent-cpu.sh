#!/usr/bin/env bash
# A tiny model learns to fix repositories of one file through an agent in a sandbox, without a GPU.
#
#   usage: bash examples/coding_agent_rl/run-coding-agent-cpu.sh        7 minutes on two idle cores
#
# Environment variables:
#   OUTPUT      directory of everything that is made               (outputs/coding-agent)
#   SEED        seed of model, demonstrations and sampling         (0)
#   SFT_STEPS   train steps on demonstrations                      (120)
#   GRPO_STEPS  GRPO steps                                         (8)
#   SFT_FROM    OUTPUT of an earlier run: start from its SFT model and data instead of making them
#   GRPO_FLAGS  more flags for the GRPO run
#
# Read next: docs/coding_agent.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. scripts/common.sh

OUTPUT="${OUTPUT:-outputs/coding-agent}"
SEED="${SEED:-0}"
SFT_STEPS="${SFT_STEPS:-120}"
GRPO_STEPS="${GRPO_STEPS:-8}"
SFT_FROM="${SFT_FROM:-}"
GRPO_FLAGS="${GRPO_FLAGS:-}"
STEPS_PER_ROLLOUT=10 # SFT: train steps between two visits to the data source
BATCH=128

if [ $((SFT_STEPS % STEPS_PER_ROLLOUT)) -ne 0 ]; then
    echo "error: SFT_STEPS=$SFT_STEPS: it must be a multiple of $STEPS_PER_ROLLOUT" >&2
    exit 2
fi

phase "environment"
slime_env --cpu
source_dir="${SFT_FROM:-$OUTPUT}"
mkdir -p "$OUTPUT"

if [ -z "$SFT_FROM" ]; then
    phase "model and data"
    mapfile -d '' -t pieces < <("$PYTHON" -c 'from examples.coding_agent_rl.make_data import PIECES; print(*PIECES, sep="\0", end="\0")')
    "$PYTHON" tools/make_tiny_model.py --output "$OUTPUT/model" --seed "$SEED" --extra-tokens "${pieces[@]}"
    "$PYTHON" examples/coding_agent_rl/make_data.py --output "$OUTPUT/data" --seed "$SEED" \
        --num-demonstrations $((SFT_STEPS * BATCH))

    phase "SFT on demonstrations of mixed quality ($SFT_STEPS steps)"
    num_rollout=$((SFT_STEPS / STEPS_PER_ROLLOUT))
    "$PYTHON" train.py --accelerator cpu --seed "$SEED" --rollout-seed "$SEED" \
        --hf-checkpoint "$OUTPUT/model" --model-args-from-hf \
        --loss-type sft_loss --debug-train-only --disable-compute-advantages-and-returns --calculate-per-token-loss \
        --rollout-function-path slime.rollout.sft_rollout.generate_rollout \
        --prompt-data "$OUTPUT/data/sft.jsonl" --input-key messages \
        --num-rollout "$num_rollout" --rollout-batch-size $((STEPS_PER_ROLLOUT * BATCH)) --global-batch-size "$BATCH" \
        --use-dynamic-batch-size --max-tokens-per-gpu 8192 \
        --lr 1e-3 --lr-decay-style constant --weight-decay 0 \
        --save "$OUTPUT/sft" --fresh-output --save-interval "$num_rollout" --no-save-optim --save-hf "$OUTPUT/sft/hf"
fi

phase "evaluation, GRPO ($GRPO_STEPS steps), evaluation"
# shellcheck disable=SC2086  # GRPO_FLAGS holds several words
"$PYTHON" train.py --accelerator cpu --colocate --seed "$SEED" --rollout-seed "$SEED" \
    --hf-checkpoint "$source_dir/sft/hf" --model-args-from-hf --ref-load "$source_dir/sft" \
    --prompt-data "$source_dir/data/train.jsonl" --input-key prompt --rollout-shuffle \
    --custom-generate-function-path slime.agent.generate --custom-config-path "$source_dir/data/agent.yaml" \
    --sglang-tool-call-parser qwen25 --advantage-estimator grpo \
    --num-rollout "$GRPO_STEPS" --rollout-batch-size 8 --n-samples-per-prompt 8 --global-batch-size 64 \
    --rollout-max-response-len 32 --rollout-max-context-len 512 --rollout-temperature 1 \
    --use-dynamic-batch-size --max-tokens-per-gpu 8192 \
    --lr 2e-4 --lr-decay-style constant --weight-decay 0 \
    --eval-config "$source_dir/data/eval.yaml" --eval-interval "$GRPO_STEPS" \
    --save "$OUTPUT/grpo" --fresh-output --save-interval "$GRPO_STEPS" --no-save-optim --save-hf "$OUTPUT/grpo/hf" $GRPO_FLAGS
phase ""

"$PYTHON" examples/coding_agent_rl/summarize.py --grpo "$OUTPUT/grpo"
printf '\nseconds per phase\n%s' "$summary"
