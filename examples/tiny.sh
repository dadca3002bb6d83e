# The steps of the tiny runs of all examples: a model with random weights, SFT on demonstrations, then GRPO, on two cores without a GPU.
#
# A run script sets NAME, its folder below examples/, and the numbers of steps; sources this; and calls tiny_data, tiny_sft and tiny_grpo.
#
# Environment variables:
#   OUTPUT      directory of everything that is made               (outputs/NAME)
#   SEED        seed of model, demonstrations and sampling         (0)
#   SFT_STEPS   train steps on demonstrations, a multiple of 10    (250)
#   GRPO_STEPS  GRPO steps                                         (see the run script)
#   SFT_FROM    OUTPUT of an earlier run: start from its SFT model instead of making one
#   GRPO_FLAGS  more flags for the GRPO run
#   MODEL_FLAGS flags of tools/make_tiny_model.py, which a run script may set
. scripts/common.sh

OUTPUT="${OUTPUT:-outputs/$NAME}" SEED="${SEED:-0}" SFT_STEPS="${SFT_STEPS:-250}" SFT_FROM="${SFT_FROM:-}" GRPO_FLAGS="${GRPO_FLAGS:-}" MODEL_FLAGS="${MODEL_FLAGS:-}"
if [ $((SFT_STEPS % 10)) -ne 0 ]; then
    echo "error: SFT_STEPS=$SFT_STEPS: it must be a multiple of 10" >&2
    exit 2
fi
phase "environment"
slime_env --cpu
export PYTHONPATH="$PWD/examples/$NAME:$PYTHONPATH"
source_dir="${SFT_FROM:-$OUTPUT}"
mkdir -p "$OUTPUT"

# tiny_data [flags of make_data.py]
tiny_data() {
    phase "data"
    "$PYTHON" "examples/$NAME/make_data.py" --output "$OUTPUT/data" --seed "$SEED" --num-demonstrations $((SFT_STEPS * 128)) "$@"
}

# tiny_sft [flags of train.py]: the model has one token for each text of make_data.PIECES, about as large tokenizers have for words.
tiny_sft() {
    [ -z "$SFT_FROM" ] || return 0
    phase "SFT on demonstrations of mixed quality ($SFT_STEPS steps)"
    local pieces
    mapfile -d '' -t pieces < <("$PYTHON" -c 'from make_data import PIECES; print(*PIECES, sep="\0", end="\0")')
    # shellcheck disable=SC2086  # MODEL_FLAGS holds several words
    "$PYTHON" tools/make_tiny_model.py --output "$OUTPUT/model" --seed "$SEED" --extra-tokens "${pieces[@]}" $MODEL_FLAGS
    "$PYTHON" train.py --accelerator cpu --seed "$SEED" --rollout-seed "$SEED" \
        --hf-checkpoint "$OUTPUT/model" --model-args-from-hf \
        --loss-type sft_loss --debug-train-only --disable-compute-advantages-and-returns --calculate-per-token-loss \
        --rollout-function-path slime.rollout.sft_rollout.generate_rollout \
        --prompt-data "$OUTPUT/data/sft.jsonl" --input-key messages \
        --num-rollout $((SFT_STEPS / 10)) --rollout-batch-size 1280 --global-batch-size 128 \
        --use-dynamic-batch-size --max-tokens-per-gpu 8192 \
        --lr 1e-3 --lr-decay-style constant --weight-decay 0 \
        --save "$OUTPUT/sft" --fresh-output --save-interval $((SFT_STEPS / 10)) --no-save-optim --save-hf "$OUTPUT/sft/hf" "$@"
}

# tiny_grpo FLAGS: those of the example.
tiny_grpo() {
    phase "evaluation, GRPO ($GRPO_STEPS steps), evaluation"
    # shellcheck disable=SC2086  # GRPO_FLAGS holds several words
    "$PYTHON" train.py --accelerator cpu --colocate --seed "$SEED" --rollout-seed "$SEED" \
        --hf-checkpoint "$source_dir/sft/hf" --model-args-from-hf --ref-load "$source_dir/sft" \
        --advantage-estimator grpo --num-rollout "$GRPO_STEPS" --rollout-temperature 1 \
        --use-dynamic-batch-size --max-tokens-per-gpu 8192 \
        --lr 2e-4 --lr-decay-style constant --weight-decay 0 \
        --eval-config "$OUTPUT/data/eval.yaml" --eval-interval "$GRPO_STEPS" \
        --save "$OUTPUT/grpo" --fresh-output --save-interval "$GRPO_STEPS" --no-save-optim --save-hf "$OUTPUT/grpo/hf" "$@" $GRPO_FLAGS
    phase ""
    "$PYTHON" -m examples.tiny "$OUTPUT/grpo"
    printf '\nseconds per phase\n%s%6d s  in all\n' "$summary" $SECONDS
}
