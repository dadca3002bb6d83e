"""A command line that works, to be changed by tests: as it is checked (the fixture `check`), or as `parse_args` takes
it (the fixture `base`, and `line`). It is strict: a flag without an effect is an error, as any other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from slime.config.parse import Checked, CommandLine, parse_args
from slime.utils.errors import UsageError
from tests.unit.argument_mutations import write_files

BASE = {
    "--accelerator": "cpu",
    "--hf-checkpoint": "hf",
    "--model-args-from-hf": "",
    "--prompt-data": "data.jsonl",
    "--label-key": "label",
    "--rm-type": "math",
    "--rollout-batch-size": "4",
    "--n-samples-per-prompt": "2",
    "--num-rollout": "3",
    "--colocate": "",
    "--strict-flags": "",
}
NO_OFFLOAD = "--no-offload-train --no-offload-rollout"

Check = Callable[..., Checked]


@pytest.fixture(scope="module")
def command_line() -> CommandLine:
    return CommandLine()


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """The flags of a run that works, by name; the files they point at are made."""
    return _with_files(tmp_path, monkeypatch)


@pytest.fixture
def check(command_line: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """Checks the base line with flags changed or added, and others left out, as `line` has them."""
    flags = _with_files(tmp_path, monkeypatch)
    return lambda changes="", without="": command_line.check(line(flags, changes, without))


def _with_files(directory: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    monkeypatch.chdir(directory)
    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)
    write_files(directory)
    return {name: value.split() for name, value in BASE.items()}


def line(base: dict[str, list[str]], changes: str = "", without: str = "") -> list[str]:
    """The command line of `base` with flags changed or added ("--a 1 --b") and others left out."""
    flags = {name: values for name, values in base.items() if name not in without.split()}
    for part in (" " + changes).split(" --")[1:]:
        name, *values = part.split()
        flags["--" + name] = values
    return [token for name, values in flags.items() for token in (name, *values)]


def errors(argv: list[str]) -> list[str]:
    """What `parse_args` refuses a line for."""
    with pytest.raises(UsageError) as caught:
        parse_args(argv=argv)
    return caught.value.messages


def has(sentences: list[str], text: str) -> bool:
    assert any(text in sentence for sentence in sentences), sentences
    return True
