"""Sparse attention in fp8: a sync quantises those weights of an indexer that SGLang keeps so, and they arrive."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime.backends.megatron_utils.megatron_to_hf.processors.quantizer import quantize_bucket
from slime.backends.sglang_utils import cpu_standins
from slime.models.families import FAMILIES
from slime.weights.formats import Fp8Format

INDEXER = "model.layers.0.self_attn.indexer"


@pytest.mark.parametrize("is_cuda", [False, True])
def test_a_sync_quantises_the_layers_of_an_indexer_that_sglang_does(
    is_cuda: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA, SGLang joins wk and weights_proj in 16 bit, and dequantises wk as it loads it."""
    cpu_standins.install()
    from sglang.srt.layers.attention.dsa import dsa_indexer

    quantised: dict[str, bool] = {}

    class Built(Exception):
        pass

    def record(*sizes: int, prefix: str, quant_config: Any = None, **options: Any) -> None:
        quantised[prefix.removeprefix("indexer.")] = quant_config is not None

    def stop(*sizes: Any, **options: Any) -> None:
        raise Built

    for name, value in {
        "ReplicatedLinear": record,
        "LayerNorm": stop,
        "is_dsa_enable_prefill_cp": lambda: False,
        "_is_cuda": is_cuda,
        "deep_gemm": SimpleNamespace(get_num_sms=lambda: 8),
        "get_server_args": lambda: SimpleNamespace(pp_size=1),
    }.items():
        monkeypatch.setattr(dsa_indexer, name, value, raising=False)
    sizes = {"hidden_size": 64, "index_n_heads": 2, "index_head_dim": 32, "rope_head_dim": 16, "index_topk": 8}
    with pytest.raises(Built):
        dsa_indexer.Indexer(
            **sizes,
            q_lora_rank=16,
            max_position_embeddings=64,
            rope_theta=1e4,
            layer_id=0,
            scale_fmt=None,
            is_neox_style=False,
            prefix="indexer",
            quant_config="fp8",
        )
    if is_cuda:
        assert quantised == {"wq_b": True, "wk_weights_proj": False}
    else:
        assert quantised == {"wq_b": True, "wk": True, "weights_proj": False}
        synced = {name: Fp8Format().quantizes(f"{INDEXER}.{name}.weight") for name in quantised}
        assert synced == quantised


def test_the_joined_weight_of_an_indexer_is_what_a_sync_sends() -> None:
    cpu_standins.install()
    from sglang.srt.models.deepseek_common.deepseek_weight_loader import _load_fused_indexer_wk

    fmt = Fp8Format(block_size=(32, 32))
    wk, weights_proj = torch.randn(32, 64), torch.randn(2, 64)
    bucket = [(f"{INDEXER}.wk.weight", wk), (f"{INDEXER}.weights_proj.weight", weights_proj)]
    fused = torch.zeros(34, 64, dtype=torch.bfloat16)
    params, pending = {f"{INDEXER}.wk_weights_proj.weight": torch.nn.Parameter(fused, requires_grad=False)}, {}
    quant_config = SimpleNamespace(weight_block_size=[32, 32])
    for name, tensor in quantize_bucket(bucket, fmt):
        assert _load_fused_indexer_wk(name, tensor, params, pending, quant_config)
    assert not pending
    loaded = next(iter(params.values())).float()
    assert torch.allclose(loaded[:32], wk, rtol=1 / 16 + 1e-2, atol=0.02)
    assert torch.equal(loaded[32:], weights_proj.bfloat16().float())


@pytest.mark.parametrize("family", ["glm_moe_dsa", "deepseek_v32"])
def test_all_other_layers_are_quantised_as_those_of_deepseek_v3(family: str) -> None:
    def quantised(name: str) -> set[str]:
        names = {hf.format(i=0, e=0, k=0) for rule in FAMILIES[name].rules for hf in rule.hf}
        return {name for name in names if ".indexer." not in name and Fp8Format().quantizes(name)}

    assert quantised(family) == quantised("deepseek_v3")
