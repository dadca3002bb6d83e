#!/usr/bin/env bash
# A run script as a KubeRay RayJob, on as many machines as it takes.
#
#   usage: IMAGE=registry/slime:tag bash scripts/kuberay/submit.sh scripts/run-glm4.5-355B-A32B.sh [flags of train.py]
#          IMAGE=... PRINT=1 bash scripts/kuberay/submit.sh ...     only print the manifest
#
# The image is that of docker/Dockerfile: the repository is in /opt/slime, with its environment. KubeRay (1.5.1 or later) starts a head and
# NUM_NODES - 1 workers, runs the script on the head when all are there, and removes the pods when it has ended.
#
# Environment variables:
#   IMAGE       of the pods (required)
#   NUM_NODES   machines (what the script says), NUM_GPUS of each (the same, or 8); the script in the pod gets both
#   NAME        of the RayJob (slime-, and the script's name); NAMESPACE (kubectl's own)
#   CLAIM       PersistentVolumeClaim with models, data and checkpoints, which all pods can write; it is mounted at SLIME_HOME (/root)
#   SHM         size of /dev/shm, for Ray's object store and NCCL (64Gi)
#   SECRET      Secret whose entries become environment variables of the pods (WANDB_API_KEY)
#   POD_ENV     environment variables of the pods, "NAME=value NAME=value" (NCCL_SOCKET_IFNAME=eth0)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

say() { printf '[slime] %s\n' "$*" >&2; }

if [ $# -eq 0 ] || [ ! -f "$1" ] || [ -z "${IMAGE:-}" ]; then
    say "usage: IMAGE=registry/slime:tag bash scripts/kuberay/submit.sh scripts/run-NAME.sh [flags of train.py]"
    exit 2
fi
of_script() { sed -n "s/^$2=\([0-9]*\)\$/\1/p" "$1"; }
script_nodes="$(of_script "$1" NUM_NODES)" script_gpus="$(of_script "$1" NUM_GPUS)"
NUM_NODES="${NUM_NODES:-${script_nodes:-1}}"
NUM_GPUS="${NUM_GPUS:-${script_gpus:-8}}"
name="$(basename "$1" .sh | tr '[:upper:]._' '[:lower:]--')"
NAME="${NAME:-slime-${name#run-}}"
SLIME_HOME="${SLIME_HOME:-/root}"
for number in NUM_NODES NUM_GPUS; do
    if ! [[ "${!number}" =~ ^[1-9][0-9]*$ ]]; then
        say "$number=${!number} is no number of at least 1"
        exit 2
    fi
done
for entry in ${POD_ENV:-}; do
    if ! [[ "$entry" =~ ^[A-Za-z_][A-Za-z0-9_]*= ]]; then
        say "POD_ENV: '$entry' is not NAME=value; a value cannot have spaces (put it into the SECRET)"
        exit 2
    fi
done

# A string in YAML's double quotes, which are JSON's for what a command line holds.
quoted() {
    local text="${1//\\/\\\\}"
    printf '"%s"' "${text//\"/\\\"}"
}

environment() { # as a list of a container
    local entry
    for entry in "SLIME_HOME=$SLIME_HOME" "NUM_NODES=$NUM_NODES" "NUM_GPUS=$NUM_GPUS" ${POD_ENV:-}; do
        printf '            - {name: %s, value: %s}\n' "${entry%%=*}" "$(quoted "${entry#*=}")"
    done
}

mounts() {
    printf '            - {name: shm, mountPath: /dev/shm}\n'
    [ -z "${CLAIM:-}" ] || printf '            - {name: home, mountPath: %s}\n' "$(quoted "$SLIME_HOME")"
}

volumes() {
    printf '          - {name: shm, emptyDir: {medium: Memory, sizeLimit: %s}}\n' "${SHM:-64Gi}"
    [ -z "${CLAIM:-}" ] || printf '          - {name: home, persistentVolumeClaim: {claimName: %s}}\n' "$(quoted "$CLAIM")"
}

pod() { # pod NAME: the template of head or worker
    cat <<YAML
      template:
        spec:
          restartPolicy: Never
          containers:
          - name: $1
            image: $(quoted "$IMAGE")
            workingDir: /opt/slime
            env:
$(environment)
            envFrom: [${SECRET:+{secretRef: {name: $SECRET\}\}}]
            resources:
              limits: {nvidia.com/gpu: "$NUM_GPUS"}
            volumeMounts:
$(mounts)
          volumes:
$(volumes)
YAML
}

indented() { sed 's/^/    /'; }

# One command without a shell's &&: the operator gives the entrypoint to a shell of its own, in another pod.
manifest() {
    local entrypoint script="$1"
    [[ "$script" = /* ]] || script="/opt/slime/$script"
    shift
    printf -v entrypoint '%q ' bash "$script" "$@"
    cat <<YAML
apiVersion: ray.io/v1
kind: RayJob
metadata:
  name: $NAME
spec:
  entrypoint: $(quoted "${entrypoint% }")
  shutdownAfterJobFinishes: true
  ttlSecondsAfterFinished: 600
  backoffLimit: 0
  rayClusterSpec:
    authOptions: {mode: token}
    headGroupSpec:
      rayStartParams: {dashboard-host: 0.0.0.0}
$(pod ray-head)
YAML
    [ "$NUM_NODES" -gt 1 ] || return 0
    cat <<YAML
    workerGroupSpecs:
    - groupName: machines
      replicas: $((NUM_NODES - 1))
      minReplicas: $((NUM_NODES - 1))
      maxReplicas: $((NUM_NODES - 1))
      rayStartParams: {}
$(pod ray-worker)
YAML
}

if [ -n "${PRINT:-}" ]; then
    manifest "$@"
    exit
fi
manifest "$@" | kubectl ${NAMESPACE:+--namespace "$NAMESPACE"} apply -f -
say "kubectl get rayjob $NAME; kubectl logs -f -l job-name=$NAME"
