"""A token mixer of a transformers model in the place of Megatron's self-attention.

A new architecture trains with it before anybody writes its attention for Megatron: embedding, norms, MLP or experts
and output layer are Megatron's, and what mixes tokens (attention of any kind, a delta net, a convolution) is
transformers' own module under its own parameter names. docs/architectures_beyond_megatron.md says how to use it.

1. Every tensor-parallel and context-parallel rank has the whole module and computes it for whole sequences: it costs
   memory and time as if there were one rank.
2. Sequence and context parallelism are treated alike. Rows of all ranks are gathered (their gradient is summed over
   the ranks), the module runs, and a rank keeps its own rows. So each rank has that part of the gradient of the
   parameters which its rows say: the sum over ranks is the whole. Megatron adds it up, over tensor-parallel ranks for
   what is marked `sequence_parallel`, over context-parallel ones with the data-parallel ones.
3. With tensor parallelism alone every rank has all rows, and whole gradients, which are averaged: ranks whose kernels
   add up in another order do not drift apart.
4. The module sees sequences of equal length, one batch after the other: nothing of one reaches another.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from megatron.core.tensor_parallel import checkpoint, gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from slime.backends.megatron_utils.cp_utils import gather_pack, gathered_places, own_rows
from slime.backends.megatron_utils.layers.varlen_attention import cu_seqlens_of, host_ends, keep
from slime.backends.megatron_utils.model.spec import assemble_block
from slime.config.args import Args
from slime.utils import accelerator
from slime.utils.accelerator import to_device
from slime.utils.errors import UsageError

MIXERS = ("self_attn", "linear_attn", "conv")
"""What transformers calls the token mixer of a decoder layer; a layer has one of them."""


@dataclass(frozen=True)
class Pack:
    """Sequences one after the other, and what every layer needs to know of them.

    Attributes:
        cu_seqlens: [sequences + 1] where they start, and the number of tokens; on the device.
        batches: (length, number of sequences of this length) for each length.
        order: [t] the rows of the first batch, then of the second, ...
        places: where the rows of all context-parallel ranks belong; None without context parallelism.
    """

    cu_seqlens: torch.Tensor
    batches: list[tuple[int, int]]
    order: torch.Tensor
    places: torch.Tensor | None

    @classmethod
    def of(cls, packed_seq_params: Any, cp_size: int) -> Pack:
        """Read Megatron's description; kept with it, for every layer asks the same."""

        def find() -> Pack:
            cu_seqlens, ends = cu_seqlens_of(packed_seq_params), host_ends(packed_seq_params)
            starts: dict[int, list[int]] = {}
            for start, end in pairwise(ends):
                if end > start:
                    starts.setdefault(end - start, []).append(start)
            rows = [torch.tensor(first)[:, None] + torch.arange(length) for length, first in starts.items()]
            batches = [(length, len(first)) for length, first in starts.items()]
            order = to_device(torch.cat([part.flatten() for part in rows]), cu_seqlens.device)
            places = to_device(gathered_places(ends, cp_size), cu_seqlens.device) if cp_size > 1 else None
            return cls(cu_seqlens, batches, order, places)

        return keep(packed_seq_params, "hf_pack", find)


@dataclass(frozen=True)
class HFModel:
    """What transformers makes of a config.json: its text config, and its decoder without memory."""

    config: Any
    decoder: torch.nn.Module


