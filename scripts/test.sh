#!/usr/bin/env bash
# The whole check, the same for a person and for CI: environment, lint, format, types, bandit, pip-audit, and every test that needs neither a GPU nor
# minutes. Arguments go to pytest (bash scripts/test.sh tests/unit/test_types.py -x); pytest's summary is the last line.
# --fast, as the first argument: lint, and the unit tests, contracts and losses that start no trainers, converters, sandboxes, Ray or SGLang.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash scripts/setup_env.sh --cpu --dev
export PATH="$PWD/.venv/bin:$PATH" VIRTUAL_ENV="$PWD/.venv" PYTHONUNBUFFERED=1 RAY_USAGE_STATS_ENABLED=0 TOKENIZERS_PARALLELISM=false
export HF_HUB_OFFLINE=1 WANDB_MODE=offline MPLBACKEND=Agg
unset PYTHONDONTWRITEBYTECODE # hundreds of processes import slime; each would compile it anew

echo "== lint"
ruff check .
echo "== format"
ruff format --check .
if [ "${1:-}" = --fast ]; then
    shift
    echo "== fast tests"
    losses=(tests/training/algorithms/test_{aggregation,estimators,extreme_log_probs,gae,kl,mis,off_policy,policy_losses}.py)
    # One worker more than there are cores: a third of the time a test waits.
    exec python -m pytest -n "$(($(nproc) + 1))" --no-loadscope-reorder -m "not gpu and not slow and not processes" --durations=30 \
        tests/unit tests/contracts tests/docs/test_style.py "${losses[@]}" "$@" </dev/null
fi
echo "== types and security"
bandit --quiet --severity-level medium --recursive slime slime_plugins tools train.py train_async.py &
mypy
wait $!
python tools/audit_packages.py requirements-cpu.txt requirements-dev.txt
echo "== tests"
exec python -m pytest -n 2 --no-loadscope-reorder -m "not gpu and not slow" --durations=30 "$@" </dev/null
