"""Files from elsewhere are data: an index cannot name files outside its directory, and nothing in a file is run."""

from __future__ import annotations

import argparse
import ast
import json
import pickle
import warnings
from dataclasses import replace
from enum import Enum
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from slime.backends.megatron_utils.checkpoint.torch_dist_reader import TorchDistReader
from slime.checkpoints.paths import TRACKER_FILE, check_names, read_metadata
from slime.config.megatron.arguments import checkpoint_shape_problems
from slime.conversion.reader import RawTensors
from slime.utils.errors import UsageError
from slime.weights.names import INDEX_FILE, read_index
from tools.inspect_checkpoint import open_checkpoint

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCES = [
    path
    for folder in ("slime", "slime_plugins", "tools", "examples", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
TRUSTED = {
    (
        "slime/checkpoints/rollout_files.py",
        "torch.load",
    ): "after weights_only failed, where the caller trusts the file",
    ("slime/utils/files/rows.py", "pickle.loads"): "what this process has written into a nameless temporary file",
    ("benchmarks/cpu_step.py", "torch.load"): "a dump of the benchmark itself",
}


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/etc/passwd", "a/../../b", "", None, 7])
def test_an_index_that_leads_out_of_its_directory_is_refused(name: object, tmp_path: Path) -> None:
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(ValueError, match="not in its directory: do not trust it"):
        read_index(tmp_path)
    with pytest.raises(UsageError, match="do not trust it"):
        RawTensors(tmp_path)


def test_files_of_a_directory_and_below_it_may_be_named(tmp_path: Path) -> None:
    names = {"a": "model-00001-of-00002.safetensors", "b": "shards/model..2.safetensors"}
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": names}))
    assert read_index(tmp_path)["weight_map"] == names


class RunsCode:
    """Pickled, a call that makes a file when it is read."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)

    def __deepcopy__(self, _: object) -> RunsCode:
        return self


def write_checkpoint(directory: Path) -> Metadata:
    """What `torch.distributed.checkpoint` writes of one tensor and one object; returns its description."""
    state = {"w": torch.ones(3, dtype=torch.bfloat16), "step": 7}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that there is one process
        dcp.save(state, checkpoint_id=directory)
    return pickle.loads((directory / ".metadata").read_bytes())


def test_the_description_of_a_checkpoint_is_read_as_it_was_written(tmp_path: Path) -> None:
    written = write_checkpoint(tmp_path)
    check_names(tmp_path)
    assert read_metadata(tmp_path) == written
    assert torch.equal(TorchDistReader(tmp_path, is_stacked=False).read("w"), torch.ones(3, dtype=torch.bfloat16))


class AttributePickler(pickle._Pickler):
    """Writes the members of an enumeration as Python 3.11.2 does."""

    def reducer_override(self, value: object) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_description_is_read_whose_enumerations_are_written_as_attributes(protocol: int, tmp_path: Path) -> None:
    written = write_checkpoint(tmp_path)
    with (tmp_path / ".metadata").open("wb") as stream:
        AttributePickler(stream, protocol).dump(written)
    assert b"getattr" in (tmp_path / ".metadata").read_bytes()
    check_names(tmp_path)
    assert read_metadata(tmp_path) == written


@pytest.mark.parametrize("owner", [b"cpathlib\nPosixPath\n", b"ctorch\nSize\n", b"(lp0\n"])
def test_an_attribute_of_anything_else_is_refused(owner: bytes, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(b"cbuiltins\ngetattr\n(" + owner + b"Vtouch\ntR.")
    for read in (check_names, read_metadata):
        with pytest.raises(UsageError, match=r"names builtins\.getattr"):
            read(tmp_path)


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_description_of_a_checkpoint_that_would_run_code_is_refused(protocol: int, tmp_path: Path) -> None:
    written, marker = write_checkpoint(tmp_path / "it"), tmp_path / "marker"
    crafted = pickle.dumps(replace(written, planner_data=RunsCode(marker)), protocol)
    (tmp_path / "it" / ".metadata").write_bytes(crafted)
    for read in (check_names, read_metadata, TorchDistReader, lambda path: open_checkpoint(str(path), None, None)):
        with pytest.raises(UsageError, match=r"it/.metadata names pathlib.Path"):
            read(tmp_path / "it")
    assert not marker.exists()
    pickle.loads(crafted)
    assert marker.exists(), "the file is one that runs code"


@pytest.mark.parametrize("flag", ["--load", "--ref-load"])
def test_flags_that_name_a_checkpoint_that_would_run_code_are_wrong(flag: str, tmp_path: Path) -> None:
    written, marker = write_checkpoint(tmp_path / "iter_0000003"), tmp_path / "marker"
    (tmp_path / "iter_0000003" / ".metadata").write_bytes(pickle.dumps(replace(written, version=RunsCode(marker))))
    (tmp_path / TRACKER_FILE).write_text("3")
    (problem,) = checkpoint_shape_problems(argparse.Namespace(), flag, str(tmp_path), None)
    assert problem.startswith(f"{flag}: {tmp_path}/iter_0000003/.metadata names ")
    assert not marker.exists()


@pytest.mark.parametrize("name", [("os", "system"), ("torch", "load"), ("torch", "float_power"), ("builtins", "eval")])
def test_names_that_a_description_of_a_checkpoint_may_not_hold(name: tuple[str, str], tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(f"c{name[0]}\n{name[1]}\n.".encode())
    with pytest.raises(UsageError, match=f"names {name[0]}.{name[1]}"):
        check_names(tmp_path)
    with pytest.raises(UsageError, match=f"names {name[0]}.{name[1]}"):
        read_metadata(tmp_path)


@pytest.mark.parametrize("name", ["../other/__0_0.distcp", "/etc/passwd"])
def test_a_checkpoint_that_leads_out_of_its_directory_is_refused(name: str, tmp_path: Path) -> None:
    written = write_checkpoint(tmp_path)
    written.storage_data = {key: replace(info, relative_path=name) for key, info in written.storage_data.items()}
    (tmp_path / ".metadata").write_bytes(pickle.dumps(written))
    with pytest.raises(UsageError, match="not in its directory: do not trust it"):
        TorchDistReader(tmp_path)


def test_a_path_that_is_no_text_is_refused(tmp_path: Path) -> None:
    """As an object it might say one path when it is looked at and be another when it is opened."""
    written = write_checkpoint(tmp_path)
    path = PurePosixPath("__0_0.distcp")
    written.storage_data = {key: replace(info, relative_path=path) for key, info in written.storage_data.items()}
    (tmp_path / ".metadata").write_bytes(pickle.dumps(written))
    with pytest.raises(UsageError, match="not in its directory: do not trust it"):
        read_metadata(tmp_path)


def test_a_description_does_not_change_the_classes_of_paths(tmp_path: Path) -> None:
    """Opcode b gives a class, too, the attributes that a file says."""
    (tmp_path / ".metadata").write_bytes(b"cpathlib\nPosixPath\n(N(dVis_absolute\nNstb.")
    with pytest.raises(UsageError, match=r"\.metadata cannot be read"):
        read_metadata(tmp_path)
    assert PurePosixPath("/").is_absolute()


def test_a_damaged_description_is_left_to_its_reader_which_says_so(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / ".metadata").write_bytes((tmp_path / ".metadata").read_bytes()[:100])
    check_names(tmp_path)  # a run may go on from an older one
    with pytest.raises(UsageError, match=r"\.metadata cannot be read"):
        TorchDistReader(tmp_path)


def unsafe_calls(path: Path) -> list[tuple[str, str]]:
    """(file, call) of everything that would run what a file says, or follow where an archive leads."""
    file, found = path.relative_to(ROOT).as_posix(), []
    for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
        name = ast.unparse(call.func)
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        is_unsafe = (
            (name == "torch.load" and given.get("weights_only") != "True")
            or name
            in (
                "pickle.load",
                "pickle.loads",
                "pickle.Unpickler",
                "FileSystemReader",
                "dill.load",
                "dill.loads",
                "joblib.load",
            )
            or name in ("yaml.load", "yaml.unsafe_load", "yaml.full_load", "yaml.load_all")
            or name in ("eval", "exec", "os.system")
            or name.endswith(".extractall")
            or given.get("shell") == "True"
            or (name in ("np.load", "numpy.load") and given.get("allow_pickle") == "True")
            or given.get("trust_remote_code") == "True"
        )
        if is_unsafe:
            found.append((file, name))
    return found


def test_nothing_that_is_read_is_run() -> None:
    found = {entry for path in SOURCES for entry in unsafe_calls(path)}
    assert found == set(TRUSTED)
