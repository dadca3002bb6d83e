"""tools/profile_rollout.py and tools/analyze_profile.py on a real engine: its steps are recorded, read and counted."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime.backends.sglang_utils.sglang_engine import SGLangEngine
from slime.processes.wait import wait
from slime.utils import http_utils
from tools.analyze_profile import main as analyze
from tools.parts.kernel_traces import read_trace, summarize
from tools.profile_rollout import main as profile


def generate(engine: SGLangEngine) -> None:
    sampling = {"max_new_tokens": 8, "ignore_eos": True, "temperature": 0.0}
    http_utils.post_sync(f"{engine.url}/generate", {"input_ids": [5, 6, 7], "sampling_params": sampling})


def test_the_steps_of_an_engine_are_recorded_and_their_products_counted(
    engine: SGLangEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--router-url", engine.url, "--output-dir", str(tmp_path), "--activities", "CPU"]
    assert profile([*flags, "--num-steps", "2"]) == 0
    generate(engine)
    wait("the trace of two steps", 60, lambda: list(tmp_path.glob("*.trace.json.gz")))
    (path,) = tmp_path.glob("*.trace.json.gz")
    assert path.name.startswith(engine.url.partition("//")[2].replace(":", "-")) and "TP-0" in path.name
    wait("the whole trace", 60, lambda: _is_whole(path))
    kinds = summarize(read_trace(path)).kinds
    assert kinds["matrix products"].count > 0
    assert analyze(["--profile-dir", str(tmp_path)]) == 0
    assert "matrix products" in capsys.readouterr().out

    assert profile([*flags, "--action", "stop"]) == 1, "it has stopped by itself"
    assert profile([*flags, "--num-steps", "0"]) == 0
    generate(engine)
    assert profile([*flags, "--action", "stop"]) == 0
    assert len(list(tmp_path.glob("*.trace.json.gz"))) == 2


def _is_whole(path: Path) -> bool:
    try:
        read_trace(path)
    except Exception:  # noqa: BLE001 - the engine is still writing it
        return False
    return True
