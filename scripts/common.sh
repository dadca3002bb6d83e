# Shell functions for the run scripts; source it: . "$(dirname "$0")/common.sh"
#
#   slime_env [setup_env.sh arguments]   bring the environment up to date and put it first on PATH; PYTHON is then its interpreter.
#                                        SLIME_PYTHON=/path/to/python uses that interpreter as it is, and installs nothing.
#   slime_ray_start NUM_SLOTS            start a Ray head of our own on free ports, with NUM_SLOTS slime_slot resources (0: none, the
#                                        GPUs count); sets RAY_ADDRESS and SLIME_RAY_DASHBOARD. It ends with the script.
#   slime_ray_stop                       end that Ray head, and nothing else.
#   slime_submit COMMAND...              run a command as a Ray job on it, from the repository root, until it ends; its status is returned.
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

# Prints N free TCP ports; all are held open together while they are looked for, so that no two are the same.
slime_free_ports() {
    "$PYTHON" -c 'import socket, sys
sockets = [socket.create_server(("", 0)) for _ in range(int(sys.argv[1]))]
print(*(s.getsockname()[1] for s in sockets))' "$1"
}

slime_ray_start() {
    local num_slots="${1:?slime_ray_start needs the number of slots, 0 for a machine with GPUs}" ports resources deadline
    [ -z "$SLIME_RAY_PID" ] || { slime_say "a Ray head of this script runs already (pid $SLIME_RAY_PID)"; return 1; }
    read -r -a ports <<<"$(slime_free_ports 4)"
    resources="{}"
    [ "$num_slots" -eq 0 ] || resources="{\"slime_slot\": $num_slots}"
    SLIME_RAY_DIR="$(mktemp -d "${TMPDIR:-/tmp}/slime-ray.XXXXXX")"
    # --block under setsid: every process of this Ray is then a child in a session of its own, which can be ended as a whole.
    setsid "$PYTHON" -m ray.scripts.scripts start --head --block --disable-usage-stats \
        --node-ip-address 127.0.0.1 --port "${ports[0]}" --dashboard-host 127.0.0.1 --dashboard-port "${ports[1]}" \
        --dashboard-agent-listen-port "${ports[2]}" --ray-client-server-port "${ports[3]}" \
        --resources "$resources" --temp-dir "$SLIME_RAY_DIR" </dev/null >"$SLIME_RAY_DIR/head.log" 2>&1 &
    SLIME_RAY_PID=$!
    export RAY_ADDRESS="127.0.0.1:${ports[0]}" SLIME_RAY_DASHBOARD="http://127.0.0.1:${ports[1]}"
    trap slime_ray_stop EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    deadline=$((SECONDS + 120))
    until slime_ray_is_up; do
        if ! kill -0 "$SLIME_RAY_PID" 2>/dev/null || [ "$SECONDS" -gt "$deadline" ]; then
            slime_say "Ray did not start within 120 s; the end of its log:"
            tail -n 20 "$SLIME_RAY_DIR/head.log" >&2
            return 1
        fi
        sleep 0.5
    done
    slime_say "Ray head at $RAY_ADDRESS, dashboard $SLIME_RAY_DASHBOARD, resources $resources"
}

# The job server answers last, so its answer means that the rest is there.
slime_ray_is_up() {
    "$PYTHON" -c 'import sys, urllib.request
try:
    urllib.request.urlopen(sys.argv[1] + "/api/jobs/", timeout=5).read()
except OSError:
    sys.exit(1)' "$SLIME_RAY_DASHBOARD"
}

slime_ray_stop() {
    [ -n "$SLIME_RAY_PID" ] || return 0
    local pid="$SLIME_RAY_PID" _
    SLIME_RAY_PID=""
    kill -TERM "$pid" 2>/dev/null || true
    for _ in $(seq 100); do
        kill -0 "$pid" 2>/dev/null || break
        sleep 0.1
    done
    pkill -KILL -s "$pid" 2>/dev/null || true # what is left of the session that setsid made, found by its id
    rm -rf "$SLIME_RAY_DIR"
    unset RAY_ADDRESS SLIME_RAY_DASHBOARD
}

slime_submit() {
    [ -n "${SLIME_RAY_DASHBOARD:-}" ] || { slime_say "no Ray head: call slime_ray_start first"; return 1; }
    local environment
    environment="$("$PYTHON" -c 'import json, os, sys
print(json.dumps({"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"], "PYTHONUNBUFFERED": "1"}}))')"
    # The job starts in the Ray head's folder, not ours: hence the cd.
    "$PYTHON" -m ray.scripts.scripts job submit --address "$SLIME_RAY_DASHBOARD" --runtime-env-json "$environment" \
        -- bash -c 'cd "$1" && shift && exec "$@"' slime-job "$SLIME_ROOT" "$@"
}
