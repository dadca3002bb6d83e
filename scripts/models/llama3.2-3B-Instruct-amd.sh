# Llama-3.2-3B(-Instruct) on AMD GPUs: the same model.
. "${BASH_SOURCE[0]%/*}/llama3.2-3B-Instruct.sh"
