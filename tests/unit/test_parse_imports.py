"""A command line is checked without the packages whose import takes seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
sys.path.insert(0, sys.argv[1] + "/benchmarks")
from pathlib import Path
from parse_time import HEAVY, training_line
from slime.utils.arguments import CommandLine
checked = CommandLine().check([*training_line(Path(sys.argv[2])), *sys.argv[3:]])
assert not checked.problems.wrong, checked.problems.wrong
assert checked.args.sglang_mem_fraction_static is None or checked.args.sglang_overrides
print([name for name in HEAVY if name in sys.modules])
"""
HF_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "attention_bias": False,
}


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
