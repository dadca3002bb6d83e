# Shell functions for the run scripts; source it: . "$(dirname "$0")/common.sh"
#
#   slime_env [setup_env.sh arguments]   bring the environment up to date and put it first on PATH; PYTHON is then its interpreter.
#                                        SLIME_PYTHON=/path/to/python uses that interpreter as it is, and installs nothing.
#   slime_train [flags of train.py]      a whole run: environment, Ray head, and train.py as a Ray job on it. With a flag that only asks
#                                        (--dry-run, --help ...) train.py answers right here: no Ray, and no installation where .venv is
#                                        complete. Without GPUs (--accelerator cpu) NUM_SLOTS=N says how many slots the run needs.
#                                        RAY_ADDRESS=host:port uses a Ray that runs already, and leaves it running. Without it a run
#                                        on NUM_NODES > 1 machines needs MASTER_ADDR, this machine's address for the others: the Ray
#                                        head listens there, at MASTER_PORT (6379), and the others join by scripts/ray_worker.sh. Those
#                                        of WORKERS="host host ..." are made to, over ssh.
#                                        DRIVER=train_async.py runs that instead of train.py.
#   slime_only_asks [flags of train.py]  succeeds if one of the flags only asks.
#   slime_env_to_ask                     slime_env for that: a .venv that is complete is used as it is.
#   slime_ray_start NUM_SLOTS [NUM_GPUS] start a Ray head of our own on free ports, with NUM_SLOTS slime_slot resources (0: none, the
#                                        GPUs count) and at most NUM_GPUS of this machine's GPUs (default: all); sets RAY_ADDRESS and
#                                        SLIME_RAY_DASHBOARD. It ends with the script.
#   slime_ray_join HOST:PORT [ADDRESS]   the same of a worker: a Ray node of our own that joins a head (at ADDRESS, its own), until the
#                                        head ends. NUM_SLOTS as in slime_train.
#                                        Both answer only who has the Ray's token (RAY_AUTH_MODE=token): a head makes one for this run,
#                                        a worker is given it in RAY_AUTH_TOKEN or the file RAY_AUTH_TOKEN_PATH; a head takes those, too.
#   slime_ray_stop                       end that Ray head or node, and nothing else.
#   slime_submit COMMAND...              run a command as a Ray job on it, from the repository root, until it ends; fails when it fails.
#
# Nothing here ends a process that this script did not start: other Rays and engines on the machine are left alone.

SLIME_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
SLIME_RAY_PID=""
SLIME_RAY_DIR=""
SLIME_WORKER_PIDS=()

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
    if ! [[ "${NUM_NODES:-1}" =~ ^[1-9][0-9]*$ ]]; then
        slime_say "NUM_NODES=$NUM_NODES is no number of machines"
        return 2
    fi
    if slime_only_asks "$@"; then
        slime_env_to_ask || return
        (cd "$SLIME_ROOT" && "$PYTHON" "${DRIVER:-train.py}" "$@")
        return
    fi
    if [ "${NUM_NODES:-1}" -gt 1 ] && [ -z "${RAY_ADDRESS:-}${MASTER_ADDR:-}" ]; then
        slime_say "this run takes $NUM_NODES machines, each with this repository and its .venv at the same place: set MASTER_ADDR to this" \
            "machine's address and WORKERS='host host ...' to the others (over ssh; or run scripts/ray_worker.sh there), or RAY_ADDRESS=host:port" \
            "of a Ray that spans them; docs/multi_node.md, also for Slurm and Kubernetes"
        return 2
    fi
    slime_env || return
    if [ -n "${RAY_ADDRESS:-}" ]; then
        (cd "$SLIME_ROOT" && "$PYTHON" "${DRIVER:-train.py}" "$@")
        return
    fi
    slime_ray_start "${NUM_SLOTS:-0}" || return
    if [ "${NUM_NODES:-1}" -gt 1 ]; then
        slime_start_workers
        slime_wait_nodes "$(slime_num_machines)" || return
    fi
    slime_submit "$PYTHON" "${DRIVER:-train.py}" "$@"
}

