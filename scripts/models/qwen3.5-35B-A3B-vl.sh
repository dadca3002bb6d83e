# Qwen3.5-35B-A3B with images: --multimodal-keys builds the part that sees them, which is no flag of the model.
. "${BASH_SOURCE[0]%/*}/qwen3.5-35B-A3B.sh"
