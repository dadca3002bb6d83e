"""GLM-5 and DeepSeek-V3.2: latent attention to the keys that an indexer chooses (sparse_attention.py).

Two things about indexers are said by no flag and read from the config.json of --hf-checkpoint: which layers take the
choice of an earlier one (`indexer_types`, or how `index_topk_freq` and its relatives make them), and how the indexer
rotates (`indexer_rope_interleave`, which SGLang reads and transformers does not).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from slime.backends.megatron_utils.model.spec import assemble_block
from slime.config.args import Args
from slime.models.deepseek import indexer_types
from slime_plugins.models.sparse_attention import IndexerPlan, SparseAttention, SparseLatentAttention


def get_glm5_spec(args: Args, config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Return the spec of the layers of this rank's pipeline stage; none takes the choice of another stage."""
    plans = indexer_plans(_hf_config(args.hf_checkpoint), config.num_layers)
    here: list[int] = []

    def adapt(layer: ModuleSpec, index: int) -> None:
        here.append(index + 1)
        assert plans[index].chooser in here, f"layer {index} begins a stage without an indexer: see model_checks"
        attention = layer.submodules.self_attention
        attention.module = SparseLatentAttention
        attention.submodules.core_attention = ModuleSpec(module=SparseAttention, params={"plan": plans[index]})

    return assemble_block(args, config, vp_stage, adapt)


def indexer_plans(hf_config: Mapping[str, Any], num_layers: int) -> list[IndexerPlan]:
    """Which layer's indexer chooses for each layer, and how it rotates."""
    kinds, plans, chooser = indexer_types(hf_config, num_layers), [], 1
    for number, kind in enumerate(kinds, start=1):
        chooser = number if kind == "full" else chooser
        plans.append(IndexerPlan(chooser, bool(hf_config.get("indexer_rope_interleave"))))
    return plans


def _hf_config(checkpoint: str | None) -> dict[str, Any]:
    path = Path(checkpoint or "", "config.json")
    found: dict[str, Any] = json.loads(path.read_text()) if checkpoint and path.is_file() else {}
    return found
