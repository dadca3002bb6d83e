"""The line of a verl user that docs/migration.md translates runs: only paths and sizes are those of a tiny model."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from tests.integration.launch import ROOT, make_model, train

# By default tests/contracts/test_migration_page.py checks that the line starts.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SIZES = {
    "--rollout-batch-size": "4",
    "--n-samples-per-prompt": "4",
    "--rollout-max-prompt-len": "64",
    "--rollout-max-response-len": "8",
    "--max-tokens-per-gpu": "256",
    "--lr": "1e-3",
    "--actor-num-gpus-per-node": "1",
    "--save-interval": "2",
    "--eval-interval": "2",
    "--num-epoch": "2",
}


def write_verl_rows(path: Path) -> Path:
    """Rows as verl's data scripts write them, and the column that the page adds."""
    rows = [
        {
            "data_source": "digits",
            "prompt": [{"role": "user", "content": f"{i}+{i}="}],
            "reward_model": {"style": "rule", "ground_truth": str(2 * i)},
            "extra_info": {"index": i},
            "label": str(2 * i),
        }
        for i in range(8)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def test_the_translated_line_of_a_verl_user_trains_evaluates_and_saves(tmp_path: Path):
    (tmp_path / "reward.py").write_text("async def score(args, sample):\n    return float(len(sample.response) % 2)\n")
    page = (ROOT / "docs" / "migration.md").read_text()
    [example] = re.findall(r"```bash\npython train.py (--advantage-estimator grpo.*?)```", page, flags=re.DOTALL)
    model, rows = make_model(tmp_path / "model"), write_verl_rows(tmp_path / "rows.parquet")
    paths = {
        "Qwen3-0.6B": model,
        "train.parquet": rows,
        "test.parquet": rows,
        "reward.py:score": f"{tmp_path}/reward.py:score",
        "ckpt": tmp_path / "ckpt",
    }
    words = shlex.split(example.replace("\\\n", " "))
    line = [SIZES.get(flag, paths.get(word, word)) for flag, word in zip(["", *words], words, strict=False)]
    run = train(tmp_path / "out", *line, "--accelerator", "cpu")
    # 8 prompts, 4 a rollout, 2 epochs: 4 rollouts of --num-steps-per-rollout 2
    assert len(run.column("train/grad_norm")) == 8
    assert len(run.column("eval/test", "eval/step")) == 3, "before training, and after every second of four rollouts"
    assert (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").read_text().strip() == "3"
