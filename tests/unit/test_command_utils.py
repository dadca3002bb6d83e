"""slime.utils.external_utils.command_utils; a run on a real Ray is in tests/integration/test_execute_train.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from slime.utils.errors import UsageError
from slime.utils.external_utils import command_utils as U

# Instead of train.py: writes what it was given, and what it finds, to the file that its first argument names.
DRIVER = """
import json, os, sys
import pathlib
names = ("RAY_ADDRESS", "COLOR", "SHAPE", "RAY_JOB_CONFIG_JSON_ENV_VAR")
said = {"argv": sys.argv[1:], "cwd": os.getcwd(), "env": {name: os.environ.get(name) for name in names}}
pathlib.Path(sys.argv[-1]).write_text(json.dumps(said))
sys.exit("--fail" in sys.argv)
"""


@pytest.fixture
def driver(tmp_path: Path) -> Path:
    path = tmp_path / "driver.py"
    path.write_text(DRIVER)
    return path


def test_a_run_that_only_asks_needs_no_ray_and_its_failure_is_raised(driver: Path, tmp_path: Path):
    out, dry = tmp_path / "out.json", U.ExecuteTrainConfig(dry_run=True)
    script = tmp_path / "ask.py"
    script.write_text(DRIVER.replace("sys.argv[-1]", "sys.argv[1]"))
    U.execute_train([out], 1, None, str(script), config=dry)
    said = json.loads(out.read_text())
    assert said["argv"] == [str(out), "--dry-run"]
    with pytest.raises(subprocess.CalledProcessError, match="status 1"):
        U.execute_train([out, "--fail"], 1, None, str(script), config=dry)


def test_a_run_on_a_ray_that_is_there_gets_its_address_and_the_variables(driver: Path, tmp_path: Path):
    out, called = tmp_path / "out.json", []
    config = U.ExecuteTrainConfig(num_nodes=2, ray_address="10.0.0.9:6379")
    U.execute_train(str(out), 8, None, str(driver), lambda: called.append(1), {"COLOR": "red"}, config)
    said = json.loads(out.read_text())
    assert called == [1] and said["env"]["RAY_ADDRESS"] == "10.0.0.9:6379"
    job = json.loads(said["env"]["RAY_JOB_CONFIG_JSON_ENV_VAR"])
    assert job == {"runtime_env": {"env_vars": {"COLOR": "red"}}}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"megatron_model_type": "qwen3-0.6b"}, "nearest: qwen3-0.6B"),
        ({"train_script": "trian.py"}, "train_script='trian.py': there is no file"),
        ({"config": U.ExecuteTrainConfig(num_nodes=2)}, "start Ray on every node"),
        ({"config": U.ExecuteTrainConfig(extra_env_vars="A=1 B")}, "'B' is not NAME=value"),
    ],
)
def test_a_wrong_launch_is_a_sentence_and_starts_nothing(changes, sentence):
    keywords = {"num_gpus_per_node": 1, "megatron_model_type": None} | changes
    with pytest.raises(UsageError, match=sentence):
        U.execute_train("", **keywords)


def test_gpus_are_counted_where_there_are_some_and_slots_elsewhere(monkeypatch):
    asked: list[list[str]] = []
    monkeypatch.setattr(U, "_run_on_own_ray", lambda command, env, resources, hook: asked.append(resources))
    for flags in ("--accelerator cuda", "--accelerator=cuda", "--accelerator cpu", "--accelerator=cpu"):
        U.execute_train(flags, 4, None)
    assert asked == [["0", "4"], ["0", "4"], ["4", ""], ["4", ""]]


def test_a_checkpoint_is_converted_once(tmp_path: Path, monkeypatch):
    ran: list[str] = []
    monkeypatch.setattr(U, "exec_command", ran.append)
    monkeypatch.setenv("SLIME_HOME", str(tmp_path))
    with pytest.raises(UsageError, match="there is no such directory"):
        U.convert_checkpoint("Qwen3-0.6B", "qwen3-0.6B", 2)
    (tmp_path / "models/Qwen3-0.6B").mkdir(parents=True)
    target = U.convert_checkpoint("Qwen3-0.6B", "qwen3-0.6B", 2, extra_args="--seed 7")
    assert target == str(tmp_path / "Qwen3-0.6B_torch_dist")
    assert "convert_hf_to_torch_dist.py --num-layers 28" in ran[0]
    assert ran[0].endswith(f"--hf-checkpoint {tmp_path}/models/Qwen3-0.6B --save {target} --max-workers 2 --seed 7")
    Path(target).mkdir()
    Path(target, "latest_checkpointed_iteration.txt").write_text("release")
    assert U.convert_checkpoint("Qwen3-0.6B", None, 1) == target and len(ran) == 1


def test_a_data_set_goes_below_slime_home(tmp_path: Path, monkeypatch):
    import huggingface_hub

    def download(name: str, repo_type: str, local_dir: Path) -> str:
        if name == "nobody/nothing":
            raise huggingface_hub.errors.LocalEntryNotFoundError("no network")
        assert repo_type == "dataset"
        return str(local_dir)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setenv("SLIME_HOME", str(tmp_path))
    assert U.hf_download_dataset("owner/math") == str(tmp_path / "datasets/math")
    with pytest.raises(UsageError, match="cannot download the data set 'nobody/nothing'"):
        U.hf_download_dataset("nobody/nothing")


@pytest.mark.parametrize("has_rsync", [True, False])
def test_a_folder_is_copied_and_what_was_there_stays(tmp_path: Path, monkeypatch, has_rsync: bool):
    if has_rsync and not U.shutil.which("rsync"):
        pytest.skip("no rsync here")
    monkeypatch.setattr(U.shutil, "which", lambda name: has_rsync)
    source, target = tmp_path / "a b", tmp_path / "c/d"
    (source / "sub").mkdir(parents=True)
    (source / "sub/file").write_text("new")
    target.mkdir(parents=True)
    (target / "old").write_text("old")
    U.rsync_simple(str(source), str(target))
    assert (target / "sub/file").read_text() == "new" and (target / "old").read_text() == "old"
    with pytest.raises(UsageError, match="there is no such directory"):
        U.rsync_simple(str(tmp_path / "none"), str(target))


def test_fp8_is_cast_to_bf16_by_its_tool_unless_the_result_is_there(tmp_path: Path, monkeypatch):
    commands: list[str] = []
    monkeypatch.setattr(U, "exec_command", commands.append)
    U.fp8_cast_bf16("a", str(tmp_path))
    assert [c.split(" ", 1)[1] for c in commands] == [
        f"{U.repo_base_dir / 'tools/fp8_cast_bf16.py'} --input-fp8-hf-path a --output-bf16-hf-path {tmp_path}"
    ]
    (tmp_path / "model.safetensors").write_text("")
    U.fp8_cast_bf16("a", str(tmp_path))
    assert len(commands) == 1


def test_wandb_flags_depend_on_the_key(monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    assert U.get_default_wandb_args("x/run_math.py") == ""
    monkeypatch.setenv("WANDB_API_KEY", "k")
    assert U.get_default_wandb_args("x/run_math.py", "night", run_id="7") == (
        "--use-wandb --wandb-project slime-run_math --wandb-group night_7 --disable-wandb-random-suffix "
    )


def test_wandb_flags_are_flags_of_slime(monkeypatch):
    from slime.config.parse import CommandLine

    monkeypatch.setenv("WANDB_API_KEY", "k")
    flags = [word for word in U.get_default_wandb_args("x.py").split() if word.startswith("--")]
    assert set(flags) <= set(CommandLine().parser.options())


@pytest.mark.parametrize(("text", "value"), [("True", True), ("1", True), ("false", False), ("0", False), ("", False)])
def test_a_variable_says_yes_or_no(monkeypatch, text: str, value: bool):
    monkeypatch.setenv("SLIME_X", text)
    assert U.get_bool_env_var("SLIME_X") is value
    monkeypatch.delenv("SLIME_X")
    assert U.get_bool_env_var("SLIME_X") is False and U.get_bool_env_var("SLIME_X", "true") is True
    monkeypatch.setenv("SLIME_X", "maybe")
    with pytest.raises(UsageError, match="SLIME_X=maybe"):
        U.get_bool_env_var("SLIME_X")


def test_a_temporary_file_lives_as_long_as_the_process():
    program = (
        "from slime.utils.external_utils.command_utils import save_to_temp_file as save\n"
        "path = save('a: 1', 'yaml')\n"
        "print(path, open(path).read())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=U.repo_base_dir, capture_output=True, text=True, check=True
    )
    path, text = done.stdout.split(maxsplit=1)
    assert path.endswith(".yaml") and text.strip() == "a: 1" and not os.path.exists(path)


@dataclass
class ScriptArgs(U.ExecuteTrainConfig):
    model: str = "qwen3-4B"
    lr: float = 1e-6
    use_eval: bool = True
    tags: list[str] = field(default_factory=lambda: ["a"])


def test_fields_of_a_dataclass_are_options_with_defaults_and_variables():
    got: list[ScriptArgs] = []

    @U.dataclass_cli
    def main(args: ScriptArgs) -> None:
        """Train something."""
        got.append(args)

    app = typer.Typer()
    app.command()(main)

    def run(*argv: str, **env: str) -> ScriptArgs:
        result = CliRunner().invoke(app, list(argv), env=env)
        assert result.exit_code == 0, result.output
        return got[-1]

    assert run() == ScriptArgs()
    assert run("--lr", "0.5", "--no-use-eval", "--num-nodes", "2", "--tags", "b", "--tags", "c") == ScriptArgs(
        lr=0.5, use_eval=False, num_nodes=2, tags=["b", "c"]
    )
    assert run(SLIME_SCRIPT_MODEL="llama").model == "llama"
    assert CliRunner().invoke(app, ["--lr", "x"]).exit_code == 2
    main(lr=2.0)
    assert got[-1].lr == 2.0


def test_a_function_of_anything_else_is_refused():
    def main(a: int) -> None: ...

    with pytest.raises(TypeError, match="main must have exactly one parameter"):
        U.dataclass_cli(main)
