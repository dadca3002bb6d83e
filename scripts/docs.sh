#!/usr/bin/env bash
# Build the documentation's site into build/docs; a warning is an error.
#
#   usage: bash scripts/docs.sh [--serve [PORT] | --versions TAG...]
#     --serve     then show it at http://127.0.0.1:PORT (8000)
#     --versions  also build these tags or branches, below build/docs/versions; each page lists all in its sidebar
#
# Needs `bash scripts/setup_env.sh --dev`.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
case "${1:-}" in
    '' | --serve) ;;
    --versions) export SLIME_DOCS_VERSIONS="${*:2}" ;;
    *)
        echo "docs.sh: unknown argument '$1'; usage: bash scripts/docs.sh [--serve [PORT] | --versions TAG...]" >&2
        exit 2
        ;;
esac
python=$root/.venv/bin/python
"$python" -c 'import furo, myst_parser' 2> /dev/null || {
    echo "docs.sh: Sphinx is not installed; run: bash scripts/setup_env.sh --dev" >&2
    exit 1
}
"$python" -m sphinx -q -W --keep-going -b html -c docs . build/docs
echo "built: $root/build/docs/docs/index.html"
for tag in ${SLIME_DOCS_VERSIONS:-}; do
    source=$(mktemp -d)
    trap 'rm -rf "$source"' EXIT
    git archive "$tag" | tar -x -C "$source"
    (cd "$source" && SLIME_DOCS_VERSION=$tag PYTHONPATH=$source "$python" -m sphinx -q -b html -c docs . "$root/build/docs/versions/$tag")
    rm -rf "$source"
    echo "built: $root/build/docs/versions/$tag/docs/index.html"
done
if [ "${1:-}" = --serve ]; then
    exec "$python" -m http.server --bind 127.0.0.1 --directory build/docs "${2:-8000}"
fi
