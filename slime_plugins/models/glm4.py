"""GLM-4: --spec slime_plugins.models.glm4 get_glm_spec. Attention and MLP have a norm behind them, too."""

from __future__ import annotations

from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from slime.backends.megatron_utils.model.spec import assemble_block
from slime.config.args import Args


def get_glm_spec(args: Args, config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Return the spec of the layers of this rank's pipeline stage, as --post-self-attn-layernorm and its like say."""
    return assemble_block(args, config, vp_stage)