# Prints how many machines are to join: NUM_NODES are those of the trainer, engines of their own may have more.
slime_num_machines() {
    local workers count="${NUM_NODES:-1}" given
    read -r -a workers <<<"${WORKERS:-}"
    for given in "$((${#workers[@]} + 1))" "${SLIME_JOB_NODES:-0}"; do
        [ "$given" -le "$count" ] || count="$given"
    done
    echo "$count"
}

# Over ssh, each machine of WORKERS; what they say is in a log each. They end with the head, and when this script ends.
slime_start_workers() {
    local worker name variables=() own token
    if [ -z "${WORKERS:-}" ]; then
        slime_say "on each other machine, with a copy of $RAY_AUTH_TOKEN_PATH:" \
            "RAY_AUTH_TOKEN_PATH=COPY bash $SLIME_ROOT/scripts/ray_worker.sh $RAY_ADDRESS"
        return
    fi
    for name in SLIME_PYTHON NUM_SLOTS "${!NCCL_@}" "${!GLOO_@}"; do
        [ -z "${!name:-}" ] || variables+=("$(printf '%q' "$name=${!name}")")
    done
    for worker in $WORKERS; do
        own=""
        [[ "$worker" =~ [^0-9.] ]] || own="$worker"
        slime_say "starting Ray on $worker, log $SLIME_RAY_DIR/worker_$worker.log"
        # The token goes through standard input and a file: every user of a machine can read command lines.
        token="$(ssh -o BatchMode=yes "$worker" 'umask 077 && file="$(mktemp)" && cat >"$file" && echo "$file"' \
            <"$RAY_AUTH_TOKEN_PATH" 2>"$SLIME_RAY_DIR/worker_$worker.log")" || continue # slime_wait_nodes shows the log
        # The terminal (-tt) ends what runs there when this end goes away.
        ssh -tt -o BatchMode=yes "$worker" "RAY_AUTH_TOKEN=\"\$(cat $token && rm $token)\"" "${variables[@]}" \
            bash "$(printf '%q' "$SLIME_ROOT/scripts/ray_worker.sh")" "$RAY_ADDRESS" ${own:+"$own"} \
            </dev/null >"$SLIME_RAY_DIR/worker_$worker.log" 2>&1 &
        SLIME_WORKER_PIDS+=($!)
    done
}

# Python for the two functions that ask our Ray's dashboard.
SLIME_ASK='import http.client, json, os, sys, time, urllib.request
def ask(url):
    with open(os.environ["RAY_AUTH_TOKEN_PATH"]) as token:
        headers = {"Authorization": "Bearer " + token.read().strip()}
    return json.load(urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10))
def nodes(dashboard):
    return ask(dashboard + "/nodes?view=summary")["data"]["summary"]
'

# slime_wait_nodes COUNT: wait until so many machines are in our Ray; SLIME_NODES_DEADLINE_S seconds (600) at most.
slime_wait_nodes() {
    "$PYTHON" -c "$SLIME_ASK"'url, wanted, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
end = time.monotonic() + seconds
while True:
    try:
        alive = [node["ip"] for node in nodes(url) if node.get("raylet", {}).get("state") == "ALIVE"]
    except (OSError, http.client.HTTPException):
        alive = []
    if len(alive) >= wanted:
        break
    if time.monotonic() > end:
        sys.exit(f"[slime] waited {seconds:.0f} s for {wanted} machines; these have joined: {chr(32).join(alive)}")
    time.sleep(1)' "$SLIME_RAY_DASHBOARD" "$1" "${SLIME_NODES_DEADLINE_S:-600}" && return
    local log
    for log in "$SLIME_RAY_DIR"/worker_*.log; do
        [ ! -f "$log" ] || { slime_say "the end of $log:"; tail -n 5 "$log" >&2; }
    done
    return 1
}

# Prints N free TCP ports that differ. They are bound only seconds later, so they lie where nobody gets a port by chance: below those that
# the kernel gives to whoever asks for any, as Ray's own parts do by the dozen, and above those of Ray's workers.
slime_free_ports() {
    "$PYTHON" -c 'import itertools, random, sys
from slime.ray.rollout.router import is_free
tried = random.SystemRandom().sample(range(20000, 32000), 1000)
print(*itertools.islice((port for port in tried if is_free("", port)), int(sys.argv[1])))' "$1"
}

