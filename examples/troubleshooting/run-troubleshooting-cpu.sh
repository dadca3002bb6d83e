#!/usr/bin/env bash
# Reproduce symptoms of docs/troubleshooting.md on the tiny model, and compare with the same run without a fault.
#
#   usage: bash examples/troubleshooting/run-troubleshooting-cpu.sh SYMPTOM...    about 2 minutes each on two idle cores
#     flat        the reward never finds the answer         entropy     the reward likes one response only
#     collapse    the learning rate is 25 times too high    lengths     the reward likes long responses
#     gap         the engines never get new weights         slow        the reward blocks all others
#     memory      the plan does not fit the GPU             start       no Ray answers (the last two end at once)
#
# Environment variables:
#   SFT_FROM  OUTPUT of an earlier quick start        (outputs/tiny-cpu; made by SFT where it is missing)
#   OUTPUT    directory of everything that is made    (outputs/troubleshooting)
#   STEPS     rollouts of each run                    (12)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. scripts/common.sh

OUTPUT="${OUTPUT:-outputs/troubleshooting}"
SFT_FROM="${SFT_FROM:-outputs/tiny-cpu}"
STEPS="${STEPS:-12}"
exact="examples.tiny_cpu.reward:exact_match"
faults="examples.troubleshooting.rewards"

[ $# -gt 0 ] || set -- ""
for symptom in "$@"; do
    case "$symptom" in
        flat | collapse | entropy | lengths | gap | slow | memory | start) ;;
        *)
            echo "error: '$symptom' is no symptom: flat, collapse, entropy, lengths, gap, slow, memory or start" >&2
            exit 2
            ;;
    esac
done
slime_env --cpu
[ -d "$SFT_FROM/sft/hf" ] || OUTPUT="$SFT_FROM" GRPO_STEPS=0 bash scripts/run-tiny-cpu.sh

# run NAME DRIVER FLAG...: a run of the quick start's model with these flags; a flag that is given twice counts last.
run() {
    local name="$1" driver="$2"
    shift 2
    "$PYTHON" "$driver" --accelerator cpu --hf-checkpoint "$SFT_FROM/sft/hf" --model-args-from-hf \
        --prompt-data "$SFT_FROM/data/train.jsonl" --input-key prompt --label-key label --apply-chat-template \
        --rollout-shuffle --num-rollout "$STEPS" --rollout-batch-size 32 \
        --n-samples-per-prompt 8 --global-batch-size 256 --rollout-max-response-len 5 --use-dynamic-batch-size \
        --max-tokens-per-gpu 8192 --lr 2e-4 --lr-decay-style constant --weight-decay 0 --keep-rollouts none \
        --output-dir "$OUTPUT/$name" --fresh-output "$@"
}

# said NAME TEXT COMMAND...: run a command that must say TEXT before it starts anything; keep and show it.
said() {
    local name="$1" text="$2"
    shift 2
    mkdir -p "$OUTPUT/$name"
    "$@" > "$OUTPUT/$name/console.txt" 2>&1 || true
    grep -B 3 -A 3 "$text" "$OUTPUT/$name/console.txt" || {
        echo "error: $name: '$text' was expected in $OUTPUT/$name/console.txt" >&2
        exit 1
    }
}

# The same run without a fault, for comparison: made once.
healthy() { [ -f "$OUTPUT/healthy/metrics.jsonl" ] || run healthy train.py --colocate --custom-rm-path "$exact"; }

for symptom in "$@"; do
    case "$symptom" in
        memory | start) ;;
        *) healthy ;;
    esac
    case "$symptom" in
        flat) run flat train.py --colocate --rm-type math ;; # it looks for \boxed{...}, which this model never writes
        collapse) run collapse train.py --colocate --custom-rm-path "$exact" --lr 5e-3 ;;
        entropy) run entropy train.py --colocate --custom-rm-path "$faults:sevens" --lr 1e-3 ;;
        lengths)
            run lengths train.py --colocate --custom-rm-path "$faults:long" --lr 1e-3 --rollout-max-response-len 64
            ;;
        gap)
            run gap train_async.py --rollout-num-gpus 1 --custom-rm-path "$exact" --use-rollout-logprobs \
                --update-weights-interval "$STEPS"
            ;;
        slow) run slow train.py --colocate --custom-rm-path "$faults:blocking" ;;
        memory) # the plan of a run that gives its engines all of a GPU
            said memory "DOES NOT FIT" "$PYTHON" train.py --accelerator cuda --plan-device h100-80gb --colocate --no-offload-train \
                --no-offload-rollout --hf-checkpoint "$SFT_FROM/sft/hf" --model-args-from-hf --rm-type math \
                --prompt-data "$SFT_FROM/data/train.jsonl" --input-key prompt --label-key label --apply-chat-template \
                --sglang-mem-fraction-static 0.99 --max-tokens-per-gpu 8000000 --use-dynamic-batch-size \
                --num-rollout 1 --rollout-batch-size 64 --n-samples-per-prompt 8 --global-batch-size 512 --dry-run
            ;;
        start)
            said start "no Ray answers" env RAY_ADDRESS=127.0.0.1:1 "$PYTHON" train.py --accelerator cpu --colocate \
                --hf-checkpoint "$SFT_FROM/sft/hf" --model-args-from-hf --rm-type math \
                --prompt-data "$SFT_FROM/data/train.jsonl" --input-key prompt --label-key label --apply-chat-template \
                --num-rollout 1 --rollout-batch-size 1 --n-samples-per-prompt 8 --global-batch-size 8 \
                --output-dir "$OUTPUT/start/run" --fresh-output
            ;;
    esac
done
"$PYTHON" examples/troubleshooting/plot.py --runs "$OUTPUT" --output "$OUTPUT"
