# Shell functions for the run scripts; source it: . "$(dirname "$0")/common.sh"
#
#   slime_env [setup_env.sh arguments]   bring the environment up to date and put it first on PATH; PYTHON is then its interpreter.
#                                        SLIME_PYTHON=/path/to/python uses that interpreter as it is, and installs nothing.
#   slime_train [flags of train.py]      a whole run: environment, Ray head, and train.py as a Ray job on it. With a flag that only asks
#                                        (--dry-run, --help ...) train.py answers right here: no Ray, and no installation where .venv is
#                                        complete. Without GPUs (--accelerator cpu) NUM_SLOTS=N says how many slots the run needs.
#                                        RAY_ADDRESS=host:port uses a Ray that runs already, and leaves it running; a run on
#                                        NUM_NODES > 1 machines needs one.
#   slime_only_asks [flags of train.py]  succeeds if one of the flags only asks.
#   slime_env_to_ask                     slime_env for that: a .venv that is complete is used as it is.
#   slime_ray_start NUM_SLOTS [NUM_GPUS] start a Ray head of our own on free ports, with NUM_SLOTS slime_slot resources (0: none, the
#                                        GPUs count) and at most NUM_GPUS of this machine's GPUs (default: all); sets RAY_ADDRESS and
#                                        SLIME_RAY_DASHBOARD. It ends with the script.
#   slime_ray_stop                       end that Ray head, and nothing else.
#   slime_submit COMMAND...              run a command as a Ray job on it, from the repository root, until it ends; fails when it fails.
#
# Nothing here ends a process that this script did not start: other Rays and engines on the machine are left alone.

SLIME_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
SLIME_RAY_PID=""
SLIME_RAY_DIR=""

slime_say() { printf '[slime] %s\n' "$*" >&2; }

slime_env() {
    if [ -n "${SLIME_PYTHON:-}" ]; then
        PYTHON="$SLIME_PYTHON"
    else
        bash "$SLIME_ROOT/scripts/setup_env.sh" "$@" || return
        PYTHON="$SLIME_ROOT/.venv/bin/python"
        export VIRTUAL_ENV="$SLIME_ROOT/.venv" PATH="$SLIME_ROOT/.venv/bin:$PATH"
    fi
    export PYTHON PYTHONPATH="$SLIME_ROOT${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 RAY_USAGE_STATS_ENABLED=0
}

slime_env_to_ask() {
    local venv="$SLIME_ROOT/.venv"
    # setup_env.sh leaves the stamp with its last stage, and .making where it was cut off.
    if [ -z "${SLIME_PYTHON:-}" ] && [ -f "$venv/.stamp-slime" ] && [ ! -e "$venv/.making" ]; then
        local SLIME_PYTHON="$venv/bin/python"
    fi
    slime_env
}

slime_only_asks() {
    local flag
    for flag in "$@"; do
        case "${flag%%=*}" in
            -h | --help | --dry-run | --explain | --list-unsupported | --completion) return 0 ;;
        esac
    done
    return 1
}

slime_train() {
    if slime_only_asks "$@"; then
        slime_env_to_ask || return
        (cd "$SLIME_ROOT" && "$PYTHON" train.py "$@")
        return
    fi
    if [ "${NUM_NODES:-1}" -gt 1 ] && [ -z "${RAY_ADDRESS:-}" ]; then
        slime_say "this run takes $NUM_NODES machines: start Ray on them (ray start --head --port 6379 on this one, ray start --address" \
            "THIS_HOST:6379 on the others), each with this repository and its .venv at the same place, and set RAY_ADDRESS=THIS_HOST:6379"
        return 2
    fi
    slime_env || return
    if [ -n "${RAY_ADDRESS:-}" ]; then
        (cd "$SLIME_ROOT" && "$PYTHON" train.py "$@")
        return
    fi
    slime_ray_start "${NUM_SLOTS:-0}" || return
    slime_submit "$PYTHON" train.py "$@"
}

# Prints N free TCP ports; all are held open together while they are looked for, so that no two are the same.
slime_free_ports() {
    "$PYTHON" -c 'import socket, sys
sockets = [socket.create_server(("", 0)) for _ in range(int(sys.argv[1]))]
print(*(s.getsockname()[1] for s in sockets))' "$1"
}

