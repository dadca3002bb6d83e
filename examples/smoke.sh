#!/usr/bin/env bash
# Runs a script of the full size as it is, but for two rollouts of a tiny model of its family, on CPU: what is wrong shows before a GPU is paid for.
#
#   usage: bash examples/smoke.sh fully_async/run-qwen2.5-0.5B-fully_async.sh [flags of train.py]
#
# The script's own flags stay, but for sizes, layout, prompts and numbers of samples. Flags that are given here override all others.
#
# Environment variables:
#   OUTPUT      directory of everything that is made                              (outputs/smoke/SCRIPT)
#   FAMILY      of the model, as `tools/make_tiny_model.py --family` has them     (read off the script's model)
#   NUM_SLOTS   trainers and engines                                              (2)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/common.sh

script="examples/${1:?which script, below examples/}"
shift
if [ ! -f "$script" ]; then
    echo "error: $script does not exist; name a script as below examples/, such as fully_async/run-qwen2.5-0.5B-fully_async.sh" >&2
    exit 2
fi
OUTPUT="$(realpath -m "${OUTPUT:-outputs/smoke/$(basename "$script" .sh)}")"
rm -rf "$OUTPUT"
mkdir -p "$OUTPUT/home"
slime_env --cpu

model="$(grep -ohE 'scripts/models/[^ ]+\.sh' "$script" "$(dirname "$script")"/*.sh | head -n 1)"
case "$(basename "$model")" in
    qwen2*) family=qwen2 ;;
    qwen3.5*) family=qwen3_5 ;;
    qwen3*) family=qwen3 ;;
    glm4.7-30B*) family=glm4_moe_lite ;;
    *) family="${FAMILY:?of the model of $script: see tools/make_tiny_model.py --help}" ;;
esac
untied=()
! grep -q -- --untie-embeddings-and-output-weights "$model" || [[ "$family" == *moe* ]] || untied=(--no-tie-embeddings)
"$PYTHON" tools/make_tiny_model.py --family "${FAMILY:-$family}" "${untied[@]}" --output "$OUTPUT/model"

mapfile -t sizes < <("$PYTHON" - "$OUTPUT" <<'PY'
import json, pathlib, sys
from slime.models.hf_config import model_args_from_hf

output = pathlib.Path(sys.argv[1])
names = {"layernorm_epsilon": "norm_epsilon", "num_moe_experts": "num_experts"}
for name, value in model_args_from_hf(json.loads((output / "model" / "config.json").read_text())).items():
    if value is not None and not isinstance(value, bool):
        print("--" + names.get(name, name).replace("_", "-"), json.dumps(value).replace(" ", "").strip('"'), sep="\n")
sums = ((i, i * 7 % 50) for i in range(64))
rows = [{"prompt": [{"role": "user", "content": f"{a}+{b}="}], "label": str(a + b)} for a, b in sums]
(output / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
PY
)
unset WANDB_API_KEY
export SLIME_PYTHON="$PYTHON" SLIME_HOME="$OUTPUT/home" NUM_SLOTS="${NUM_SLOTS:-2}" LOCAL_DIR="$OUTPUT/local" DISK_DIR="$OUTPUT/weights"
# A Ray of our own, so that a script for several machines is content with this one.
slime_only_asks "$@" || slime_ray_start "$NUM_SLOTS"
bash "$script" "${sizes[@]}" --accelerator cpu --attention-backend auto \
    --hf-checkpoint "$OUTPUT/model" --ref-load "$OUTPUT/model" --load "$OUTPUT/checkpoint" --save "$OUTPUT/checkpoint" --save-interval 2 \
    --output-dir "$OUTPUT/run" --prompt-data "$OUTPUT/prompts.jsonl" \
    --actor-num-nodes 1 --actor-num-gpus-per-node 1 --rollout-num-gpus 1 --rollout-num-gpus-per-engine 1 \
    --tensor-model-parallel-size 1 --context-parallel-size 1 --expert-model-parallel-size 1 \
    --num-rollout 2 --rollout-batch-size 4 --n-samples-per-prompt 4 --global-batch-size 16 \
    --rollout-max-response-len 16 --max-tokens-per-gpu 1024 "$@"
