#!/usr/bin/env bash
# The quick start: a tiny model learns two-digit addition by GRPO through the whole real stack, without a GPU.
#
#   usage: bash scripts/run-tiny-cpu.sh            about 5 minutes on two idle cores (the first run installs the environment before)
#          bash scripts/run-tiny-cpu.sh --dry-run  only the plans of its two runs
#   A second call moves what the one before has trained to OUTPUT/sft.1 and OUTPUT/grpo.1.
#
# Environment variables:
#   OUTPUT      directory of everything that is made               (outputs/tiny-cpu)
#   SEED        seed of model, demonstrations and sampling         (0)
#   SFT_STEPS   train steps on demonstrations                      (400)
#   GRPO_STEPS  GRPO steps; 0 ends after SFT                       (70)
#   RM          the reward's flags; RM="--rm-type random" is the control that must not learn
#   SFT_FROM    OUTPUT of an earlier run: start from its SFT model and data instead of making them
#   TRAIN_BACKEND  megatron or fsdp                                (megatron)
#   GRPO_FLAGS  more flags for the GRPO run
#
# Read next: examples/tiny_cpu/README.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/common.sh

OUTPUT="${OUTPUT:-outputs/tiny-cpu}"
SEED="${SEED:-0}"
SFT_STEPS="${SFT_STEPS:-400}"
GRPO_STEPS="${GRPO_STEPS:-70}"
RM="${RM:---custom-rm-path examples.tiny_cpu.reward:exact_match}"
SFT_FROM="${SFT_FROM:-}"
TRAIN_BACKEND="${TRAIN_BACKEND:-megatron}"
GRPO_FLAGS="${GRPO_FLAGS:-}"
STEPS_PER_ROLLOUT=10 # SFT: train steps between two visits to the data source
BATCH=256

dry_run=""
case "$*" in
    "") ;;
    --dry-run) dry_run=--dry-run ;;
    *)
        echo "error: $*: settings of this script are environment variables (see its top); the one argument that it takes is --dry-run" >&2
        exit 2
        ;;
esac
if [ $((SFT_STEPS % STEPS_PER_ROLLOUT)) -ne 0 ]; then
    echo "error: SFT_STEPS=$SFT_STEPS: it must be a multiple of $STEPS_PER_ROLLOUT" >&2
    exit 2
fi

phase "environment"
if [ "$dry_run" ]; then
    slime_env_to_ask
    OUTPUT="$(mktemp -d)" SFT_FROM="" SFT_STEPS=$STEPS_PER_ROLLOUT
    trap 'rm -rf "$OUTPUT"' EXIT
else
    slime_env --cpu
fi
source_dir="${SFT_FROM:-$OUTPUT}"
sft_model="$source_dir/sft/hf" sft_checkpoint="$source_dir/sft"
mkdir -p "$OUTPUT"

if [ -z "$SFT_FROM" ]; then
    phase "model and data"
    "$PYTHON" tools/make_tiny_model.py --output "$OUTPUT/model" --seed "$SEED"
    "$PYTHON" examples/tiny_cpu/make_data.py --output "$OUTPUT/data" --seed "$SEED" \
        --num-demonstrations $((SFT_STEPS * BATCH))

    phase "SFT on demonstrations of mixed quality ($SFT_STEPS steps)"
    num_rollout=$((SFT_STEPS / STEPS_PER_ROLLOUT))
    "$PYTHON" train.py --train-backend "$TRAIN_BACKEND" --accelerator cpu --seed "$SEED" --rollout-seed "$SEED" \
        --hf-checkpoint "$OUTPUT/model" --model-args-from-hf \
        --loss-type sft_loss --debug-train-only --disable-compute-advantages-and-returns --calculate-per-token-loss \
        --rollout-function-path slime.rollout.sft_rollout.generate_rollout \
        --prompt-data "$OUTPUT/data/sft.jsonl" --input-key messages \
        --num-rollout "$num_rollout" --rollout-batch-size $((STEPS_PER_ROLLOUT * BATCH)) --global-batch-size "$BATCH" \
        --use-dynamic-batch-size --max-tokens-per-gpu 8192 \
        --lr 1e-3 --lr-decay-style constant --weight-decay 0 \
        --save "$OUTPUT/sft" --fresh-output --save-interval "$num_rollout" --no-save-optim --save-hf "$OUTPUT/sft/hf" $dry_run
    [ -z "$dry_run" ] || sft_model="$OUTPUT/model" sft_checkpoint="$OUTPUT/model" # of the same sizes
fi

if [ "$GRPO_STEPS" -eq 0 ]; then
    phase ""
    printf '\nseconds per phase\n%s' "$summary"
    exit 0
fi

phase "evaluation, GRPO ($GRPO_STEPS steps), evaluation"
eval_interval=$((GRPO_STEPS % 2 == 0 ? GRPO_STEPS / 2 : GRPO_STEPS))
# shellcheck disable=SC2086  # RM and GRPO_FLAGS hold several words
"$PYTHON" train.py --train-backend "$TRAIN_BACKEND" --accelerator cpu --colocate --seed "$SEED" --rollout-seed "$SEED" \
    --hf-checkpoint "$sft_model" --model-args-from-hf --ref-load "$sft_checkpoint" \
    --prompt-data "$source_dir/data/train.jsonl" --input-key prompt --label-key label --apply-chat-template --rollout-shuffle \
    $RM --advantage-estimator grpo \
    --num-rollout "$GRPO_STEPS" --rollout-batch-size 64 --n-samples-per-prompt 8 --global-batch-size 512 \
    --rollout-max-response-len 5 --rollout-temperature 1 --sglang-enable-deterministic-inference \
    --use-dynamic-batch-size --max-tokens-per-gpu 8192 \
    --lr 2e-4 --lr-decay-style constant --weight-decay 0 \
    --eval-config "$source_dir/data/eval.yaml" --eval-interval "$eval_interval" \
    --save "$OUTPUT/grpo" --fresh-output --save-interval "$GRPO_STEPS" --no-save-optim --save-hf "$OUTPUT/grpo/hf" $GRPO_FLAGS $dry_run
[ -z "$dry_run" ] || exit 0

phase "the same prompt before and after"
"$PYTHON" examples/tiny_cpu/ask.py --model "after SFT=$source_dir/sft/hf" --model "after GRPO=$OUTPUT/grpo/hf"
phase ""

"$PYTHON" examples/tiny_cpu/summarize.py --sft "$source_dir/sft" --grpo "$OUTPUT/grpo"
printf '\nseconds per phase\n%s%6d s  in all\n' "$summary" $SECONDS
