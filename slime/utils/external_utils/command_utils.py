"""What a launch script in Python needs: start a whole run, convert and fetch files, take flags from a dataclass.

    from slime.utils.external_utils import command_utils as U

    U.execute_train("--hf-checkpoint Qwen3-4B --prompt-data ...", num_gpus_per_node=8, megatron_model_type="qwen3-4B")

Files are fetched to folders below SLIME_HOME (/root). A run gets a Ray of its own on free ports, made by the functions
of scripts/common.sh; it ends with the run, and nothing that was not started here is ever ended. It works from a clone
of the repository (train.py, tools/ and scripts/ are not installed), and runs start in its root.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import inspect
import json
import logging
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import typing
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slime.processes.directories import ROOT
from slime.processes.registry import registry
from slime.processes.wait import wait
from slime.utils.errors import UsageError, env_flag, nearest
from slime.utils.misc import exec_command

MODEL_ARGS_S = 60.0

__all__ = [
    "ExecuteTrainConfig",
    "convert_checkpoint",
    "dataclass_cli",
    "exec_command",
    "execute_train",
    "fp8_cast_bf16",
    "get_bool_env_var",
    "get_default_wandb_args",
    "hf_download_dataset",
    "rsync_simple",
    "save_to_temp_file",
]
logger = logging.getLogger(__name__)

repo_base_dir = ROOT
RAY_START_S = 240.0
"""Seconds for a Ray head to start; the functions of scripts/common.sh give up by themselves before."""
ONLY_ASKS = ("-h", "--help", "--dry-run", "--explain", "--list-unsupported", "--completion")

# `ready` and `go` are files: the script makes the first when Ray is up, and waits for the second.
_RUN_ON_OWN_RAY = """
set -euo pipefail
. scripts/common.sh
ready="$1" go="$2" slots="$3" gpus="$4"
shift 4
slime_env
slime_ray_start "$slots" "$gpus"
: >"$ready"
until [ -e "$go" ]; do sleep 0.1; done
slime_submit "$@"
"""


@dataclasses.dataclass
class ExecuteTrainConfig:
    """How `execute_train` runs; launch scripts inherit from it and add their own fields.

    Attributes:
        num_nodes: machines of the run; more than one needs `ray_address`.
        ray_address: host:port of a Ray that runs already; it is used as it is, and left running.
        extra_env_vars: "NAME=value NAME=value", on top of those of the call.
        dry_run: only print the plan (train.py --dry-run).
    """

    num_nodes: int = 1
    ray_address: str = ""
    extra_env_vars: str = ""
    dry_run: bool = False


def execute_train(
    train_args: str | Sequence[Any],
    num_gpus_per_node: int,
    megatron_model_type: str | None,
    train_script: str = "train.py",
    before_ray_job_submit: Callable[[], Any] | None = None,
    extra_env_vars: Mapping[str, str] | None = None,
    config: ExecuteTrainConfig | None = None,
) -> None:
    """Run a driver to its end, on a Ray of its own unless the config names one. What it prints is printed here.

    Args:
        train_args: flags as one text, quoted as in a shell, or as a list.
        num_gpus_per_node: GPUs that Ray may use; with --accelerator cpu, or without a GPU, slots.
        megatron_model_type: scripts/models/<it>.sh gives the model's flags; None = they are in `train_args`.
        train_script: file, from the root of the repository or absolute.
        before_ray_job_submit: called when Ray is up, before the run starts.
        extra_env_vars: environment variables of every process of the run.
        config: see `ExecuteTrainConfig`.

    Raises:
        UsageError: an unknown model type or script, more nodes than can be had, malformed variables.
        subprocess.CalledProcessError: the run failed.
    """
    config = config or ExecuteTrainConfig()
    flags = shlex.split(train_args) if isinstance(train_args, str) else [str(part) for part in train_args]
    flags = [*_model_args(megatron_model_type), *flags, *(["--dry-run"] if config.dry_run else [])]
    script = repo_base_dir / train_script  # an absolute path stays one
    if not script.is_file():
        raise UsageError(f"train_script={train_script!r}: there is no file {script}")
    if config.num_nodes > 1 and not config.ray_address:
        raise UsageError(
            f"num_nodes={config.num_nodes}: start Ray on every node (`ray start`); name it with ray_address=host:port"
        )
    command = [sys.executable, str(script), *flags]
    added = {**(extra_env_vars or {}), **_parse_env_vars(config.extra_env_vars)}
    environment = {**os.environ, **added, "SLIME_PYTHON": sys.executable}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(repo_base_dir), environment.get("PYTHONPATH")]))
    logger.info("execute_train: %s", shlex.join(command))
    if any(flag.split("=")[0] in ONLY_ASKS for flag in flags):
        _finish(_start(command, environment), command)
    elif config.ray_address:
        environment["RAY_ADDRESS"] = config.ray_address
        # What `ray job submit` sets: the processes that Ray starts elsewhere get the variables, too.
        environment["RAY_JOB_CONFIG_JSON_ENV_VAR"] = json.dumps({"runtime_env": {"env_vars": added}})
        if before_ray_job_submit:
            before_ray_job_submit()
        _finish(_start(command, environment), command)
    else:
        _run_on_own_ray(command, environment, _resources(flags, num_gpus_per_node), before_ray_job_submit)


def _run_on_own_ray(
    command: list[str], environment: dict[str, str], resources: list[str], hook: Callable[[], Any] | None
) -> None:
    with tempfile.TemporaryDirectory(prefix="slime-launch-") as folder:
        ready, go = Path(folder, "ready"), Path(folder, "go")
        process = _start(
            ["bash", "-c", _RUN_ON_OWN_RAY, "bash", str(ready), str(go), *resources, *command], environment
        )
        try:
            wait("Ray to start", RAY_START_S, lambda: ready.exists() or process.poll() is not None)
            if process.poll() is None:
                if hook:
                    hook()
                go.touch()
            _finish(process, command)
        finally:
            registry().end(process, grace_s=20.0)  # it ends its Ray before it goes, within 10 s


def _start(command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    return registry().start(command, name="execute_train", log_path=None, env=environment, cwd=repo_base_dir)


def _finish(process: subprocess.Popen[bytes], command: list[str]) -> None:
    """Wait as long as the run takes: nobody but its user knows how long that is."""
    try:
        status = process.wait()
    finally:
        registry().end(process, grace_s=20.0)
    if status:
        raise subprocess.CalledProcessError(status, command)


def _resources(flags: Sequence[str], num_gpus: int) -> list[str]:
    """What the Ray head is started with: [slots, GPUs]; an empty text leaves the GPUs to Ray."""
    from slime.utils.accelerator import cuda_is_available

    asked = "auto"
    for flag, value in zip(flags, [*flags[1:], ""], strict=True):
        name, _, attached = flag.partition("=")
        if name == "--accelerator":
            asked = attached or value
    on_gpus = asked == "cuda" or (asked != "cpu" and cuda_is_available())
    return ["0", str(num_gpus)] if on_gpus else [str(num_gpus), ""]


def _model_args(model_type: str | None) -> list[str]:
    """MODEL_ARGS of scripts/models/<model_type>.sh."""
    if model_type is None:
        return []
    path = repo_base_dir / "scripts/models" / f"{model_type}.sh"
    if not path.is_file():
        known = sorted(file.stem for file in path.parent.glob("*.sh"))
        near = nearest(model_type, known) or known
        raise UsageError(
            f"megatron_model_type={model_type!r} is not in scripts/models; nearest: {', '.join(near)}. "
            "None takes the model's flags from train_args, where --model-args-from-hf derives them all"
        )
    script = '. "$1"; [ "${#MODEL_ARGS[@]}" -eq 0 ] || printf "%s\\0" "${MODEL_ARGS[@]}"'
    command = ["bash", "-euc", script, "bash", str(path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=MODEL_ARGS_S)
    return done.stdout.split("\0")[:-1]


def _parse_env_vars(text: str) -> dict[str, str]:
    variables = {}
    for part in shlex.split(text):
        name, equals, value = part.partition("=")
        if not equals or not name:
            raise UsageError(f"extra_env_vars: {part!r} is not NAME=value")
        variables[name] = value
    return variables


def home() -> Path:
    """Where models and data are: SLIME_HOME, or /root."""
    return Path(os.environ.get("SLIME_HOME", "/root"))


def convert_checkpoint(
    model_name: str,
    megatron_model_type: str | None,
    num_gpus_per_node: int,
    multinode: bool = False,
    extra_args: str = "",
    dir_dst: str | None = None,
    hf_checkpoint: str | None = None,
) -> str:
    """Make <dir_dst>/<model_name>_torch_dist of an HF checkpoint, unless it is there, and return its path.

    Args:
        model_name: name of the model's folder.
        megatron_model_type: as in `execute_train`; None derives the flags from the HF config.
        num_gpus_per_node: threads that convert; they use no GPU.
        multinode: accepted and without effect: one node converts, the result is the same.
        extra_args: more flags of tools/convert_hf_to_torch_dist.py.
        dir_dst: default SLIME_HOME.
        hf_checkpoint: default <SLIME_HOME>/models/<model_name>.

    Raises:
        UsageError: an unknown model type, or no HF checkpoint.
        subprocess.CalledProcessError: the conversion failed.
    """
    source = Path(hf_checkpoint) if hf_checkpoint else home() / "models" / model_name
    target = Path(dir_dst or home()) / f"{model_name}_torch_dist"
    if (target / "latest_checkpointed_iteration.txt").exists():
        logger.info("%s is there already; nothing to convert", target)
        return str(target)
    if not source.is_dir():
        raise UsageError(f"hf_checkpoint={source}: there is no such directory")
    tool = str(repo_base_dir / "tools/convert_hf_to_torch_dist.py")
    places = ["--hf-checkpoint", str(source), "--save", str(target), "--max-workers", str(num_gpus_per_node)]
    command = [sys.executable, tool, *_model_args(megatron_model_type), *places, *shlex.split(extra_args)]
    exec_command(shlex.join(command))
    return str(target)


def hf_download_dataset(full_name: str, data_dir: str | None = None) -> str:
    """Download a data set of the Hugging Face hub to <data_dir>/<last part of its name>, and return that path.

    Args:
        full_name: "owner/name".
        data_dir: default <SLIME_HOME>/datasets.

    Raises:
        UsageError: it cannot be downloaded.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    target = Path(data_dir or home() / "datasets") / full_name.rpartition("/")[2]
    try:
        return str(snapshot_download(full_name, repo_type="dataset", local_dir=target))  # nosec B615
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise UsageError(f"cannot download the data set {full_name!r} to {target}: {error}") from error


