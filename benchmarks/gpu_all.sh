#!/usr/bin/env bash
# All benchmarks of a GPU but learning, on as many GPUs as there are: each of the four lines of work gets a GPU of its own.
#
#   usage: bash benchmarks/gpu_all.sh OUTPUT [SECONDS]     SECONDS: of one run of train.py at most (default 500)
#
# Lines that share runs of train.py are one: what a run has measured already is not run again. Results: OUTPUT/*.md, *.json.
# Reports of a line come when it ends; the logs are OUTPUT/line-*.log.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
OUTPUT="$(realpath -m "${1:?usage: bash benchmarks/gpu_all.sh OUTPUT [SECONDS]}")"
OPTIONS=(--output "$OUTPUT" --timeout "${2:-500}")
PYTHON="${SLIME_PYTHON:-python3}"
COUNT="$(nvidia-smi -L | wc -l)"
mkdir -p "$OUTPUT"

benchmark() { "$PYTHON" "benchmarks/gpu_$1.py" "${OPTIONS[@]}" "${@:2}"; }
line_0() { benchmark step --model 0.6B; benchmark weight_sync --model 0.6B; benchmark rollout; }
line_1() { benchmark sleep_wake; benchmark weight_sync --model 4B; }
line_2() { benchmark soak; benchmark log_prob_gap; }
line_3() { benchmark step --model SmolLM2-135M; benchmark log_prob_gap --explain; }

# A GPU takes its lines one after the other; the GPUs work at the same time.
for gpu in $(seq 0 $((COUNT - 1))); do
    for line in $(seq "$gpu" "$COUNT" 3); do
        CUDA_VISIBLE_DEVICES="$gpu" "line_$line" >"$OUTPUT/line-$line.log" 2>&1
    done &
done
wait
grep -h '^| ' "$OUTPUT"/line-*.log
