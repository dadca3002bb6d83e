# The first 20 layers of DeepSeek-V3, three of them dense: to try on a few GPUs what the whole model needs many for.
. "${BASH_SOURCE[0]%/*}/deepseek-v3.sh"
MODEL_ARGS+=(--num-layers 20 --moe-layer-freq "[0]*3+[1]*17")
