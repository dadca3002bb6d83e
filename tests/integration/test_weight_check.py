"""--check-weight-update-equal and the look at a few tensors, with a real engine: both see what is not there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file

from slime.backends.megatron_utils.update_weight import base
from slime.backends.megatron_utils.update_weight.from_tensor import TensorWeightUpdater
from slime.backends.sglang_utils.bucket_load import NOT_SHORT
from slime.backends.sglang_utils.sglang_engine import SGLangEngine


def updater_of(engine: SGLangEngine, model: Path, sent: Path, monkeypatch: pytest.MonkeyPatch) -> TensorWeightUpdater:
    """An updater of a run of `model` whose trainer holds the weights of `sent`."""
    weights = list(load_file(sent / "model.safetensors").items())
    buckets = [weights[i::3] for i in range(3)]
    monkeypatch.setattr(base, "iter_hf_buckets", lambda args, model, *, buffer_size: iter(buckets))
    args = SimpleNamespace(
        update_weights_in_flight=False,
        update_weight_buffer_size=1,
        distributed_timeout_minutes=1.0,
        hf_checkpoint=str(model),
        mtp_num_layers=None,
        check_weight_update_equal=True,
        train_backend="megatron",
        multimodal_keys=None,
        offload_train=True,
    )
    made = TensorWeightUpdater(args, model=[])
    made.connect([engine], engine_sizes=[1])
    return made


def test_a_sync_that_restores_every_bit_passes_and_another_one_is_refused(
    engine: SGLangEngine, tiny_models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, other = tiny_models
    load_all = updater_of(engine, model, model, monkeypatch)
    load_all.args.check_weight_update_equal = False
    load_all.update()
    for action in ("snapshot", "reset_tensors"):  # as the rollout manager does when the engines have started
        engine.check_weights(action)
    with pytest.raises(RuntimeError, match="check tensor equality failed"):
        engine.check_weights("compare")
    updater_of(engine, model, model, monkeypatch).update()
    with pytest.raises(base.WeightSyncError, match="--check-weight-update-equal failed on engine 0 .*engine_0.log"):
        updater_of(engine, model, other, monkeypatch).update()
    engine.continue_generation()


def test_buckets_that_come_again_restore_every_bit(
    engine: SGLangEngine, tiny_models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine loads them by the copies of the first time (`bucket_load`)."""
    for model in tiny_models:
        updater = updater_of(engine, model, model, monkeypatch)
        updater.args.check_weight_update_equal = False
        updater.update()
    for action in ("snapshot", "reset_tensors"):
        engine.check_weights(action)
    updater.update()
    engine.check_weights("compare")
    assert NOT_SHORT not in Path(engine.contact().log_path).read_text()


def test_an_engine_says_what_it_holds_of_the_tensors_that_it_has(engine: SGLangEngine) -> None:
    (held,) = engine.sample_weights(["model.norm.weight", "model.layers.0.self_attn.q_proj.weight"]) or [{}]
    assert list(held) == ["model.norm.weight"], "q, k and v are one tensor there"
    assert held["model.norm.weight"].startswith("float32 128 ")
