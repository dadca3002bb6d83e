"""A real engine on CPU with int4 weights: its numbers are those of the dequantised model, before and after a sync."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from slime.backends.megatron_utils.checkpoint.hf_export import HfWriter
from slime.backends.megatron_utils.megatron_to_hf.processors.quantizer import quantize_bucket
from slime.backends.megatron_utils.update_weight import base
from slime.backends.sglang_utils import weight_transfer
from slime.conversion.reader import SafetensorsReader
from slime.weights.formats import format_of_checkpoint
from tests.integration.conftest import make_engine
from tests.integration.launch import make_model
from tests.integration.test_distributed_sync import leave, updater_to
from tests.integration.test_engine import largest_gap
from tests.integration.test_fp8_engine import unquantized_twin
from tools import convert_hf_to_int4_direct


def test_an_engine_answers_with_the_weights_that_int4_stands_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a bucket in shared memory, after broadcasts, and after files; attention of one layer is left alone."""
    models = []
    for seed in (0, 1):
        make_model(tmp_path / f"hf{seed}", "--seed", seed, "--family", "qwen3_moe")
        command = ["--model-dir", f"{tmp_path}/hf{seed}", "--save-dir", f"{tmp_path}/int4_{seed}"]
        rules = ("--group-size", "16", "--ignore-rules", "lm_head", r"re:.*layers\.1\.self_attn.*")
        assert convert_hf_to_int4_direct.main([*command, *rules]) == 0
        models.append(unquantized_twin(tmp_path / f"int4_{seed}"))
    fmt = format_of_checkpoint(tmp_path / "int4_0")
    trained = [SafetensorsReader(tmp_path / f"hf{seed}") for seed in (0, 1)]  # what a trainer holds
    held = [[(name, reader.get(name)) for name in reader.names()] for reader in trained]
    engine = make_engine(tmp_path / "int4_0", tmp_path / "engine.log")
    engine.start(deadline_s=170)
    try:
        engine.check_weights("snapshot")
        assert largest_gap(engine, models[0]) < 1e-4
        handle = weight_transfer.serialize_bucket(quantize_bucket(held[1], fmt))
        engine.update_weights_from_tensor([handle], load_format="flattened_bucket", weight_version="1")
        engine.flush_cache()
        assert largest_gap(engine, models[1]) < 1e-4
        assert largest_gap(engine, models[0]) > 0.1
        # Queries last, other than in the files: q, k and v are one layer, whose `weight_shape` is that of the last.
        held[0].sort(key=lambda item: "q_proj" in item[0])
        parts = [[item for item in held[0] if f"layers.{layer}." in item[0]] for layer in range(2)]
        parts.append([item for item in held[0] if "layers." not in item[0]])
        monkeypatch.setattr(
            base, "iter_hf_buckets", lambda args, model, *, buffer_size: (quantize_bucket(part, fmt) for part in parts)
        )
        updater = updater_to(engine, tmp_path / "int4_0")
        for version in ("1", "2"):
            updater.update()
            assert engine.get_weight_version() == version
            assert largest_gap(engine, models[0]) < 1e-4, "by the loaders, then by their recorded copies"
            engine.check_weights("compare")
        leave(updater)
        writer = HfWriter(
            tmp_path / "v", tmp_path / "int4_0", keeps_dtypes=True, index_metadata={"version": 3}, has_manifest=True
        )
        writer.add(quantize_bucket(held[1], fmt))
        writer.finish()
        engine.update_weights_from_disk(str(tmp_path / "v"), weight_version="3")
        engine.flush_cache()
        shutil.rmtree(tmp_path / "v")
        assert largest_gap(engine, models[1]) < 1e-4
    finally:
        engine.shutdown()
