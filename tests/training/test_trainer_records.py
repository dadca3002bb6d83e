"""What trainer ranks record of their samples: columns of passes, and of the loss where there was no pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime.checkpoints.rollout_files import load_dump, samples_path, trainer_path, write_tables
from slime.observability.rollout_records import RolloutFile, RolloutRecords
from slime.observability.rollout_records.schema import PLAIN, SAMPLES, sample_tables
from slime.training.reports import TrainerRecorder
from slime.utils.types import Sample
from tests.integration.trainer_world import NUM_SAMPLES, make_train_data, train, trainer_args


def leave(actor: Any, records: list[Any]) -> None:
    actor._records.finish()


def record(output_dir: Path) -> RolloutFile:
    """The rollout of `make_train_data` with the columns that a trainer has written to the directory."""
    samples = [(i, Sample(index=i), None) for i in range(NUM_SAMPLES)]
    write_tables(
        samples_path(output_dir / "rollouts", 0), SAMPLES, sample_tables(samples, reward_key=None), plain=PLAIN
    )
    return RolloutRecords(output_dir).open(0)


def test_the_losss_first_pass_gives_what_a_pass_of_its_own_would(hf_path: Path, tmp_path: Path) -> None:
    own, template = tmp_path / "own", str(tmp_path / "{rollout_id}.pt")
    train(trainer_args(hf_path, keep_rollouts="all", output_dir=str(own), save_debug_train_data=template), leave)
    train(trainer_args(hf_path, keep_rollouts="all", output_dir=str(tmp_path / "loss")), leave)
    expected = load_dump(tmp_path / "0.pt")["samples"]
    with_pass, of_loss, lengths = record(own), record(tmp_path / "loss"), make_train_data()["response_lengths"]
    for i, dumped in enumerate(expected):
        for file in (with_pass, of_loss):
            found = file.sample(i)
            assert found["rank"] == 0 and found["ref_log_probs"] is None
            assert found["advantages"] == pytest.approx(dumped["advantages"].tolist())
            np.testing.assert_allclose(found["log_probs"], dumped["log_probs"].numpy(), atol=1e-5)
            assert len(found["entropy"]) == lengths[i] and min(found["entropy"]) > 0


def test_ranks_of_one_copy_of_the_model_write_its_samples_once(hf_path: Path, tmp_path: Path) -> None:
    flags = "--tensor-model-parallel-size 2"
    train(trainer_args(hf_path, flags, keep_rollouts="all", output_dir=str(tmp_path)), leave)
    assert [path.name for path in (tmp_path / "rollouts").iterdir()] == ["00000.train.rank0.parquet"]
    assert all(record(tmp_path).sample(i)["log_probs"] for i in range(NUM_SAMPLES))


def test_only_recorded_samples_are_written(hf_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = frozenset({2, 5, 7})
    data = make_train_data() | {"recorded_indices": kept}
    monkeypatch.setattr("tests.integration.trainer_world.make_train_data", lambda: data)
    train(trainer_args(hf_path, keep_rollouts="all", output_dir=str(tmp_path)), leave)
    file = record(tmp_path)
    assert {i for i in range(NUM_SAMPLES) if file.sample(i)["log_probs"] is not None} == kept


def test_what_cannot_be_recorded_ends_no_rank(hf_path: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recorder = TrainerRecorder(trainer_args(hf_path, keep_rollouts="all", output_dir=str(tmp_path)), 0)
    layout = {"tp_rank": 0, "cp_rank": 0, "pp_rank": 0, "pp_size": 1}
    for rollout_id in range(2):
        recorder.record(rollout_id, None, layout)  # type: ignore[arg-type]
    recorder.finish()
    assert ["rollout 0 is not recorded" in line.getMessage() for line in caplog.records] == [True]


def test_a_pipelines_last_stage_prunes_what_it_writes(hf_path: Path, tmp_path: Path) -> None:
    recorder = TrainerRecorder(trainer_args(hf_path, keep_rollouts="last:1", output_dir=str(tmp_path)), 1)
    writer = recorder._writer
    assert writer is not None
    writer.directory.mkdir()
    for rollout_id in range(2):
        path = trainer_path(writer.directory, rollout_id, 1)
        writer.submit("rollout", path.name, path.touch)
    recorder.finish()
    assert [path.name for path in writer.directory.iterdir()] == ["00001.train.rank1.parquet"]