slime_ray_start() {
    local num_slots="${1:?slime_ray_start needs the number of slots, 0 for a machine with GPUs}" num_gpus="${2:-}" ports resources deadline
    [ -z "$SLIME_RAY_PID" ] || { slime_say "a Ray head of this script runs already (pid $SLIME_RAY_PID)"; return 1; }
    read -r -a ports <<<"$(slime_free_ports 4)"
    resources="{}"
    [ "$num_slots" -eq 0 ] || resources="{\"slime_slot\": $num_slots}"
    SLIME_RAY_DIR="$(mktemp -d "${TMPDIR:-/tmp}/slime-ray.XXXXXX")"
    # All processes of this Ray stay in the session that setsid makes, which can be ended as a whole. Not --block: it ends Ray when any of
    # its parts ends, and the client server, which nothing here uses, gives up when a busy machine starts the rest slowly.
    setsid "$PYTHON" -m ray.scripts.scripts start --head --disable-usage-stats \
        --node-ip-address 127.0.0.1 --port "${ports[0]}" --dashboard-host 127.0.0.1 --dashboard-port "${ports[1]}" \
        --dashboard-agent-listen-port "${ports[2]}" --ray-client-server-port "${ports[3]}" \
        --resources "$resources" ${num_gpus:+--num-gpus "$num_gpus"} --temp-dir "$SLIME_RAY_DIR" </dev/null >"$SLIME_RAY_DIR/head.log" 2>&1 &
    SLIME_RAY_PID=$!
    export RAY_ADDRESS="127.0.0.1:${ports[0]}" SLIME_RAY_DASHBOARD="http://127.0.0.1:${ports[1]}"
    trap slime_ray_stop EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    if ! wait "$SLIME_RAY_PID"; then
        slime_say "Ray did not start; the end of its log:"
        tail -n 20 "$SLIME_RAY_DIR/head.log" >&2
        return 1
    fi
    deadline=$((SECONDS + 120))
    until slime_ray_is_up "${ports[2]}"; do
        if [ "$SECONDS" -gt "$deadline" ]; then
            slime_say "waited 120 s for Ray's job server at $SLIME_RAY_DASHBOARD; its logs: $SLIME_RAY_DIR/session_latest/logs"
            return 1
        fi
        sleep 0.5
    done
    slime_say "Ray head at $RAY_ADDRESS, dashboard $SLIME_RAY_DASHBOARD, resources $resources"
}

# A job needs both: the head's job server takes it, and the node's agent starts it. On a busy machine the agent comes seconds later,
# and a job submitted before that is lost with a closed connection.
slime_ray_is_up() {
    "$PYTHON" -c 'import http.client, sys, urllib.request
try:
    for url in sys.argv[1:]:
        urllib.request.urlopen(url, timeout=5).read()
except (OSError, http.client.HTTPException):
    sys.exit(1)' "$SLIME_RAY_DASHBOARD/api/jobs/" "http://127.0.0.1:$1/api/local_raylet_healthz"
}

slime_ray_stop() {
    [ -n "$SLIME_RAY_PID" ] || return 0
    local session="$SLIME_RAY_PID" _
    SLIME_RAY_PID=""
    pkill -TERM -s "$session" 2>/dev/null || true
    for _ in $(seq 100); do
        pgrep -s "$session" >/dev/null || break
        sleep 0.1
    done
    pkill -KILL -s "$session" 2>/dev/null || true
    rm -rf "$SLIME_RAY_DIR"
    unset RAY_ADDRESS SLIME_RAY_DASHBOARD
}

slime_submit() {
    [ -n "$SLIME_RAY_PID" ] || { slime_say "no Ray head: call slime_ray_start first"; return 1; }
    local environment job="$SLIME_RAY_DIR/job.sh"
    environment="$("$PYTHON" -c 'import json, os, sys
print(json.dumps({"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"], "PYTHONUNBUFFERED": "1"}}))')"
    # The job starts in the Ray head's folder, not ours: hence env -C. The command goes through a file because Ray quotes it in Windows'
    # manner and gives it to a shell, which would take a $ or a bracket of an argument for its own.
    { printf '%q ' exec env -C "$SLIME_ROOT" "$@" && echo; } >"$job"
    "$PYTHON" -m ray.scripts.scripts job submit --address "$SLIME_RAY_DASHBOARD" --runtime-env-json "$environment" -- bash "$job"
}
