# Qwen3-4B under the name of older documents.
. "${BASH_SOURCE[0]%/*}/qwen3-4B.sh"
