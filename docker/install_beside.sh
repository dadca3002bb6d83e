#!/usr/bin/env bash
# Installs what requirements.txt pins into a Python that has torch and SGLang already, and leaves these as they are: for ROCm, where
# they come with an image or are built.
#   usage: bash docker/install_beside.sh      PYTHON=/path/to/python names another interpreter than python3
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="${PYTHON:-python3}"
# Built for the GPU: the versions that are there stay, and so does what was built against them.
of_the_gpu="torch|torchvision|torchaudio|triton|pytorch-triton-rocm|sglang|numpy|aiter"
cuda_only="torch_memory_saver"

for module in torch sglang; do
    "$python" -c "import $module" 2>/dev/null || {
        echo "error: $python has no $module; use SGLang's image for ROCm, or build both for it first (docs/amd.md)" >&2
        exit 2
    }
done
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
"$python" -m pip list --format=freeze | grep -iE "^($of_the_gpu)==" >"$work/kept.txt"
grep -vE "^($of_the_gpu|$cuda_only)==|^#|^$" "$root/requirements.txt" >"$work/wanted.txt"
"$python" -m pip install -c "$work/kept.txt" -r "$work/wanted.txt"