def rsync_simple(path_src: str, path_dst: str) -> None:
    """Make the folder `path_dst` hold everything that `path_src` holds; what else is in it stays.

    Raises:
        UsageError: there is no folder `path_src`.
    """
    if not Path(path_src).is_dir():
        raise UsageError(f"path_src={path_src}: there is no such directory")
    Path(path_dst).mkdir(parents=True, exist_ok=True)
    if shutil.which("rsync"):
        exec_command(shlex.join(["rsync", "-a", f"{path_src}/", f"{path_dst}/"]))
    else:
        shutil.copytree(path_src, path_dst, dirs_exist_ok=True)


def fp8_cast_bf16(path_src: str, path_dst: str) -> None:
    """Convert an HF checkpoint in fp8 to bf16, unless the result is there."""
    if any(Path(path_dst, file).exists() for file in ("model.safetensors.index.json", "model.safetensors")):
        logger.info("%s is there already; nothing to convert", path_dst)
        return
    tool = str(repo_base_dir / "tools/fp8_cast_bf16.py")
    exec_command(
        shlex.join([sys.executable, tool, "--input-fp8-hf-path", path_src, "--output-bf16-hf-path", path_dst])
    )


def get_default_wandb_args(test_file: str, run_name_prefix: str | None = None, run_id: str | None = None) -> str:
    """The flags that log a run to Weights & Biases; empty without WANDB_API_KEY.

    Args:
        test_file: `__file__` of the script; its name is the project's.
        run_name_prefix: put before the group's name.
        run_id: the group's name (default: a random one).
    """
    if not os.environ.get("WANDB_API_KEY"):
        logger.info("WANDB_API_KEY is not set: the run is not logged to Weights & Biases")
        return ""
    group = "_".join(filter(None, [run_name_prefix, run_id or uuid.uuid4().hex[:8]]))
    flags = ["--use-wandb", "--wandb-project", f"slime-{Path(test_file).stem}", "--wandb-group", group]
    return shlex.join([*flags, "--disable-wandb-random-suffix"]) + " "


