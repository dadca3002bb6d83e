"""Layers that predict tokens further on (multi-token prediction, arXiv:2412.19437): --mtp-num-layers.

Layer k (from 1) takes the hidden state of a token and the embedding of the token k further on, and predicts the one
behind that. The layers are Megatron's. They are drafts of the policy and not a part of it: no gradient of theirs
reaches the model's hidden states, its embedding or its output layer, and theirs are clipped by a norm of their own, so
that the policy is trained alike with and without them. They run only where they are trained (--enable-mtp-training),
and are frozen otherwise. Which token is how far on is known to slime.backends.megatron_utils.data, which respects the
samples of a pack; the loss is slime.backends.megatron_utils.loss.prediction_loss's.

They are on the last pipeline stage, behind the model's layers. Megatron (0.16.1) would give that stage an embedding
that is trained twice, with moments and a sum of gradients; none comes from here, so that a copy which the first stage
fills before each train step (`lend_embedding`) is enough.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer
from megatron.core.optimizer.clip_grads import get_grad_norm_fp32
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from slime.backends.megatron_utils.layers.gathered_weights import wait_for_weights
from slime.utils.errors import UsageError


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
            return cast(torch.Tensor, self._proj_and_transformer_layer(hidden, embedded, **inputs))

        if self.config.recompute_granularity == "full" and self.training:
            if not hidden.requires_grad:  # a recomputed function whose inputs need no gradient gives its weights none
                hidden.requires_grad_()
            return cast(torch.Tensor, tensor_parallel.checkpoint(run, False, hidden, embedded))
        return run(hidden, embedded)


class PredictingGPT(GPTModel):
    """A pipeline stage of a GPT with prediction layers, which the last one has; its output is a GPT's.

    Args:
        predictions: the spec of the layers.
        are_trained: whether they ever run.
        told: a GPTModel's.
    """

    further_tokens: Sequence[torch.Tensor] | None = None
    """For each layer the tokens [1, T] that it embeds; None: the layers do not run."""
    predicted: Sequence[torch.Tensor] = ()
    """What the layers made of the last micro-batch: hidden states [T, 1, H] behind their norms."""

    def __init__(self, *, predictions: MultiTokenPredictionBlockSubmodules, are_trained: bool, **told: Any) -> None:
        super().__init__(**told)
        config, is_last = told["config"], told["post_process"]
        self.config = _without_predictions(config)
        if is_last:  # Megatron asks by the attribute whether there are layers
            self.mtp = MultiTokenPredictionBlock(config, predictions, vp_stage=told["vp_stage"])
        # In a tuple, so that it is no module of this one: neither trained nor saved nor sent.
        self.lent_embedding: tuple[LanguageModelEmbedding, ...] = ()
        if is_last and are_trained and not told["pre_process"]:
            sizes = (config, told["vocab_size"], told["max_sequence_length"], told["position_embedding_type"])
            self.lent_embedding = (LanguageModelEmbedding(*sizes).requires_grad_(False),)

    def setup_embeddings_and_output_layer(self) -> None:
        """As for a GPT without prediction layers; its constructor calls it."""
        self.config = _without_predictions(self.config)
        super().setup_embeddings_and_output_layer()

    def _postprocess(self, **told: Any) -> torch.Tensor:
        hidden: torch.Tensor = told["hidden_states"]
        runs = self.further_tokens is not None and hasattr(self, "mtp")
        self.predicted = self._predict(hidden, told) if runs else ()
        if not self.post_process:
            return hidden
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits, _ = self.output_layer(hidden, weight=weight, runtime_gather_output=told["runtime_gather_output"])
        return cast(torch.Tensor, logits.transpose(0, 1).contiguous())

    def _predict(self, hidden: torch.Tensor, told: dict[str, Any]) -> list[torch.Tensor]:
        names = ("attention_mask", "rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin", "packed_seq_params")
        inputs = {name: told[name] for name in names}
        (embedding,) = self.lent_embedding or (self.embedding,)
        predicted, hidden = [], hidden.detach()
        for layer, tokens in zip(self.mtp.layers, self.further_tokens or (), strict=True):
            embedded = embedding(input_ids=tokens, position_ids=told["position_ids"]).detach()
            hidden = layer.predict(hidden, embedded, **inputs)
            predicted.append(hidden)
        return predicted


def _without_predictions(config: TransformerConfig) -> TransformerConfig:
    """What Megatron's schedules and gradient sums read, which would train an embedding on the last stage, too."""
    config = copy.copy(config)
    config.mtp_num_layers = None
    return config


