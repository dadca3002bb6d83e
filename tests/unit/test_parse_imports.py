"""A command line is checked without the packages whose import takes seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.unit.argument_mutations import HF_CONFIG

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
sys.path.insert(0, sys.argv[1] + "/benchmarks")
from pathlib import Path
from parse_time import HEAVY, training_line
from slime.config.parse import CommandLine
checked = CommandLine().check([*training_line(Path(sys.argv[2])), *sys.argv[3:]])
assert not checked.problems.wrong, checked.problems.wrong
assert checked.args.sglang_mem_fraction_static is None or checked.args.sglang_overrides
print([name for name in HEAVY if name in sys.modules])
"""


def imported_by(work: Path, *flags: str) -> list[str]:
    command = [sys.executable, "-c", PROGRAM, str(ROOT), str(work), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1].replace("'", '"'))


def test_a_training_line_is_checked_without_torch_megatron_sglang_and_ray(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(HF_CONFIG))
    imported_by(tmp_path)  # makes the cached tables where there are none yet, for which these are imported
    common = [
        "--sglang-mem-fraction-static",
        "0.8",
        "--sglang-context-length",
        "4k",
        "--sglang-cuda-graph-bs",
        "1",
        "2",
    ]
    assert imported_by(tmp_path, *common, "--router-policy", "random", "--model-name", "qwen3") == []
