"""A command line that works, to be changed by the tests of single rules; they get it as the fixture `check`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from slime.utils.arguments import Checked, CommandLine
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
}
NO_OFFLOAD = "--no-offload-train --no-offload-rollout"

Check = Callable[..., Checked]


@pytest.fixture(scope="module")
def command_line() -> CommandLine:
    return CommandLine()


@pytest.fixture
def check(command_line: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """Checks the base line with flags changed or added ("--a 1 --b") and others left out."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)
    write_files(tmp_path)

    def checked(changes: str = "", without: str = "") -> Checked:
        flags = {name: value.split() for name, value in BASE.items() if name not in without.split()}
        for part in (" " + changes).split(" --")[1:]:
            name, *values = part.split()
            flags["--" + name] = values
        return command_line.check([word for name, values in flags.items() for word in (name, *values)])

    return checked


def has(sentences: list[str], text: str) -> bool:
    assert any(text in sentence for sentence in sentences), sentences
    return True
