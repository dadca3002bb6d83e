#!/usr/bin/env bash
# Makes the project's Python environment, .venv in the repository, or brings it up to date. Safe to run at any time: what is there is
# kept, what a cut-off run left half done is done again, and when nothing has changed it returns at once.
#
#   usage: bash scripts/setup_env.sh [--cpu | --cuda] [--dev] [--bench] [--fresh]
#     --cpu, --cuda   which stack to install; by default cuda if nvidia-smi lists a GPU, else cpu
#     --dev           also lint, types and test tools (requirements-dev.txt)
#     --bench         also what the comparison benchmarks need (requirements-bench.txt)
#     --fresh         remove .venv first
#   PYTHON=/path/to/python3.11 names the interpreter (3.11 or newer).
#
# It knows nothing about running slime: scripts/common.sh and train.py do that.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv"
device="" dev="" bench="" fresh=""
started=$SECONDS

say() { printf '[setup_env] %s\n' "$*" >&2; }
fail() { printf 'error: %s\n' "$*" >&2; exit 2; }

while [ $# -gt 0 ]; do
    case "$1" in
        --cpu) device=cpu ;;
        --cuda) device=cuda ;;
        --dev) dev=1 ;;
        --bench) bench=1 ;;
        --fresh) fresh=1 ;;
        -h | --help) sed -n '2,12s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
        *) fail "unknown argument $1: use --cpu, --cuda, --dev, --bench or --fresh" ;;
    esac
    shift
done

usable() { [ "$("$1" -c 'import sys, venv, ensurepip; print(sys.version_info >= (3, 11))' 2>/dev/null)" = True ]; }

version_of() { if command -v "$1" >/dev/null 2>&1; then "$1" --version 2>&1 | head -n 1; else echo "not there"; fi; }

# Prints the interpreter to use. python3.11 goes first: the pins were tried with it most.
find_python() {
    local candidate remedy
    remedy="install Python 3.11 or newer with its venv module (on Debian: apt-get install python3 python3-venv),"
    remedy="$remedy or name one: PYTHON=/path/to/python3.11 bash scripts/setup_env.sh"
    if [ -n "${PYTHON:-}" ]; then
        usable "$PYTHON" || fail "PYTHON=$PYTHON ($(version_of "$PYTHON")) is not a Python >= 3.11 with venv: $remedy"
        echo "$PYTHON"
        return
    fi
    for candidate in python3.11 python3 python3.12 python3.13 python; do
        if usable "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    fail "no Python >= 3.11 with venv found; python3 is $(version_of python3): $remedy"
}

pick_device() {
    if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then echo cuda; else echo cpu; fi
}

# Two runs at once (a test and a run script, say) would install over each other.
take_lock() {
    command -v flock >/dev/null 2>&1 || return 0
    exec 9>"$root/.venv.lock"
    flock -n 9 || { say "another setup_env.sh is at work, waiting for it"; flock -w 1800 9 || fail "waited 1800 s for $root/.venv.lock"; }
}

make_venv() {
    if [ -f "$venv/bin/activate" ] && ! grep -qF "$venv" "$venv/bin/activate"; then
        say "$venv was made in another folder, and cannot be moved"
        rm -rf "$venv"
    fi
    if [ -x "$venv/bin/python" ] && [ ! -e "$venv/.making" ] && usable "$venv/bin/python" && "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        return
    fi
    local python
    python="$(find_python)" || exit 2
    say "making $venv with $("$python" --version 2>&1)"
    rm -rf "$venv"
    mkdir "$venv"
    touch "$venv/.making" # a cut before the last line leaves it, and the next run starts over
    "$python" -m venv "$venv"
    rm "$venv/.making"
}

# pip writes INSTALLER once all files of a package are there: metadata without it is a package that a cut left incomplete.
clear_cut_packages() {
    local site info
    site="$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    rm -rf "$site"/~*
    for info in "$site"/*.dist-info; do
        [ -e "$info/INSTALLER" ] || { say "removing the incomplete $(basename "$info")"; rm -rf "$info"; }
    done
}

# One stage: NAME, the FILES that decide whether it is still up to date, then the command. A stamp is written when it has succeeded.
stage() {
    local name="$1" files="$2" stamp="$venv/.stamp-$1" key
    shift 2
    # shellcheck disable=SC2086  # $files holds several names
    key="$("$venv/bin/python" -V) $device $(cd "$root" && cat $files | sha256sum)"
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$key" ]; then return; fi
    # A later stage may depend on this one (the pins go over torch's own choices): all stamps that follow are void.
    [ "$work_done" ] || { work_done=1; clear_cut_packages; }
    local since=$SECONDS
    say "$name: installing"
    "$@" || { say "$name: failed (see above); run this again, what is installed already is kept"; exit 1; }
    printf '%s' "$key" >"$stamp"
    say "$name: done in $((SECONDS - since)) s"
}

pip_install() { "$venv/bin/python" -m pip install -qq --disable-pip-version-check --no-input "$@" </dev/null; }
install_cpu() {
    pip_install --no-deps -r "$root/requirements-cpu.txt"
    # A torchvision that was built for another torch, as PyPI's is for CUDA: without its compiled operators, which nothing here
    # calls, all that keeps it from being imported is that it describes two of them.
    "$venv/bin/python" -c 'import torchvision' 2>/dev/null && return
    local site
    site="$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
    sed -i -E 's/^@(torch\.library\.register_fake\("torchvision::q?nms"\))$/@(\1 if torchvision.extension._has_ops() else lambda fn: fn)/' \
        "$site/torchvision/_meta_registrations.py"
    "$venv/bin/python" -c 'import torchvision'
}
install_torch() { pip_install "$(grep '^torch==' "$root/requirements-cpu.txt")" -c "$root/requirements-cpu.txt"; }

install_stages() {
    if [ "$device" = cuda ]; then
        stage gpu requirements.txt pip_install -r "$root/requirements.txt"
    else
        # torch goes first, by itself and with its dependencies: whichever build the machine's package index prefers is what fits it.
        stage torch requirements-cpu.txt install_torch
        stage cpu requirements-cpu.txt install_cpu
    fi
    [ -z "$dev" ] || stage dev requirements-dev.txt pip_install --no-deps -r "$root/requirements-dev.txt"
    [ -z "$bench" ] || stage bench requirements-bench.txt pip_install --no-deps -r "$root/requirements-bench.txt"
    # Editable and without dependencies: `import slime` works from any folder and sees the working tree.
    stage slime "setup.py pyproject.toml" pip_install --no-deps --no-build-isolation -e "$root"
}

work_done=""
take_lock
if [ "$fresh" ]; then
    python="$(find_python)" || exit 2 # before anything is removed
    say "removing $venv"
    rm -rf "$venv"
fi
make_venv
if [ -z "$device" ]; then device="$(cat "$venv/.device" 2>/dev/null || pick_device)"; fi
printf '%s' "$device" >"$venv/.device"
install_stages
if [ "$work_done" ]; then
    "$venv/bin/python" -c 'import slime, torch; print(f"[setup_env] torch {torch.__version__}, slime from {slime.__path__[0]}")' >&2
    say "environment ready ($device) in $((SECONDS - started)) s; use it with: source .venv/bin/activate"
fi