slime_ray_start() {
    local num_slots="${1:?slime_ray_start needs the number of slots, 0 for a machine with GPUs}" num_gpus="${2:-}" ports resources deadline
    local host=127.0.0.1
    [ -z "$SLIME_RAY_PID" ] || { slime_say "a Ray head of this script runs already (pid $SLIME_RAY_PID)"; return 1; }
    read -r -a ports <<<"$(slime_free_ports 3)"
    if [ "${NUM_NODES:-1}" -gt 1 ]; then
        host="${MASTER_ADDR:?a Ray of several machines needs MASTER_ADDR, the address of this machine for the others}"
        ports[0]="${MASTER_PORT:-6379}"
        if ! "$PYTHON" -c 'import socket, sys; socket.create_server((sys.argv[1], int(sys.argv[2]))).close()' "$host" "${ports[0]}" 2>/dev/null; then
            slime_say "MASTER_ADDR=$host MASTER_PORT=${ports[0]}: no Ray head can listen there, for this machine has another address (run the" \
                "script on $host), or the port is taken (another Ray? set MASTER_PORT)"
            return 2
        fi
    fi
    resources="{}"
    [ "$num_slots" -eq 0 ] || resources="{\"slime_slot\": $num_slots}"
    SLIME_RAY_DIR="$(mktemp -d "${TMPDIR:-/tmp}/slime-ray.XXXXXX")" || return
    [ -n "${RAY_AUTH_TOKEN:-}${RAY_AUTH_TOKEN_PATH:-}" ] || RAY_AUTH_TOKEN="$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')"
    slime_ray_token || return
    # Ray opens the folder that it is given to everybody, so it gets one within ours, which mktemp has made for this user alone.
    # All processes of this Ray stay in the session that setsid makes, which can be ended as a whole. Not --block: it ends Ray when any of
    # its parts ends, and the client server, which nothing here uses, gives up when a busy machine starts the rest slowly.
    # Where Ray makes no clusters, as on Windows, it listens on the loopback alone; nothing else tells it and its clients to.
    export RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="$((${NUM_NODES:-1} > 1))"
    setsid "$PYTHON" -m ray.scripts.scripts start --head --disable-usage-stats \
        --node-ip-address "$host" --port "${ports[0]}" --dashboard-host 127.0.0.1 --dashboard-port "${ports[1]}" \
        --dashboard-agent-listen-port 0 --ray-client-server-port "${ports[2]}" \
        --resources "$resources" ${num_gpus:+--num-gpus "$num_gpus"} --temp-dir "$SLIME_RAY_DIR/ray" </dev/null >"$SLIME_RAY_DIR/head.log" 2>&1 &
    SLIME_RAY_PID=$!
    export RAY_ADDRESS="$host:${ports[0]}" SLIME_RAY_DASHBOARD="http://127.0.0.1:${ports[1]}"
    slime_await_ray || return
    deadline=$((SECONDS + 120))
    until slime_ray_is_up; do
        if [ "$SECONDS" -ge "$deadline" ]; then
            slime_say "waited 120 s for Ray's job server at $SLIME_RAY_DASHBOARD and the agent that starts its jobs; the ends of their logs:"
            tail -n 15 "$SLIME_RAY_DIR"/ray/session_latest/logs/dashboard{,_agent}.log >&2 || true
            return 1
        fi
        sleep 0.5
    done
    slime_say "Ray head at $RAY_ADDRESS, dashboard $SLIME_RAY_DASHBOARD, resources $resources"
}

# Put the token where only this user reads it, and have Ray ask for it.
slime_ray_token() {
    local token="${RAY_AUTH_TOKEN:-}"
    [ -n "$token" ] || token="$(cat "$RAY_AUTH_TOKEN_PATH")" || return
    (umask 077 && printf '%s' "$token" >"$SLIME_RAY_DIR/token")
    unset RAY_AUTH_TOKEN
    export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$SLIME_RAY_DIR/token"
}

