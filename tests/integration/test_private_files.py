"""What of a whole run another user of the machine can read or change, where the umask forbids nothing."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.launch import ROOT, grpo_flags, make_model, train, write_prompts

KEYS = ("key-of-engines-4711", "key-of-routers-4712")


@pytest.fixture
def folder() -> Iterator[Path]:
    """Of everybody: pytest's own cannot be entered by others. Ray needs a short one."""
    before, made = os.umask(0), Path(tempfile.mkdtemp(prefix="t", dir="/tmp"))
    made.chmod(0o1777)
    yield made
    os.umask(before)
    shutil.rmtree(made, ignore_errors=True)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.timeout(300)
def test_another_user_reads_no_secret_of_a_run_and_changes_nothing_that_it_loads(folder: Path) -> None:
    out, temp = folder / "out", folder / "tmp"
    temp.mkdir()
    temp.chmod(0o1777)
    flags = grpo_flags(make_model(folder / "model"), write_prompts(folder / "prompts.jsonl"))
    flags += ["--custom-rm-path", f"{ROOT}/tests/integration/user_code.py:show_to_a_stranger"]
    flags += ["--colocate", "--num-rollout", 2, "--save", out / "saved", "--save-interval", 1]
    flags += ["--save-debug-rollout-data", out / "samples_{rollout_id}.pt"]
    flags += [
        "--sglang-api-key",
        KEYS[0],
        "--router-api-key",
        KEYS[1],
        "--use-tensorboard",
        "--tb-project-name",
        out / "board",
    ]
    run = train(out, *flags, TMPDIR=str(temp))
    seen = json.loads((out / "stranger.json").read_text())
    assert any("/sglang_loads_" in path for path in seen["memory"]), "the engine ran while the stranger looked"
    outside = [path for path in seen["read"] + seen["write"] if not path.startswith((f"{out}/", f"{folder}/model"))]
    assert sorted(set(outside)) == sorted(map(str, (out, temp, folder / "prompts.jsonl")))
    files = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    unread = {str(path.relative_to(out)) for path in out.rglob("*") if path.stat().st_mode & 0o777 == 0o600}
    assert unread == {"logs/engine_0.json", "logs/router.json", "samples_0.pt", "samples_1.pt"}
    assert "logs/engine_0.log" in files - unread, "the rest is as the umask says"
    states = list((out / "saved" / "rollout").glob("*.pt"))
    assert len(states) == 2 and all(path.stat().st_mode & 0o777 == 0o644 for path in states)
    for name in sorted(files - unread):
        content = (out / name).read_bytes()
        assert not any(key.encode() in content for key in KEYS), name
    assert not any(key in run.printed for key in KEYS)