def as_predicting(chunk: torch.nn.Module) -> PredictingGPT:
    """A bare chunk of the model whose prediction layers are to be trained.

    Raises:
        UsageError: the model of a --custom-model-provider-path has no such layers.
    """
    if isinstance(chunk, PredictingGPT):
        return chunk
    raise UsageError(
        f"--enable-mtp-training needs the layers of --mtp-num-layers, which the {type(chunk).__name__} of "
        "--custom-model-provider-path does not have; leave it out."
    )


def lend_embedding(chunks: Sequence[torch.nn.Module]) -> None:
    """Copy the first pipeline stage's embedding to the last one's prediction layers; every rank calls it.

    Args:
        chunks: this rank's, bare, of a model whose prediction layers are trained.

    Raises:
        UsageError: as `as_predicting`.
    """
    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        return
    if parallel_state.is_pipeline_first_stage():
        embedding = as_predicting(chunks[0]).embedding.word_embeddings
        wait_for_weights(embedding)
    elif parallel_state.is_pipeline_last_stage():
        embedding = as_predicting(chunks[-1]).lent_embedding[0].word_embeddings
    else:
        return
    source, group = parallel_state.get_pipeline_model_parallel_first_rank(), parallel_state.get_embedding_group()
    dist.broadcast(embedding.weight.data, src=source, group=group)


PREDICTION = "prediction"
"""The attribute `shared` of a prediction layer's parameters, which Megatron's optimizers pass on to their copies, and
leave out of the norm of all gradients."""


def mark_predictions(chunks: Sequence[torch.nn.Module]) -> None:
    """Have the norm of all gradients, by which the policy's are clipped, leave out those of the prediction layers.

    Args:
        chunks: this rank's, bare, before there is an optimizer.
    """
    for chunk in chunks:
        if hasattr(chunk, "mtp"):
            for param in chunk.mtp.parameters():
                param.shared = PREDICTION


class PredictionClip:
    """Clips the gradients of prediction layers by their own norm, in the place of an optimizer's `get_grad_norm`.

    Megatron asks for the norm when gradients are reduced and before it clips; it scales all of them by the policy's
    norm afterwards, which is made up for here.

    Args:
        optimizer: of a model whose prediction layers are marked; changed.

    Attributes:
        norm: of the gradients since it was last set to None, before clipping; None where none was asked for.
    """

    def __init__(self, optimizer: ChainedOptimizer) -> None:
        self.norm: float | None = None
        self._optimizer = optimizer
        self._norm_of_policy = optimizer.get_grad_norm
        optimizer.get_grad_norm = self

    @torch.no_grad()
    def __call__(self) -> float:
        """Return the policy's norm (collective), and scale the gradients of the prediction layers."""
        of_policy, most = float(self._norm_of_policy()), float(self._optimizer.config.clip_grad)
        parts = self._optimizer.chained_optimizers
        norm = self.norm = math.sqrt(sum(_prediction_norm(part) ** 2 for part in parts))
        if most > 0.0 and math.isfinite(of_policy):  # else all of them become 0 or not finite, whatever is done here
            own, all_of_them = (min(1.0, most / (one + 1e-6)) for one in (norm, of_policy))
            for part in parts:
                for _, grad in _prediction_grads(part):
                    grad.mul_(own / all_of_them)
        return of_policy


def _prediction_norm(part: MegatronOptimizer) -> float:
    """The norm of the gradients of prediction layers over all ranks (collective), each counted once."""
    group = getattr(part, "tp_group", None)
    grads = [
        grad
        for param, grad in _prediction_grads(part)
        if tensor_parallel.param_is_not_tensor_parallel_duplicate(param, group)
    ]
    return float(get_grad_norm_fp32(grads, grad_stats_parallel_group=part.get_grad_stats_parallel_group()))


def _prediction_grads(part: MegatronOptimizer) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's shares of the prediction layers' parameters, with their gradients."""
    name = "decoupled_grad" if part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 else "grad"
    for param in part.get_parameters():
        if getattr(param, "shared", None) == PREDICTION and (grad := getattr(param, name, None)) is not None:
            yield param, grad
