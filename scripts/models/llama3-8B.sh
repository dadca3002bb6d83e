# Llama-3.1-8B(-Instruct) under the name of older documents.
. "${BASH_SOURCE[0]%/*}/llama3.1-8B-Instruct.sh"
