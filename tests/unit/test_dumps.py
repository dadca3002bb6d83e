"""Dumps: whole or not there, readable without trust where they can be, and one sentence where they cannot be read."""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from slime.checkpoints.rollout_files import load_dump, load_samples, save_dump, subsample
from slime.utils.errors import UsageError
from slime.utils.types import Sample


class Mine:
    """An object of user code, as a sample's metadata may hold."""


def write(path: Path, *samples: Sample) -> Path:
    save_dump(path, {"rollout_id": "0", "samples": [sample.to_dict() for sample in samples]})
    return path


def test_a_sample_with_arrays_is_read_without_trust_and_is_the_same(tmp_path: Path):
    experts = np.arange(12, dtype=np.int32).reshape(2, 3, 2)
    sample = Sample(index=4, tokens=[1, 2, 3], response_length=2, reward={"acc": np.float32(0.5)}, label=("a", 1))
    sample.rollout_routed_experts, sample.metadata = experts, {"nested": [{"array": np.ones(2)}]}
    path = write(tmp_path / "new" / "0.pt", sample)
    load_dump(path)  # would refuse what has to be trusted
    (again,) = load_samples(path, option="--x")
    assert (again.index, again.tokens, again.reward, again.label) == (4, [1, 2, 3], {"acc": 0.5}, ("a", 1))
    assert np.array_equal(np.asarray(again.rollout_routed_experts), experts)
    assert again.metadata["nested"][0]["array"].tolist() == [1.0, 1.0]
    assert type(sample.rollout_routed_experts) is np.ndarray, "the run's own sample is left as it was"


def test_pixels_that_samples_of_a_prompt_share_are_written_once_and_shared_again(tmp_path: Path):
    inputs = {"pixel_values": np.ones((500, 100), np.float32)}
    samples = [Sample(index=i, tokens=[1, 2], response_length=1, multimodal_train_inputs=inputs) for i in range(4)]
    path = write(tmp_path / "0.pt", *samples)
    assert inputs["pixel_values"].nbytes < path.stat().st_size < 2 * inputs["pixel_values"].nbytes
    first, *others = (sample.multimodal_train_inputs for sample in load_samples(path, option="--x"))
    assert first is not None and first["pixel_values"].sum() == 50_000
    assert all(one is not None and one["pixel_values"] is first["pixel_values"] for one in others)


def test_an_image_is_written_as_a_file_and_read_without_trust(tmp_path: Path):
    image = Image.effect_noise((9, 7), 50).convert("RGB")
    path = write(tmp_path / "0.pt", *(Sample(multimodal_inputs={"images": [image]}) for _ in range(2)))
    load_dump(path)
    first, second = (sample.multimodal_inputs for sample in load_samples(path, option="--x"))
    assert first is second and first is not None and first["images"][0].tobytes() == image.tobytes()


def test_objects_are_read_only_from_a_file_that_is_trusted(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = write(tmp_path / "0.pt", Sample(metadata={"mine": Mine()}))
    with pytest.raises(UsageError, match=r"0\.pt holds more than tensors and plain data.*trust it.*Mine"):
        load_dump(path)
    (sample,) = load_samples(path, option="--x")
    assert isinstance(sample.metadata["mine"], Mine) and "it is read as a file of your own" in caplog.text


def test_a_dump_that_cannot_be_written_leaves_nothing_half(tmp_path: Path):
    save_dump(tmp_path / "0.pt", {"rollout_id": 0})
    with pytest.raises(Exception, match="pickle"):
        save_dump(tmp_path / "0.pt", {"rollout_id": lambda: 0})
    assert [path.name for path in tmp_path.iterdir()] == ["0.pt"]
    assert load_dump(tmp_path / "0.pt") == {"rollout_id": 0}


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_dump_that_finds_no_room_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    save_dump(tmp_path / "0.pt", {"rollout_id": 0})
    opens = io.open
    with monkeypatch.context() as patch:
        patch.setattr(io, "open", lambda path, *more: opens("/dev/full" if ".pt." in str(path) else path, *more))
        save_dump(tmp_path / "0.pt", {"rollout_id": 1})
        save_dump(tmp_path / "1.pt", {"rollout_id": 1})
    assert [path.name for path in tmp_path.iterdir()] == ["0.pt"] and load_dump(tmp_path / "0.pt") == {"rollout_id": 0}
    (said,) = [text for text in caplog.messages if "1.pt is not written" in text]
    assert "No space left on device" in said and "the run goes on without it" in said


def test_a_file_that_is_no_dump_is_named(tmp_path: Path):
    text, half, tensor, train = (tmp_path / name for name in ("text.pt", "half.pt", "tensor.pt", "train.pt"))
    text.write_text("{}")
    whole = write(tmp_path / "0.pt", Sample(tokens=list(range(500)))).read_bytes()
    half.write_bytes(whole[: len(whole) // 2])
    torch.save(torch.ones(1), tensor)
    save_dump(train, {"samples": [], "dp_shards": []})
    for path in (text, half):
        with pytest.raises(UsageError, match=rf"--x: {path} is no dump: torch.load cannot read it; dump it with"):
            load_samples(path, option="--x")
    with pytest.raises(UsageError, match="holds a Tensor, not a dict"):
        load_samples(tensor, option="--x")
    with pytest.raises(UsageError, match=r"train\.pt is no dump of a rollout's samples"):
        load_samples(train, option="--x")


@pytest.mark.parametrize(
    ("share", "expected"), [(None, [0, 1, 2, 3, 4, 5]), (1.0, [0, 1, 2, 3, 4, 5]), (0.7, [0, 1, 4, 5]), (0.01, [5])]
)
def test_a_share_is_half_from_each_end(share: float | None, expected: list[int]):
    assert subsample(list(range(6)), share) == expected