# Wait for the `ray start` in the background, which is to end with this script whatever ends that.
slime_await_ray() {
    trap slime_ray_stop EXIT
    trap 'exit 129' HUP
    trap 'exit 130' INT
    trap 'exit 143' TERM
    wait "$SLIME_RAY_PID" && return
    slime_say "Ray did not start; the end of its log:"
    tail -n 20 "$SLIME_RAY_DIR"/*.log >&2
    return 1
}

slime_ray_join() {
    local address="${1:?slime_ray_join needs HOST:PORT of the Ray head}" own="${2:-}" resources="{}" deadline
    if [ -z "${RAY_AUTH_TOKEN:-}" ] && [ ! -r "${RAY_AUTH_TOKEN_PATH:-}" ]; then
        slime_say "no token for the Ray at $address: set RAY_AUTH_TOKEN_PATH to a copy of the file that the head's script has named, or to any" \
            "file with a secret on all machines before the head starts"
        return 2
    fi
    deadline=$((SECONDS + ${SLIME_NODES_DEADLINE_S:-600}))
    until slime_answers "$address"; do
        if [ "$SECONDS" -ge "$deadline" ]; then
            slime_say "no Ray head answers at $address: is it the MASTER_ADDR:MASTER_PORT of the script that starts the run, and let through here?"
            return 1
        fi
        sleep 2
    done
    [ "${NUM_SLOTS:-0}" -eq 0 ] || resources="{\"slime_slot\": $NUM_SLOTS}"
    SLIME_RAY_DIR="$(mktemp -d "${TMPDIR:-/tmp}/slime-ray.XXXXXX")" || return
    slime_ray_token || return
    setsid "$PYTHON" -m ray.scripts.scripts start --address "$address" --disable-usage-stats ${own:+--node-ip-address "$own"} \
        --dashboard-agent-listen-port 0 --resources "$resources" --temp-dir "$SLIME_RAY_DIR/ray" </dev/null >"$SLIME_RAY_DIR/worker.log" 2>&1 &
    SLIME_RAY_PID=$!
    slime_await_ray || return
    slime_say "$(hostname) has joined the Ray at $address, until that ends"
    while slime_answers "$address" || { sleep 5 && slime_answers "$address"; }; do
        sleep 5 & wait $! # a signal ends it at once
    done
    slime_ray_stop
}

# Whether something listens at HOST:PORT.
slime_answers() { timeout 10 bash -c ": 3<>/dev/tcp/${1%:*}/${1##*:}" 2>/dev/null; }

# A job needs both: the head's job server takes it, and the agent of its node, on a port that the kernel chose, starts it. On a busy machine
# the agent comes seconds later, and a job submitted before that is lost with a closed connection.
slime_ray_is_up() {
    "$PYTHON" -c "$SLIME_ASK"'try:
    ask(sys.argv[1] + "/api/jobs/")
    node = next(node for node in nodes(sys.argv[1]) if node["raylet"].get("isHeadNode"))
    urllib.request.urlopen("http://{}:{}/api/local_raylet_healthz".format(node["ip"], node["raylet"]["dashboardAgentListenPort"]), timeout=5)
except (StopIteration, KeyError, ValueError, OSError, http.client.HTTPException):
    sys.exit(1)' "$SLIME_RAY_DASHBOARD"
}

slime_ray_stop() {
    [ -n "$SLIME_RAY_PID" ] || return 0
    local session="$SLIME_RAY_PID" _
    SLIME_RAY_PID=""
    [ ${#SLIME_WORKER_PIDS[@]} -eq 0 ] || kill "${SLIME_WORKER_PIDS[@]}" 2>/dev/null || true
    SLIME_WORKER_PIDS=()
    pkill -TERM -s "$session" 2>/dev/null || true
    for _ in $(seq 100); do
        pgrep -s "$session" >/dev/null || break
        sleep 0.1
    done
    pkill -KILL -s "$session" 2>/dev/null || true
    rm -rf "$SLIME_RAY_DIR"
    unset RAY_ADDRESS SLIME_RAY_DASHBOARD RAY_AUTH_MODE RAY_AUTH_TOKEN_PATH RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER
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

# phase NAME: end the phase before and start the next; phase "" only ends. `summary` has the seconds of each.
phase_name="" phase_started=$SECONDS summary=""
phase() {
    if [ -n "$phase_name" ]; then
        summary+="$(printf '%6d s  %s' $((SECONDS - phase_started)) "$phase_name")"$'\n'
    fi
    phase_name="$1" phase_started=$SECONDS
    [ -z "$1" ] || printf '\n=== %s\n' "$1"
}
