"""int4 on CUDA: quantising gives the CPU's bytes, and a real engine with int4 weights holds after a sync exactly what
it would have loaded from a checkpoint; needs a GPU with SGLang's Marlin kernels (Ampere or later)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from slime.backends.megatron_utils.checkpoint.hf_export import HfWriter
from slime.backends.megatron_utils.megatron_to_hf.processors.quantizer import quantize_bucket
from slime.backends.sglang_utils import weight_transfer
from slime.conversion.reader import SafetensorsReader
from slime.weights.formats import Int4Format, format_of_checkpoint
from tests.gpu.test_fp8 import CUDA, SIZES, mean_gap
from tests.integration.conftest import make_engine
from tests.integration.launch import make_model
from tools import convert_hf_to_int4_direct, convert_k2_thinking_int4_to_bf16

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

EXPERTS = ("--family", "qwen3_moe", "--experts", 8, "--expert-ffn-size", 256)


def test_quantizing_on_cuda_gives_the_bytes_of_the_cpu() -> None:
    generator = torch.Generator().manual_seed(0)
    bucket = [
        (f"model.layers.0.self_attn.{name}_proj.weight", torch.randn(shape, generator=generator).bfloat16())
        for name, shape in {"q": (1024, 768), "k": (200, 768), "o": (768, 1024)}.items()
    ]
    on_cuda = quantize_bucket([(name, tensor.cuda()) for name, tensor in bucket], Int4Format())
    for (name, found), (_, expected) in zip(on_cuda, quantize_bucket(bucket, Int4Format()), strict=True):
        assert torch.equal(found.cpu(), expected), name


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("group_size", [32, 128])
@pytest.mark.parametrize(
    ("family", "settings"),
    [((), {}), (EXPERTS, {"moe_runner_backend": "marlin"}), (EXPERTS, {"moe_runner_backend": "triton"})],
    ids=["dense", "experts by Marlin", "experts by Triton"],
)
def test_an_engine_holds_after_a_sync_what_it_would_have_loaded(
    family: tuple[object, ...], settings: dict[str, str], group_size: int, tmp_path: Path
) -> None:
    models = []
    for seed in (0, 1):
        hf, int4 = tmp_path / f"hf{seed}", tmp_path / f"int4_{seed}"
        make_model(tmp_path / f"fp32_{seed}", "--seed", seed, *SIZES, *family)
        in_bf16(tmp_path / f"fp32_{seed}", hf)
        # Attention, too: one model has both kinds of layers.
        rules = ["--group-size", str(group_size), "--ignore-rules", "lm_head"]
        assert convert_hf_to_int4_direct.main(["--model-dir", str(hf), "--save-dir", str(int4), *rules]) == 0
        plain = tmp_path / f"plain{seed}"
        assert convert_k2_thinking_int4_to_bf16.main(["--model-dir", str(int4), "--output-dir", str(plain)]) == 0
        models.append(bf16_model(plain))
    engine = make_engine(tmp_path / "int4_0", tmp_path / "engine.log", accelerator="cuda", **CUDA, **settings)
    engine.start(deadline_s=1200)  # at its first start on a machine SGLang compiles all of Marlin: minutes

    def send(number: int, version: str) -> None:
        reader = SafetensorsReader(tmp_path / f"hf{number}")  # what a trainer holds
        tensors = [(name, reader.get(name).cuda()) for name in reader.names()]
        fmt = format_of_checkpoint(tmp_path / "int4_0")
        # In two buckets, cut between an expert's gate and its up: each part goes to its place by itself.
        for part in (tensors[0::2], tensors[1::2]):
            handle = weight_transfer.serialize_bucket(quantize_bucket(part, fmt))
            engine.update_weights_from_tensor([handle], load_format="flattened_bucket", weight_version=version)
        engine.flush_cache()

    try:
        engine.check_weights("snapshot")
        loaded = mean_gap(engine, models[0])
        send(1, "1")
        synced, other = mean_gap(engine, models[1]), mean_gap(engine, models[0])
        send(0, "2")
        engine.check_weights("compare")  # byte by byte what SGLang itself made of the checkpoint
    finally:
        engine.shutdown()
    print(f"int4: mean log-prob gap as loaded {loaded:.4f}, after a sync {synced:.4f}, to other weights {other:.4f}")
    # Weights are the same and computed with in bf16; what is left is bf16's.
    assert loaded < 0.05 and synced < 0.05 and other > 4 * synced


def in_bf16(source: Path, target: Path) -> None:
    """A checkpoint in bf16."""
    config = json.loads((source / "config.json").read_text()) | {"dtype": "bfloat16"}
    reader, writer = SafetensorsReader(source), HfWriter(target, source, keeps_dtypes=True)
    writer.add((name, reader.get(name).bfloat16()) for name in reader.names())
    writer.finish()
    (target / "config.json").write_text(json.dumps(config))


def bf16_model(path: Path) -> torch.nn.Module:
    """transformers' model, on the GPU."""
    import transformers as hf

    return hf.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).cuda().eval()
