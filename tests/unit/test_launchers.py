"""Runs on several machines as the shell scripts start them; srun, ssh, kubectl and python are stand-ins that say what
they were told to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.unit.script_fakes import ROOT, start_script

RUN = "scripts/run-glm4.5-355B-A32B.sh"  # takes 8 machines


def start(
    tmp_path: Path, command: list[str], **environment: str
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """(what a launcher said, the arguments that it gave srun or kubectl; what kubectl read is in `stdin`)."""
    for name in ("srun", "kubectl"):
        fake = tmp_path / name
        fake.write_text(f"""#!/bin/sh
printf "%s\\0" "$@" >{tmp_path}/called
env >{tmp_path}/environment
[ {name} = srun ] || cat >{tmp_path}/stdin
""")
        fake.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SLIME_", "MASTER_"))}
    path = f"{tmp_path}:{kept['PATH']}"
    done = subprocess.run(
        command, cwd=ROOT, env=kept | {"PATH": path} | environment, capture_output=True, text=True, timeout=60
    )
    called = tmp_path / "called"
    return done, called.read_text().split("\0")[:-1] if called.exists() else []


# ---- MASTER_ADDR and workers


def test_the_head_listens_where_others_reach_it_and_each_worker_is_started_over_ssh(tmp_path: Path) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/ssh.log\n')
    ssh.chmod(0o755)
    environment = {"MASTER_ADDR": "10.0.0.1", "WORKERS": "10.0.0.2 node-3", "NCCL_SOCKET_IFNAME": "ib0"}
    environment |= {"PATH": f"{tmp_path}:{os.environ['PATH']}", "MASTER_PORT": "7001"}
    done, log = start_script(tmp_path, "run-glm4.5-355B-A32B", **environment)
    assert done.returncode == 0, done.stderr
    assert "start --head --disable-usage-stats --node-ip-address 10.0.0.1 --port 7001 " in log
    assert "/nodes?view=summary" in log and log.index("view=summary") < log.index("job submit")
    first, second = sorted(line for line in (tmp_path / "ssh.log").read_text().splitlines() if line.startswith("-tt"))
    worker = f"bash {ROOT}/scripts/ray_worker.sh 10.0.0.1:7001"
    assert first.startswith("-tt -o BatchMode=yes 10.0.0.2 RAY_AUTH_TOKEN=") and first.endswith(f"{worker} 10.0.0.2")
    assert " NCCL_SOCKET_IFNAME=ib0 " in first
    assert " node-3 RAY_AUTH_TOKEN=" in second and second.endswith(worker), "a name is no address to listen at"


def test_a_worker_is_given_the_token_of_the_head_on_no_command_line(tmp_path: Path) -> None:
    """The stand-in for ssh keeps the command lines that a machine's other users could read, and runs them."""
    ssh = tmp_path / "ssh"
    ssh.write_text(f"""#!/bin/bash
echo "$@" >>{tmp_path}/command_lines
until [ "$1" = node-2 ]; do shift; done; shift
exec bash -c "$*"
""")
    ssh.chmod(0o755)
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/ray_worker.sh").write_text(f'echo "$RAY_AUTH_TOKEN" >{tmp_path}/worker_token')
    (tmp_path / "token").write_text("0123456789abcdef" * 4)
    script = f"""
. scripts/common.sh
SLIME_ROOT={tmp_path} SLIME_RAY_DIR={tmp_path} RAY_AUTH_TOKEN_PATH={tmp_path}/token WORKERS=node-2
slime_start_workers
wait "${{SLIME_WORKER_PIDS[@]}}"
"""
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)}
    subprocess.run(["bash", "-c", script], cwd=ROOT, env=environment, timeout=60, check=True)
    assert (tmp_path / "worker_token").read_text() == "0123456789abcdef" * 4 + "\n"
    assert "0123456789abcdef" not in (tmp_path / "command_lines").read_text()
    assert not list(tmp_path.glob("tmp.*")), "the file on the worker is gone"


