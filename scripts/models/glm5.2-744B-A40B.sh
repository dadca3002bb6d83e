# GLM-5.2: the sizes of GLM-5, and positions that reach further. Which layers take the choice of an earlier indexer is in config.json (--hf-checkpoint).
. "${BASH_SOURCE[0]%/*}/glm5-744B-A40B.sh"

MODEL_ARGS+=(--rotary-base 8000000)
