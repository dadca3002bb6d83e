"""tools/inspect_dump.py: what it shows of both kinds of dump, and what it finds between two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from slime.checkpoints.rollout_files import save_dump
from slime.utils.types import Sample
from tests.integration.launch import make_model
from tools.inspect_dump import main


def rollout(path: Path, **changes: Any) -> Path:
    first = {"tokens": [7, 8, 9, 10], "response_length": 2, "rollout_log_probs": [-0.5, -1.5], "loss_mask": [1, 0]}
    samples = [
        Sample(index=10, prompt="1+1=", response="2!", reward=1.0, **(first | changes)),
        Sample(index=11, prompt="p", response="r", tokens=[7, 8], response_length=1, reward=0.0),
    ]
    save_dump(path, {"rollout_id": "3", "samples": [sample.to_dict() for sample in samples]})
    return path


def trained(path: Path, *, log_probs: list[float]) -> Path:
    sample = {
        "data_parallel_rank": 0, "sample_index": 10, "rollout_position": 0, "response_lengths": 2, "raw_reward": 1.0,
        "tokens": torch.tensor([7, 8, 9, 10]), "loss_masks": torch.tensor([1, 0]),
        "rollout_log_probs": torch.tensor([-0.5, -1.5]), "log_probs": torch.tensor(log_probs),
        "ref_log_probs": torch.tensor([-0.25, -2.0]), "advantages": torch.tensor([0.5, 1.5]),
    }  # fmt: skip
    save_dump(path, {"format_version": 2, "samples": [sample], "dp_shards": []})
    return path


def shown(capsys: pytest.CaptureFixture[str], *argv: object, status: int = 0) -> str:
    assert main([str(part) for part in argv]) == status
    captured = capsys.readouterr()
    return captured.out + captured.err


def test_a_line_says_of_each_sample_its_lengths_reward_and_gap(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    lines = shown(capsys, rollout(tmp_path / "3.pt")).splitlines()
    assert lines == [
        "sample 0: index 10, 2 + 2 tokens, 1 trained, reward 1.0",
        "sample 1: index 11, 1 + 1 tokens, 1 trained, reward 0.0",
    ]
    (line,) = shown(capsys, trained(tmp_path / "t.pt", log_probs=[-0.75, -9.0])).splitlines()
    # the second token is not trained: its gap of 7.5 does not count
    assert line.endswith("advantage 1, trainer - engine: mean 2.50e-01, largest 2.50e-01 at token 0")


def test_a_sample_in_full_has_its_text_and_a_row_for_each_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    text = shown(capsys, rollout(tmp_path / "3.pt"), "--sample", 0)
    assert "  prompt: '1+1='" in text and "  response: '2!'" in text and "sample 1" not in text
    rows = [
        line.split()
        for line in shown(capsys, trained(tmp_path / "t.pt", log_probs=[-1, -2]), "--sample", 0).splitlines()
    ]
    assert rows[1:] == [
        ["token", "id", "mask", "engine", "trainer", "reference", "advantage", "text"],
        ["0", "9", "1", "-0.50000", "-1.00000", "-0.25000", "0.50000"],
        ["1", "10", "0", "-1.50000", "-2.00000", "-2.00000", "1.50000"],
    ]


def test_the_tokenizer_beside_a_dump_gives_the_text_of_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    from slime.utils.processing_utils import load_tokenizer

    model = make_model(tmp_path / "tokenizer")  # where --dump-details puts it
    decode = load_tokenizer(str(model)).decode
    text = shown(capsys, trained(tmp_path / "train_data" / "3.pt", log_probs=[-1.0, -2.0]), "--sample", 0)
    assert f"prompt: {decode([7]) + decode([8])!r}" in text
    assert repr(decode([9])) in text.splitlines()[-2]


def test_two_dumps_are_compared_column_by_column(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    one, same = rollout(tmp_path / "1.pt"), rollout(tmp_path / "2.pt", session_id="another")
    assert shown(capsys, one, same) == "2 samples are equal\n"
    other = rollout(tmp_path / "3.pt", rollout_log_probs=[-0.5, -1.25], metadata={"a": 1})
    assert shown(capsys, one, other, status=1).splitlines() == [
        "rollout_log_probs: 1 samples differ, first sample 0, most sample 0: by 0.25 at 1 (-1.5 and -1.25)",
        "metadata: 1 samples differ, first sample 0, most sample 0: {} and {'a': 1}",
    ]
    assert "metadata" in shown(capsys, one, other, "--tolerance", 0.3, status=1)
    trainers = [trained(tmp_path / f"t{i}.pt", log_probs=[-0.5, value]) for i, value in enumerate((-1.5, -1.5 + 5e-7))]
    assert "equal" in shown(capsys, *trainers)
    assert "by" in shown(capsys, *trainers, "--tolerance", 1e-8, status=1)
    longer = trained(tmp_path / "long.pt", log_probs=[-0.5, -1.5, -2.5])
    assert "log_probs: 1 samples differ, first sample 0, most sample 0: 2 and 3 values" in shown(
        capsys, trainers[0], longer, status=1
    )


def test_what_cannot_be_shown_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    dump = rollout(tmp_path / "3.pt")
    assert shown(capsys, dump, "--sample", 2, status=2) == f"error: --sample 2: {dump} has samples 0 to 1\n"
    assert "there is no file" in shown(capsys, tmp_path / "4.pt", status=2)
    save_dump(tmp_path / "x.pt", {"rollout_id": 1})
    assert "has no samples" in shown(capsys, tmp_path / "x.pt", status=2)
    assert "no tokenizer" in shown(capsys, dump, "--tokenizer", tmp_path, status=2)
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "status 1 where they differ" in capsys.readouterr().out
