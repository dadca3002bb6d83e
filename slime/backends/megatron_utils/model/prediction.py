"""Layers that predict tokens further on (multi-token prediction, arXiv:2412.19437): --mtp-num-layers.

Layer k (from 1) takes the hidden state of a token and the embedding of the token k further on, and predicts the one
behind that. The layers are Megatron's. They are drafts of the policy and not a part of it: no gradient of theirs
reaches the model's hidden states, its embedding or its output layer, so that the policy is trained alike with and
without them. They run only where they are trained (--enable-mtp-training), and are frozen otherwise. Which token is
how far on is known to slime.backends.megatron_utils.data, which respects the samples of a pack; the loss is
slime.backends.megatron_utils.loss.prediction's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec


def prediction_spec(layer: ModuleSpec, *, norm: type, num_layers: int) -> MultiTokenPredictionBlockSubmodules:
    """The spec of so many layers, each with a transformer layer like `layer`."""
    parts = MultiTokenPredictionLayerSubmodules(
        enorm=norm,
        hnorm=norm,
        eh_proj=LocalSpecProvider().column_parallel_linear(),
        transformer_layer=layer,
        layer_norm=norm,
    )
    spec = ModuleSpec(module=PredictionLayer, submodules=parts)
    return MultiTokenPredictionBlockSubmodules(layer_specs=[spec] * num_layers)


class PredictionLayer(MultiTokenPredictionLayer):
    """Megatron's layer, called with the embeddings that belong to its rows."""

    def predict(self, hidden: torch.Tensor, embedded: torch.Tensor, **inputs: Any) -> torch.Tensor:
        """hidden, embedded [T, 1, H] -> [T, 1, H]; `inputs` are those of the transformer layer."""

        def run(hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = self._proj_and_transformer_layer(hidden, embedded, **inputs)
            return output

        if self.config.recompute_granularity == "full" and self.training:
            if not hidden.requires_grad:  # a recomputed function whose inputs need no gradient gives its weights none
                hidden.requires_grad_()
            output: torch.Tensor = tensor_parallel.checkpoint(run, False, hidden, embedded)
            return output
        return run(hidden, embedded)


class PredictingGPT(GPTModel):
    """A GPT with prediction layers; its output is a GPT's."""

    further_tokens: Sequence[torch.Tensor] | None = None
    """For each layer the tokens [1, T] that it embeds; None: the layers do not run."""
    predicted: Sequence[torch.Tensor] = ()
    """What the layers made of the last micro-batch: hidden states [T, 1, H] behind their norms."""

    def _postprocess(self, **told: Any) -> torch.Tensor:
        hidden: torch.Tensor = told["hidden_states"]
        self.predicted = self._predict(hidden, told) if self.further_tokens is not None else ()
        if not self.post_process:
            return hidden
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits, _ = self.output_layer(hidden, weight=weight, runtime_gather_output=told["runtime_gather_output"])
        output: torch.Tensor = logits.transpose(0, 1).contiguous()
        return output

    def _predict(self, hidden: torch.Tensor, told: dict[str, Any]) -> list[torch.Tensor]:
        names = ("attention_mask", "rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin", "packed_seq_params")
        inputs = {name: told[name] for name in names}
        predicted, hidden = [], hidden.detach()
        for layer, tokens in zip(self.mtp.layers, self.further_tokens or (), strict=True):
            embedded = self.embedding(input_ids=tokens, position_ids=told["position_ids"]).detach()
            hidden = layer.predict(hidden, embedded, **inputs)
            predicted.append(hidden)
        return predicted
