#!/usr/bin/env bash
# Makes a conda (or mamba, micromamba) environment with the GPU stack of requirements.txt, and slime in it in editable mode.
#   usage: bash build_conda.sh [NAME]      NAME is "slime" by default; an environment of that name is brought up to date
set -euo pipefail

case "${1:-}" in
    -h | --help) sed -n '2,3s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    -*) echo "error: unknown argument $1: the one argument is the name of the environment" >&2; exit 2 ;;
esac
name="${1:-slime}"
root="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

conda=""
for candidate in micromamba mamba conda; do
    if command -v "$candidate" >/dev/null 2>&1; then conda="$candidate"; break; fi
done
[ -n "$conda" ] || { echo "error: none of conda, mamba, micromamba is on PATH; without one: bash scripts/setup_env.sh --cuda" >&2; exit 2; }

if ! "$conda" run -n "$name" python --version >/dev/null 2>&1; then
    "$conda" create -y -n "$name" python=3.12 pip
fi
"$conda" run -n "$name" python -m pip install -r "$root/requirements.txt"
"$conda" run -n "$name" python -m pip install --no-deps -e "$root"
"$conda" run -n "$name" python -c 'import slime, torch; print("torch", torch.__version__, "CUDA", torch.version.cuda)'
echo "ready: $conda activate $name"
