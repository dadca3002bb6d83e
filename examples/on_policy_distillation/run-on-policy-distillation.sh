#!/usr/bin/env bash
# On-policy distillation without a GPU: the quick start's SFT model learns from the quick start's GRPO model, with no reward.
#
#   usage: bash scripts/run-tiny-cpu.sh && bash examples/on_policy_distillation/run-on-policy-distillation.sh
#
# Environment variables:
#   FROM         OUTPUT of the quick start: student FROM/sft, teacher FROM/grpo     (outputs/tiny-cpu)
#   OUTPUT       directory of everything that is made                               (outputs/on-policy-distillation)
#   TEACHER      megatron: the trainer holds the teacher's weights; server: the Megatron teacher server does   (megatron)
#   STEPS        train steps                                                        (20)
#   SEED         seed of sampling                                                   (0)
#   MORE_FLAGS   more flags for train.py
#
# Read next: examples/on_policy_distillation/README.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
. scripts/common.sh

FROM="${FROM:-outputs/tiny-cpu}"
OUTPUT="${OUTPUT:-outputs/on-policy-distillation}"
TEACHER="${TEACHER:-megatron}"
STEPS="${STEPS:-20}"
SEED="${SEED:-0}"
MORE_FLAGS="${MORE_FLAGS:-}"

for model in sft grpo; do
    if [ ! -f "$FROM/$model/hf/config.json" ]; then
        echo "error: FROM=$FROM has no $model/hf; run OUTPUT=$FROM bash scripts/run-tiny-cpu.sh first" >&2
        exit 2
    fi
done
slime_env --cpu
mkdir -p "$OUTPUT"

case "$TEACHER" in
    megatron)
        teacher="--opd-type megatron --opd-teacher-load $FROM/grpo/hf --custom-rm-path examples.tiny_cpu.reward:exact_match
            --custom-reward-post-process-path examples.on_policy_distillation.reward:only_logged"
        ;;
    server)
        port="$(slime_free_ports 1)"
        "$PYTHON" -m slime.backends.megatron_utils.server.megatron_server --hf-checkpoint "$FROM/grpo/hf" \
            --accelerator cpu --teacher-port "$port" >"$OUTPUT/teacher.log" 2>&1 &
        server=$!
        trap 'kill "$server" 2>/dev/null || true; wait "$server" || true' EXIT
        for _ in $(seq 120); do
            curl -sf "http://127.0.0.1:$port/healthz" >/dev/null && break
            kill -0 "$server" || { cat "$OUTPUT/teacher.log" >&2; exit 1; }
            sleep 1
        done
        teacher="--opd-type sglang --rm-url http://127.0.0.1:$port/generate
            --custom-rm-path slime.rollout.on_policy_distillation.reward_func
            --custom-reward-post-process-path slime.rollout.on_policy_distillation.post_process_rewards"
        ;;
    *)
        echo "error: TEACHER=$TEACHER: megatron or server" >&2
        exit 2
        ;;
esac

# shellcheck disable=SC2086  # $teacher and MORE_FLAGS hold several words
"$PYTHON" train.py --accelerator cpu --colocate --seed "$SEED" --rollout-seed "$SEED" \
    --hf-checkpoint "$FROM/sft/hf" --model-args-from-hf \
    --prompt-data "$FROM/data/train.jsonl" --input-key prompt --label-key label --apply-chat-template --rollout-shuffle \
    --use-opd --opd-kl-coef 1 $teacher \
    --num-rollout "$STEPS" --rollout-batch-size 64 --n-samples-per-prompt 4 --global-batch-size 256 \
    --rollout-max-response-len 5 --rollout-temperature 1 --sglang-enable-deterministic-inference \
    --use-dynamic-batch-size --max-tokens-per-gpu 8192 \
    --lr 2e-4 --lr-decay-style constant --weight-decay 0 \
    --eval-config "$FROM/data/eval.yaml" --eval-interval "$STEPS" \
    --save "$OUTPUT/opd" --fresh-output --save-interval "$STEPS" --no-save-optim $MORE_FLAGS

"$PYTHON" examples/on_policy_distillation/summarize.py --run "$OUTPUT/opd" --teacher "$FROM/grpo"