def test_without_workers_the_command_for_the_other_machines_is_printed(tmp_path: Path) -> None:
    done, _ = start_script(tmp_path, "run-glm4.5-355B-A32B", MASTER_ADDR="10.0.0.1")
    assert "RAY_AUTH_TOKEN_PATH=COPY" in done.stderr
    assert f"bash {ROOT}/scripts/ray_worker.sh 10.0.0.1:6379" in done.stderr


def test_an_address_of_another_machine_is_refused_before_ray_starts(tmp_path: Path) -> None:
    """192.0.2.0/24 is for documentation: no machine has .77."""
    script = ". scripts/common.sh; PYTHON=python3; NUM_NODES=2 MASTER_ADDR=192.0.2.77 slime_ray_start 0"
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "MASTER_ADDR=192.0.2.77 MASTER_PORT=6379: no Ray head can listen there" in done.stderr


def test_ports_for_ray_lie_between_its_workers_and_those_that_linux_gives_to_whoever_asks_for_any() -> None:
    """Ray's own parts ask for any by the dozen, seconds before the ports chosen for it are bound."""
    script = f". scripts/common.sh; PYTHON={sys.executable} slime_free_ports 3"
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    ports = [int(port) for port in done.stdout.split()]
    assert len(set(ports)) == 3
    assert all(19_999 < port < 32_768 for port in ports)


