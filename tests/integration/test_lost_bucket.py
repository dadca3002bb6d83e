"""A bucket of weights that never reaches a real engine is noticed, and everything is sent once more."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file

from slime.backends.megatron_utils.update_weight import base, buckets
from slime.backends.megatron_utils.update_weight.from_tensor import TensorWeightUpdater
from slime.backends.sglang_utils.sglang_engine import SGLangEngine


class LossyUpdater(TensorWeightUpdater):
    """Drops the bucket of one version on its way, so many times."""

    lose = ""
    times = 2

    def _post(self, prepared: list[Any], version: str) -> buckets.Posted:
        if version == self.lose and self.times:
            self.times -= 1
            return buckets.Posted()
        return super()._post(prepared, version)


@pytest.fixture
def updater(engine: SGLangEngine, tiny_models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> LossyUpdater:
    weights = list(load_file(tiny_models[1] / "model.safetensors").items())
    buckets = [weights[i::3] for i in range(3)]
    monkeypatch.setattr(base, "iter_hf_buckets", lambda args, model, *, buffer_size: iter(buckets))
    args = SimpleNamespace(
        update_weights_in_flight=False,
        update_weight_buffer_size=1,
        distributed_timeout_minutes=1.0,
        hf_checkpoint=str(tiny_models[1]),
        mtp_num_layers=None,
        check_weight_update_equal=False,
        train_backend="megatron",
        multimodal_keys=None,
        offload_train=False,
    )
    made = LossyUpdater(args, model=[])
    made.connect([engine], engine_sizes=[1])
    return made


@pytest.mark.parametrize("lost", ["1.0", "1.1", "1.2"])
def test_a_bucket_that_never_arrives_is_noticed(updater: LossyUpdater, lost: str, engine: SGLangEngine):
    updater.lose = lost
    with pytest.raises(base.WeightSyncError, match="a bucket of weights was lost"):
        updater.update()
    assert engine.get_weight_version() != "1"
    engine.continue_generation()  # the failed sync leaves the engine paused: it must not serve half of the weights


@pytest.mark.parametrize("lost", ["1.0", "1.2"])
def test_a_sync_that_loses_a_bucket_once_is_sent_whole_again(
    updater: LossyUpdater, lost: str, engine: SGLangEngine, caplog: pytest.LogCaptureFixture
):
    updater.lose, updater.times = lost, 1
    updater.update()
    assert engine.get_weight_version() == "1"
    assert "it is sent whole once more" in caplog.text


def test_a_complete_sync_leaves_the_engine_at_its_version(updater: LossyUpdater, engine: SGLangEngine):
    updater.update()
    assert engine.get_weight_version() == "1"
