#!/usr/bin/env bash
# A tiny model learns to search twice before it answers: SFT on demonstrations, then GRPO against a real retrieval server, without a GPU.
#
#   usage: bash examples/search-r1/run-tiny.sh
#
# Environment variables: OUTPUT, SEED, SFT_STEPS (250), GRPO_STEPS (16), SFT_FROM, GRPO_FLAGS, as examples/tiny.sh has them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
NAME=search-r1 GRPO_STEPS="${GRPO_STEPS:-16}"
. examples/tiny.sh

port="$(slime_free_ports 1)"
tiny_data --search-url "http://127.0.0.1:$port/retrieve"
rm -f "$OUTPUT/retriever.port"
"$PYTHON" examples/search-r1/local_dense_retriever/retrieval_server.py --corpus_path "$OUTPUT/data/corpus.jsonl" \
    --port "$port" --port_file "$OUTPUT/retriever.port" &
retriever=$!
trap 'kill "$retriever" 2>/dev/null || true' EXIT
for _ in $(seq 300); do
    [ ! -e "$OUTPUT/retriever.port" ] || break
    kill -0 "$retriever" || exit 1
    sleep 0.2
done

tiny_sft
tiny_grpo --prompt-data "$OUTPUT/data/train.jsonl" --input-key prompt --label-key reward_model --apply-chat-template --rollout-shuffle \
    --custom-generate-function-path generate_with_search.generate --custom-rm-path generate_with_search.reward_func \
    --custom-config-path "$OUTPUT/data/search.yaml" --log-multi-turn \
    --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256 --rollout-max-response-len 12
