"""A real engine on CPU with fp8 weights: its numbers are those of the dequantised model, before and after a sync."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

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
from tools import convert_hf_to_fp8


def unquantized_twin(quantized: Path) -> Any:
    """transformers' model with the weights that a quantised checkpoint stands for, in fp32."""
    import transformers as hf

    config = json.loads((quantized / "config.json").read_text())
    del config["quantization_config"]
    reader, plain = SafetensorsReader(quantized), quantized.with_name(quantized.name + "_plain")
    writer = HfWriter(plain, quantized)
    writer.add((name, reader.get(name)) for name in reader.names())
    writer.finish()
    (plain / "config.json").write_text(json.dumps(config))
    return hf.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(("qwen3", "--block-size", "16"), id="block", marks=pytest.mark.slow),
        pytest.param(("qwen3", "--strategy", "tensor"), id="tensor"),
        pytest.param(("minimax_m2", "--block-size", "16"), id="minimax"),
    ],
)
def test_an_engine_answers_with_the_weights_that_fp8_stands_for(
    flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a bucket in shared memory, and after broadcasts."""
    (family, *strategy), models = flags, []
    for seed in (0, 1):
        make_model(tmp_path / f"hf{seed}", "--seed", seed, "--family", family)
        fp8 = tmp_path / f"fp8_{seed}"
        assert (
            convert_hf_to_fp8.main(["--model-dir", str(tmp_path / f"hf{seed}"), "--save-dir", str(fp8), *strategy])
            == 0
        )
        models.append(unquantized_twin(fp8))
    engine = make_engine(tmp_path / "fp8_0", tmp_path / "engine.log")
    engine.start(deadline_s=170)
    try:
        assert largest_gap(engine, models[0]) < 1e-4
        source = SafetensorsReader(tmp_path / "hf1")  # what a trainer holds
        bucket = quantize_bucket(
            [(name, source.get(name)) for name in source.names()], format_of_checkpoint(tmp_path / "fp8_0")
        )
        handle = weight_transfer.serialize_bucket(bucket)
        engine.update_weights_from_tensor([handle], load_format="flattened_bucket", weight_version="1")
        engine.flush_cache()
        assert largest_gap(engine, models[1]) < 1e-4
        assert largest_gap(engine, models[0]) > 0.1
        source = SafetensorsReader(tmp_path / "hf0")
        found = [(name, source.get(name)) for name in source.names()]
        # What an engine fuses is of one parameter of the trainer, and so of one bucket.
        parts = [[item for item in found if f"layers.{layer}." in item[0]] for layer in range(2)]
        parts.append([item for item in found if "layers." not in item[0]])
        fmt = format_of_checkpoint(tmp_path / "fp8_0")
        monkeypatch.setattr(
            base, "iter_hf_buckets", lambda args, model, *, buffer_size: (quantize_bucket(part, fmt) for part in parts)
        )
        updater = updater_to(engine, tmp_path / "fp8_0")
        for version in ("1", "2"):
            updater.update()
            assert engine.get_weight_version() == version
            assert largest_gap(engine, models[0]) < 1e-4, "types of several sizes lie in one bucket"
        leave(updater)
    finally:
        engine.shutdown()
