# Qwen3.5-35B-A3B under the name of its images, which stay as they are.
. "${BASH_SOURCE[0]%/*}/qwen3.5-35B-A3B.sh"