def get_bool_env_var(name: str, default: str = "false") -> bool:
    """Whether an environment variable says yes: true or 1, false or 0, in any case.

    Raises:
        UsageError: it says something else.
    """
    return env_flag(os.environ, name, default=default)


def save_to_temp_file(text: str, ext: str) -> str:
    """Write a text to a new file with this extension, which is deleted when this process ends; returns its path."""
    descriptor, path = tempfile.mkstemp(suffix=f".{ext.lstrip('.')}", prefix="slime-")
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    atexit.register(Path(path).unlink, missing_ok=True)
    return path


def dataclass_cli(func: Callable[[Any], Any], env_var_prefix: str = "SLIME_SCRIPT_") -> Callable[..., Any]:
    """Turn a function of one dataclass into one that `typer.run` can call: each field is an option.

    An option that is not given is read from the environment variable <prefix><FIELD>, and else has its default.

    Example::

        @dataclass_cli
        def main(args: ScriptArgs) -> None: ...

        if __name__ == "__main__":
            typer.run(main)

    Raises:
        TypeError: the function's one parameter is not annotated with a dataclass.
    """
    import typer

    hints = typing.get_type_hints(func)
    hints.pop("return", None)
    kinds = list(hints.values())
    if len(kinds) != 1 or not dataclasses.is_dataclass(kinds[0]) or len(inspect.signature(func).parameters) != 1:
        raise TypeError(f"{func.__name__} must have exactly one parameter, annotated with a dataclass")
    kind: Any = kinds[0]
    field_types, parameters = typing.get_type_hints(kind), []
    for field in dataclasses.fields(kind):
        if not field.init:
            continue
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        option = typer.Option(
            ... if default is dataclasses.MISSING else default, envvar=f"{env_var_prefix}{field.name.upper()}"
        )
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(field.name, keyword, default=option, annotation=field_types[field.name]))

    @functools.wraps(func)
    def command(**values: Any) -> Any:
        return func(kind(**values))

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    del command.__wrapped__  # typer would read the dataclass again
    return command