@functools.lru_cache(maxsize=4)
def hf_model(directory: str, trust_remote_code: bool = False) -> HFModel:
    """Build the decoder of an HF directory on the meta device, as a template of its layers.

    Raises:
        UsageError: transformers has no causal language model of this config.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    options = {"trust_remote_code": trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(directory, **options).get_text_config()  # nosec B615
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, **options)
    except (ValueError, OSError) as error:
        raise UsageError(
            f"transformers cannot build the model of --hf-checkpoint {directory}: {str(error).splitlines()[0]}"
        ) from error
    return HFModel(config, model.get_decoder())


class HFAttention(MegatronModule):
    """Takes the place of self-attention in a layer: [s, b, H] -> [s, b, H], packed with b = 1.

    A subclass may say which module it is (`build_mixer`), how it is called (`mix`), or how a whole pack goes through
    it (`mix_pack`).

    Attributes:
        hf_config: of the text model; this layer's own copy.
        layer_index: of the layer in the whole model, from 0.
        hf_layer: transformers' layer, without memory.
        hf: holds the mixer under the name that it has in `hf_layer`: parameters are called as in the HF checkpoint.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        pg_collection: Any,
        hf_checkpoint: str,
        trust_remote_code: bool = False,
        **_: Any,
    ) -> None:
        super().__init__(config)
        model = hf_model(hf_checkpoint, trust_remote_code)
        self.hf_config = copy.deepcopy(model.config)
        self.hf_config.attention_dropout = config.attention_dropout
        self.hf_config.dtype = config.params_dtype
        self.layer_index = layer_number - 1
        self.tp_group, self.cp_group = pg_collection.tp, pg_collection.cp
        # Tuples: modules that are not parts of this one. The 16-bit wrapper would round the rotary frequencies.
        self._hf_layer = (model.decoder.layers[self.layer_index],)
        with as_from_pretrained(config.params_dtype, seed=layer_number):
            name, mixer = self.build_mixer()
            rotary = getattr(model.decoder, "rotary_emb", None)
            self._rotary = () if rotary is None else (type(rotary)(config=self.hf_config),)
        self.hf = torch.nn.Module()
        self.hf.add_module(name, mixer)
        self._mixer_name, self._takes = name, inspect.signature(mixer.forward).parameters.keys()
        self._check_buffers()
        for param in mixer.parameters():
            param.sequence_parallel = config.sequence_parallel
            param.average_gradients_across_tp_domain = not config.sequence_parallel
        selected = config.recompute_modules or ["core_attn"]
        self.recomputes = config.recompute_granularity == "selective" and "core_attn" in selected

    @property
    def hf_layer(self) -> torch.nn.Module:
        """Transformers' layer, without memory."""
        return self._hf_layer[0]

    @property
    def mixer(self) -> torch.nn.Module:
        """Transformers' module."""
        return self.hf.get_submodule(self._mixer_name)

    def build_mixer(self) -> tuple[str, torch.nn.Module]:
        """Make the module of this layer; returns (its name in the HF layer, the module).

        Raises:
            UsageError: the layer has no mixer of a known name.
        """
        names = [name for name, _ in self.hf_layer.named_children() if name in MIXERS]
        if len(names) != 1:
            raise UsageError(
                f"layer {self.layer_index} of transformers' {type(self.hf_layer).__name__} has "
                f"{', '.join(name for name, _ in self.hf_layer.named_children())}: not one of {', '.join(MIXERS)}; "
                "subclass HFAttention with a build_mixer that names it."
            )
        return names[0], type(self.hf_layer.get_submodule(names[0]))(self.hf_config, self.layer_index)

    def mix(self, hidden_states: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """Run the module on whole sequences of equal length: hidden_states [n, l, H] -> [n, l, H].

        It is given what its forward names: position embeddings, position ids, an attention mask.

        Args:
            hidden_states: the layer's normed input.
            position_ids: [1, l], from 0.
        """
        found: dict[str, Any] = {"hidden_states": hidden_states}
        if "position_embeddings" in self._takes:
            found["position_embeddings"] = self.position_embeddings(hidden_states, position_ids)
        if "position_ids" in self._takes:
            found["position_ids"] = position_ids
        if "attention_mask" in self._takes:
            found["attention_mask"] = self.attention_mask(hidden_states)
        out = self.mixer(**found)
        mixed: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return mixed

    def position_embeddings(self, hidden_states: torch.Tensor, position_ids: torch.Tensor) -> Any:
        """(cos, sin) of the model's rotary embedding; None where it has none."""
        if not self._rotary:
            return None
        rotary = copy.deepcopy(self._rotary[0])  # some kinds keep the longest sequence that they have seen
        if "layer_type" in inspect.signature(rotary.forward).parameters:
            return rotary(hidden_states, position_ids, self.kind)
        return rotary(hidden_states, position_ids)

    @property
    def kind(self) -> str:
        """The kind of this layer, as `layer_types` of the config names it."""
        if kinds := getattr(self.hf_config, "layer_types", None):
            return str(kinds[self.layer_index])
        return "sliding_attention" if getattr(self.hf_config, "sliding_window", None) else "full_attention"

    def attention_mask(self, hidden_states: torch.Tensor) -> Any:
        """What transformers' model gives a layer of this kind as mask; None means causal, or that it takes none."""
        from transformers.masking_utils import LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING as MASKS

        if self.kind not in MASKS:
            return None
        batch = {"inputs_embeds": hidden_states, "attention_mask": None, "past_key_values": None}
        return MASKS[self.kind](config=self.hf_config, **batch)

    def mix_pack(self, rows: torch.Tensor, pack: Pack) -> torch.Tensor:
        """Run the module on a pack, all sequences of the same length at a time: [t, H] -> [t, H]."""
        # Rows are taken and put back at once: each index_select or index_copy is a copy of the pack, in both passes.
        sizes = [length * count for length, count in pack.batches]
        outs = []
        for (length, _), part in zip(pack.batches, rows.index_select(0, pack.order).split(sizes), strict=True):
            steps = torch.arange(length, device=rows.device)[None]
            outs.append(self.mix(part.unflatten(0, (-1, length)), steps).flatten(0, 1))
        return torch.empty_like(rows).index_copy(0, pack.order, torch.cat(outs).to(rows.dtype))

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: Any = None, *, packed_seq_params: Any = None, **_: Any
    ) -> tuple[torch.Tensor, None]:
        """hidden_states [s / TP, b, H] with sequence parallelism, else [s, b, H]; returns (the same shape, None)."""
        run = functools.partial(self._forward, packed_seq_params=packed_seq_params)
        if self.recomputes and hidden_states.requires_grad:
            return checkpoint(run, False, hidden_states), None
        return run(hidden_states), None

    def _forward(self, hidden_states: torch.Tensor, *, packed_seq_params: Any) -> torch.Tensor:
        own, is_cut = hidden_states.shape[0], self.config.sequence_parallel and self.tp_group.size() > 1
        if is_cut:
            hidden_states = gather_from_sequence_parallel_region(hidden_states, group=self.tp_group)
        mixed = self._mix_rows(hidden_states, packed_seq_params)
        return mixed.split(own)[self.tp_group.rank()].contiguous() if is_cut else mixed

    def _mix_rows(self, hidden_states: torch.Tensor, packed_seq_params: Any) -> torch.Tensor:
        """[s, b, H] of this context-parallel rank -> the same."""
        if packed_seq_params is None:
            if self.cp_group.size() > 1:
                raise ValueError("a module of transformers under context parallelism needs packed_seq_params.")
            steps = torch.arange(hidden_states.shape[0], device=hidden_states.device)
            return self.mix(hidden_states.transpose(0, 1), steps[None]).transpose(0, 1).contiguous()
        pack, rows = Pack.of(packed_seq_params, self.cp_group.size()), hidden_states.squeeze(1)
        if pack.places is None:
            return self.mix_pack(rows, pack).unsqueeze(1)
        mixed = self.mix_pack(gather_pack(rows, pack.places, self.cp_group), pack)
        return own_rows(mixed, pack.places, self.cp_group).unsqueeze(1)

    def _check_buffers(self) -> None:
        """Everything that a checkpoint holds is a parameter: nothing else is loaded, sent or exported."""
        saved = set(self.hf.state_dict()) - {name for name, _ in self.hf.named_parameters()}
        if saved:
            raise UsageError(
                f"{type(self.mixer).__name__} of layer {self.layer_index} saves {', '.join(sorted(saved))}, which are "
                "no parameters: weights are parameters here; let build_mixer make parameters of them."
            )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> HFAttention:
        """Leave buffers in their type, as transformers does when it loads a model in 16 bit."""
        before = dict(self.named_buffers())
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            after = self.get_buffer(name)
            if after.dtype != buffer.dtype:
                path, _, last = name.rpartition(".")
                self.get_submodule(path)._buffers[last] = buffer.to(after.device)
        return self