def test_the_logs_of_a_ray_that_takes_no_jobs_are_shown_before_they_go(tmp_path: Path) -> None:
    fake = tmp_path / "python"
    fake.write_text("""#!/usr/bin/env bash
case "$*" in
    *is_free*) echo 1001 1002 1003 ;;
    *"start --head"*)
        logs="${@: -1}/session_latest/logs"
        mkdir -p "$logs"
        echo "no port" >"$logs/dashboard_agent.log"
        ;;
esac
""")
    fake.chmod(0o755)
    environment = os.environ | {"PYTHON": str(fake), "TMPDIR": str(tmp_path)}
    never_up = "slime_ray_is_up() { SECONDS=1000; return 1; }"  # and two minutes are over
    command = ["bash", "-c", f". scripts/common.sh; {never_up}; slime_ray_start 1"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "waited 120 s for Ray's job server at http://127.0.0.1:1002" in done.stderr
    assert "no port" in done.stderr and not list(tmp_path.glob("slime-ray.*"))


def test_a_worker_whose_head_does_not_answer_says_so(tmp_path: Path) -> None:
    environment = {"SLIME_PYTHON": "/bin/true", "SLIME_NODES_DEADLINE_S": "0", "RAY_AUTH_TOKEN": "secret"}
    command = ["bash", "scripts/ray_worker.sh", "127.0.0.1:1"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "no Ray head answers at 127.0.0.1:1: is it the MASTER_ADDR:" in done.stderr


def test_a_worker_without_the_token_of_its_head_says_what_to_set() -> None:
    environment = os.environ | {"SLIME_PYTHON": "/bin/true", "RAY_AUTH_TOKEN_PATH": "/nowhere/token"}
    command = ["bash", "scripts/ray_worker.sh", "127.0.0.1:1"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "no token for the Ray at 127.0.0.1:1: set RAY_AUTH_TOKEN_PATH" in done.stderr


@pytest.mark.parametrize("arguments", [[], ["10.0.0.1"], ["10.0.0.1:"], ["10.0.0.1:6379", "10.0.0.2", "more"]])
def test_a_worker_that_is_not_told_where_the_head_is_does_not_wait_for_it(arguments: list[str]) -> None:
    command = ["bash", "scripts/ray_worker.sh", *arguments]
    environment = os.environ | {"SLIME_PYTHON": "/bin/true"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "usage: bash scripts/ray_worker.sh HOST:PORT" in done.stderr


def test_a_number_of_machines_that_is_none_starts_nothing(tmp_path: Path) -> None:
    done, log = start_script(tmp_path, "run-qwen3-4B", NUM_NODES="two")
    assert done.returncode == 2 and "NUM_NODES=two is no number of machines" in done.stderr and not log


# ---- Slurm


def test_a_slurm_job_runs_the_script_on_the_first_machine_and_a_worker_on_the_others(tmp_path: Path) -> None:
    job = {"SLURM_JOB_ID": "123456", "SLURM_JOB_NUM_NODES": "8", "SLURM_SUBMIT_DIR": str(ROOT)}
    job |= {"MASTER_ADDR": "10.0.0.1", "SLIME_SRUN_ARGS": "--container-image=slime.sqsh --container-mounts=/data"}
    done, called = start(tmp_path, ["bash", "scripts/slurm/run.sh", RUN, "--lr", "3e-6", "a b"], **job)
    assert done.returncode == 0, done.stderr
    mine = ["--ntasks-per-node=1", "--kill-on-bad-exit=1", "--container-image=slime.sqsh", "--container-mounts=/data"]
    node = ["bash", "scripts/slurm/node.sh", RUN, "--lr", "3e-6", "a b"]
    assert called == [*mine, *node]
    assert "Ray head at 10.0.0.1:23456" in done.stderr, "the port follows from the job's number"
    token = (tmp_path / "environment").read_text().partition("RAY_AUTH_TOKEN=")[2].partition("\n")[0]
    assert len(token) == 64 and token not in " ".join(called), "of every machine of the job, and on no command line"


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        ({}, 8),
        ({"SLIME_JOB_NODES": "12"}, 12),
        ({"WORKERS": " ".join(f"node-{i}" for i in range(9))}, 10),
        ({"WORKERS": "node-1"}, 8),
    ],
)
def test_machines_of_engines_alone_are_waited_for_too(settings: dict[str, str], count: int) -> None:
    """--rollout-num-gpus without --colocate takes more machines than the trainer's NUM_NODES."""
    script = ". scripts/common.sh; NUM_NODES=8; slime_num_machines"
    kept = {"PATH": os.environ["PATH"]} | settings
    done = subprocess.run(["bash", "-euc", script], cwd=ROOT, env=kept, capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{count}\n"


def test_each_machine_of_a_slurm_job_knows_its_part(tmp_path: Path) -> None:
    for folder in ("scripts/slurm",):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "scripts/slurm/node.sh").write_text((ROOT / "scripts/slurm/node.sh").read_text())
    for name in ("run-x.sh", "ray_worker.sh"):
        (tmp_path / "scripts" / name).write_text('echo "${0##*/}" "$@"\n')

    def said(number: int) -> str:
        command = ["bash", "scripts/slurm/node.sh", "scripts/run-x.sh", "--lr", "1"]
        environment = {"SLURM_PROCID": str(number), "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "7000"}
        environment |= {"PATH": os.environ["PATH"]}
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True).stdout

    assert said(0) == "run-x.sh --lr 1\n"
    assert said(3) == "ray_worker.sh 10.0.0.1:7000\n"


@pytest.mark.parametrize(
    ("job", "arguments", "sentence"),
    [
        (
            {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "4"},
            [RUN],
            "takes 8 machines, the job has 4: sbatch --nodes 8",
        ),
        ({"SLURM_JOB_ID": "1"}, ["gone.sh"], "usage: sbatch --nodes N"),
        ({}, [RUN], "usage: sbatch --nodes N"),
        (
            {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "2"},
            ["scripts/run-qwen3-4B.sh"],
            "takes one machine, the job has 2: sbatch --nodes 1, or NUM_NODES=2 for a run on all of them",
        ),
        (
            {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "2", "NUM_NODES": "3"},
            ["scripts/run-qwen3-4B.sh"],
            "takes 3 machines, the job has 2: sbatch --nodes 3",
        ),
        ({"SLURM_JOB_ID": "1", "SLURM_SUBMIT_DIR": "/"}, [RUN], "/ is not the repository: call sbatch there"),
    ],
)
def test_a_slurm_job_that_cannot_work_starts_nothing(
    tmp_path: Path, job: dict[str, str], arguments: list[str], sentence: str
) -> None:
    done, called = start(tmp_path, ["bash", "scripts/slurm/run.sh", *arguments], **job)
    assert done.returncode == 2 and not called
    assert sentence in done.stderr


# ---- KubeRay


def test_a_rayjob_has_a_pod_for_each_machine_and_runs_the_script_on_the_head(tmp_path: Path) -> None:
    settings = {"IMAGE": "registry/slime:1", "NAMESPACE": "rl", "CLAIM": "models", "SLIME_HOME": "/data"}
    settings |= {"POD_ENV": "NCCL_SOCKET_IFNAME=eth0 A=b", "SECRET": "keys"}
    odd = ["--custom-config-path", 'a b/$HOME "(1)".yaml', "it's"]
    done, called = start(tmp_path, ["bash", "scripts/kuberay/submit.sh", RUN, *odd], **settings)
    assert done.returncode == 0, done.stderr
    assert called == ["--namespace", "rl", "apply", "-f", "-"]
    job = yaml.safe_load((tmp_path / "stdin").read_text())
    assert (job["kind"], job["metadata"]["name"]) == ("RayJob", "slime-glm4-5-355b-a32b")
    assert job["spec"]["entrypoint"].startswith(f"bash /opt/slime/{RUN} "), "one command, which needs no folder"
    shell = job["spec"]["entrypoint"].replace("bash ", "printf '%s\\0' ", 1)
    said = subprocess.run(["bash", "-c", shell], capture_output=True, text=True).stdout.split("\0")[:-1]
    assert said == [f"/opt/slime/{RUN}", *odd]
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    (workers,) = cluster["workerGroupSpecs"]
    assert [workers[name] for name in ("replicas", "minReplicas", "maxReplicas")] == [7, 7, 7]
    for group in (cluster["headGroupSpec"], workers):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert container["image"] == "registry/slime:1"
        assert container["resources"]["limits"] == {"nvidia.com/gpu": "8"}
        values = {entry["name"]: entry["value"] for entry in container["env"]}
        own = {"SLIME_HOME": "/data", "NUM_NODES": "8", "NUM_GPUS": "8"}
        assert values == own | {"NCCL_SOCKET_IFNAME": "eth0", "A": "b"}
        assert container["envFrom"] == [{"secretRef": {"name": "keys"}}]
        mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounted == {"shm": "/dev/shm", "home": "/data"} and {v["name"] for v in pod["volumes"]} == set(mounted)


def test_a_rayjob_of_one_machine_has_no_workers_and_is_only_printed_where_that_is_asked_for(tmp_path: Path) -> None:
    command = ["bash", "scripts/kuberay/submit.sh", "scripts/run-qwen3-4B.sh"]
    done, called = start(tmp_path, command, IMAGE="i", PRINT="1")
    assert not called and "workerGroupSpecs" not in yaml.safe_load(done.stdout)["spec"]["rayClusterSpec"]
    smoke = start(tmp_path, [*command[:-1], "scripts/run-qwen2.5-0.5B-gb10-smoke.sh"], IMAGE="i", PRINT="1")[0]
    assert 'nvidia.com/gpu: "1"' in smoke.stdout, "what the script says"
    done, called = start(tmp_path, command)
    assert done.returncode == 2 and not called and "usage: IMAGE=" in done.stderr


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"NUM_NODES": "8x"}, "NUM_NODES=8x is no number of at least 1"),
        ({"NUM_GPUS": "0"}, "NUM_GPUS=0 is no number of at least 1"),
        ({"POD_ENV": "A=b NCCL_DEBUG"}, "POD_ENV: 'NCCL_DEBUG' is not NAME=value"),
    ],
)
def test_a_rayjob_that_cannot_work_is_not_made(tmp_path: Path, settings: dict[str, str], sentence: str) -> None:
    done, called = start(tmp_path, ["bash", "scripts/kuberay/submit.sh", RUN], IMAGE="i", **settings)
    assert done.returncode == 2 and not called and sentence in done.stderr
