"""Files from elsewhere are data: an index cannot name files outside its directory, and nothing in a file is run."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from slime.utils.conversion.raw_tensors import RawTensors
from slime.utils.errors import UsageError
from slime.utils.safetensors_files import INDEX_FILE, read_index, what_is_wrong

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCES = [
    path
    for folder in ("slime", "slime_plugins", "tools", "examples", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
TRUSTED = {
    (
        "slime/utils/dumps.py",
        "torch.load",
    ): "after weights_only failed, where the caller trusts the file",
    ("slime/utils/row_files.py", "pickle.loads"): "what this process has written into a nameless temporary file",
    ("benchmarks/cpu_step.py", "torch.load"): "a dump of the benchmark itself",
}


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/etc/passwd", "a/../../b", "", None, 7])
def test_an_index_that_leads_out_of_its_directory_is_refused(name: object, tmp_path: Path) -> None:
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": {"w": name}}))
    with pytest.raises(ValueError, match="not in its directory: do not trust it"):
        read_index(tmp_path)
    assert "do not trust it" in str(what_is_wrong(tmp_path))
    with pytest.raises(UsageError, match="do not trust it"):
        RawTensors(tmp_path)


def test_files_of_a_directory_and_below_it_may_be_named(tmp_path: Path) -> None:
    names = {"a": "model-00001-of-00002.safetensors", "b": "shards/model..2.safetensors"}
    (tmp_path / INDEX_FILE).write_text(json.dumps({"weight_map": names}))
    assert read_index(tmp_path)["weight_map"] == names


def unsafe_calls(path: Path) -> list[tuple[str, str]]:
    """(file, call) of everything that would run what a file says, or follow where an archive leads."""
    file, found = path.relative_to(ROOT).as_posix(), []
    for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
        name = ast.unparse(call.func)
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        is_unsafe = (
            (name == "torch.load" and given.get("weights_only") != "True")
            or name in ("pickle.load", "pickle.loads", "dill.load", "dill.loads", "joblib.load")
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