@contextmanager
def as_from_pretrained(dtype: torch.dtype, *, seed: int) -> Iterator[None]:
    """Make modules as transformers' from_pretrained does: on the device, in `dtype`; alike on all ranks."""
    if torch.get_default_device().type == "meta":  # whoever builds a model without memory
        yield
        return
    device, usual = accelerator.current_device(), torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []), device:
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_default_dtype(usual)


def hf_attention_block(
    args: Args,
    config: TransformerConfig,
    vp_stage: int | None = None,
    *,
    attention: type[HFAttention] = HFAttention,
    is_wrapped: Callable[[int], bool] = lambda _: True,
) -> TransformerBlockSubmodules:
    """Return the block of the flags' layers in which transformers' modules mix the tokens; for a --spec of your own.

    Args:
        args: derived flags.
        config: of the model.
        vp_stage: which of this rank's interleaved pipeline stages.
        attention: HFAttention or a subclass.
        is_wrapped: whether the layer of this number, from 0, has one; the others have what the flags describe.
    """
    # Layers need not have the same parameters: a checkpoint names each layer's by itself.
    config.hetereogenous_dist_checkpoint = True
    params = {"hf_checkpoint": args.hf_checkpoint, "trust_remote_code": args.trust_remote_code}

    def adapt(layer: ModuleSpec, index: int) -> None:
        if is_wrapped(index):
            layer.submodules.self_attention = ModuleSpec(module=attention, params=params)

    return assemble_block(args, config, vp_stage, adapt)


def get_hf_attention_spec(
    args: Args, config: TransformerConfig, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """Every layer's token mixer is transformers': --spec slime_plugins.models.hf_attention get_hf_attention_spec."""
    return hf_attention_block(args, config, vp_stage)
