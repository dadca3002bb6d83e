"""A transformers model sharded by FSDP2: built on the meta device, filled from HF files, run over packed rows.

Decoder layers are groups of parameters, small ones together; the rest (embedding, last norm, output layer) is the
root's. On CUDA norms, rotations and gated units are kernels of the Megatron backend, or what torch.compile makes of a
layer. Whatever reads the output layer's weight runs inside the root's forward pass, where the weight is whole and gets
its gradient in time. Parameters are fp32, and so is the optimizer; with --bf16 they are cast when they are gathered.
"""

from __future__ import annotations

import inspect
import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, TypeVar, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from slime.backends.fsdp_utils.lora import LoraLinear, adapters_of, attach_adapters
from slime.backends.megatron_utils.cp_utils import context_parallel_group
from slime.backends.megatron_utils.layers.value_head import is_value_model
from slime.backends.megatron_utils.layers.varlen_attention import (
    attend_across,
    attend_packed,
    cu_seqlens_of,
    host_ends,
    varlen_kernel,
)
from slime.backends.megatron_utils.loss import DeferredLogits
from slime.backends.megatron_utils.megatron_patch.layers import rotate
from slime.backends.megatron_utils.model.spec import rms_norm
from slime.config.args import Args
from slime.config.rules.backends import unsupported_models
from slime.models.families import family_of_config
from slime.utils import accelerator
from slime.utils.accelerator.fusion import compiled, kernel_on_cuda
from slime.utils.errors import UsageError
from slime.utils.train_data import MicroBatch

logger = logging.getLogger(__name__)
T = TypeVar("T")
PACKED_ATTENTION = "slime_packed"
"""Name under which transformers knows our attention (--attn-implementation)."""
_DRAWN = re.compile(r"dropout|_pdrop$|jitter_noise$")
"""Keys of a config that say how much is left out at random."""


# ---- attention


def register_attention(*, compiles: bool = False) -> None:
    """Let transformers find `PACKED_ATTENTION`: causal attention within each sample of a pack, without a mask."""
    from transformers import AttentionInterface

    # The lengths of a pack are numbers of Python, for each of which it would be compiled anew.
    AttentionInterface.register(PACKED_ATTENTION, torch.compiler.disable(_attend) if compiles else _attend)
    # There is no function for its masks, as the samples' ends say what a token sees: transformers then looks for none.


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    pack: Any,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """As transformers calls it: q [1, h, t, d], k and v [1, g, t, d] -> [1, t, h, d]."""
    asked = {"a mask": attention_mask, "a soft cap": softcap, "sinks": s_aux, "chosen keys": indices}
    if found := [name for name, value in asked.items() if value is not None]:
        raise ValueError(f"{type(module).__name__} asks for {' and '.join(found)}, which packed attention has not")
    # not x[0], whose gradient is a copy into zeros
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    use_kernel = q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)
    if (group := context_parallel_group()) is not None:
        out = attend_across(q, k, v, pack, group, scale=scale, use_kernel=use_kernel, window=sliding_window)
    elif use_kernel:
        ends, longest = cu_seqlens_of(pack), int(pack.max_seqlen_q)
        out = varlen_kernel(q, k, v, (ends, ends), (longest, longest), scale=scale, window=sliding_window)
    else:
        out = attend_packed(q, k, v, host_ends(pack), scale=scale, window=sliding_window)
    return out[None], None


# ---- kernels


def use_kernels(hf: torch.nn.Module) -> None:
    """Let norms, rotations and gated units whose code is that of Llama be one kernel each where tensors are CUDA's.

    transformers computes them operation by operation, each of which reads and writes the memory of the GPU once.
    """
    from transformers.activations import SiLUActivation
    from transformers.models.llama import modeling_llama as llama

    silus = (SiLUActivation, torch.nn.SiLU)
    for module in hf.modules():
        forward = type(module).forward
        if _is_same(forward, llama.LlamaRMSNorm.forward):
            module.forward = partial(_norm, module)
        elif _is_same(forward, llama.LlamaMLP.forward) and isinstance(module.act_fn, silus):
            module.forward = partial(_gated_unit, module)
    for file in {sys.modules[type(module).__module__] for module in hf.modules()}:
        names = ("apply_rotary_pos_emb", "rotate_half")
        if all(_is_same(getattr(file, name, None), getattr(llama, name)) for name in names):
            vars(file)["apply_rotary_pos_emb"] = rotate_both


def _is_same(function: Any, known: Any) -> bool:
    """Whether two functions do the same by their code; transformers writes it out in each model's file."""

    def code(of: Any) -> tuple[Any, ...]:
        found = inspect.unwrap(of).__code__
        return found.co_code, found.co_names, [x for x in found.co_consts if not isinstance(x, str)]

    return inspect.isfunction(function) and code(function) == code(known)


def _norm(module: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    return rms_norm(hidden_states, module.weight, module.variance_epsilon, False)


def _gated_unit(module: Any, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = module.down_proj(_silu_product(module.gate_proj(x), module.up_proj(x)))
    return found


@kernel_on_cuda("slime.backends.megatron_utils.kernels.small.silu_product")
def _silu_product(gate: torch.Tensor, linear: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(gate) * linear


def rotate_both(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `apply_rotary_pos_emb` of Llama: q [1, h, t, d], k [1, g, t, d], cos and sin [1, t, d]."""
    if unsqueeze_dim != 1:  # heads come last but one
        q, k = rotate_both(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        return q.transpose(1, 2), k.transpose(1, 2)
    cos, sin = cos[0].unsqueeze(1), sin[0].unsqueeze(1)
    q, k = (rotate(x.squeeze(0).transpose(0, 1), cos, sin, False, False).transpose(0, 1)[None] for x in (q, k))
    return q, k


# ---- the model


class Policy(torch.nn.Module):
    """The root that is sharded: a transformers model, and what reads its last hidden states.

    Args:
        hf: a causal language model of transformers, alone or behind a tower that sees images.
        has_value_head: a critic's: a head [1, H] takes the place of the output layer.
        trains_tower: the tower gets gradients.
    """

    def __init__(self, hf: Any, *, has_value_head: bool, trains_tower: bool = True) -> None:
        super().__init__()
        self.hf = hf
        self.value_head: torch.nn.Linear | None = None
        if has_value_head:
            hf.set_output_embeddings(None)
            hf.lm_head = torch.nn.Identity()
            with parameters_on_meta():
                self.value_head = torch.nn.Linear(hf.config.get_text_config().hidden_size, 1)
        self.is_packed = hf.config.get_text_config()._attn_implementation == PACKED_ATTENTION
        self.trains_tower = trains_tower
        if not trains_tower and (tower := tower_of(hf)) is not None:
            tower.requires_grad_(False)

    def forward(self, batch: MicroBatch, read: Callable[[Any], T]) -> T:
        """Return `read(output)`: the output is `DeferredLogits`, of a critic values [1, T, 1].

        Args:
            batch: `inputs_of` a micro-batch.
            read: what makes a loss, or columns, of the output.
        """
        more = {"pack": batch["packed_seq_params"]} if self.is_packed else {}
        inputs = {"position_ids": batch["position_ids"], "attention_mask": None, **self._inputs(batch)}
        # transformers' own attention finds the samples where positions begin again, which needs no mask either
        hidden = language_model(self.hf)(**inputs, use_cache=False, **more).last_hidden_state.squeeze(0)
        if self.value_head is not None:
            weight, bias = self.value_head.weight.float(), self.value_head.bias.float()
            return read(torch.nn.functional.linear(hidden.float(), weight, bias)[None])
        head = self.hf.get_output_embeddings()
        hidden = hidden.to(head.weight.dtype)
        adapter = (head.low(hidden), head.lora_B) if isinstance(head, LoraLinear) else None
        return read(DeferredLogits(hidden, head.weight, adapter))

    def train(self, mode: bool = True) -> Policy:
        """Do what torch's method of this name does, without its walk over the whole model while the device waits."""
        for module in self._everything:
            vars(module)["training"] = mode
        return self

    @cached_property
    def _everything(self) -> list[torch.nn.Module]:
        return list(self.modules())

    def _inputs(self, batch: MicroBatch) -> dict[str, Any]:
        """The language model's tokens, or their embeddings with those of images in their places."""
        if "image_rows" not in batch:
            return {"input_ids": batch["tokens"]}
        embedded = self.hf.get_input_embeddings()(batch["tokens"])
        images, rows = batch["multimodal_train_inputs"], batch["image_rows"]
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.trains_tower):
            # Ranks gather the tower's layers together, so that one without images sees a blank one.
            found = self.hf.base_model.get_image_features(
                **_pixels(images) or blank_image(self.hf.config, rows.device)
            )
        features = [torch.cat(list(found.pooler_output)), *(getattr(found, "deepstack_features", None) or ())]
        if not images:
            nothing = torch.stack([feature.sum() for feature in features]).sum() * 0.0
            return {"inputs_embeds": embedded + nothing.to(embedded.dtype)}
        of_tokens, *of_layers = [feature[batch["image_tokens"]].to(embedded.dtype) for feature in features]
        inputs = {"inputs_embeds": embedded.squeeze(0).index_put((rows,), of_tokens)[None]}
        if of_layers:
            mask = torch.zeros_like(batch["tokens"], dtype=torch.bool)
            mask[0, rows] = True
            inputs |= {"visual_pos_masks": mask, "deepstack_visual_embeds": of_layers}
        return inputs


def _pixels(images: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return those of a processor's tensors that the vision tower takes."""
    return {name: images[name] for name in ("pixel_values", "image_grid_thw") if name in images}


def blank_image(config: Any, device: torch.device) -> dict[str, torch.Tensor]:
    """Return the smallest image that a tower takes, of one token."""
    vision = config.vision_config
    size = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    side = vision.spatial_merge_size
    return {
        "pixel_values": torch.zeros(side * side, size, device=device),
        "image_grid_thw": torch.tensor([[1, side, side]], device=device),
    }


INPUTS = ("tokens", "position_ids", "packed_seq_params", "image_rows", "image_tokens", "multimodal_train_inputs")


def inputs_of(batch: MicroBatch) -> MicroBatch:
    """What the model reads of a micro-batch; the root would copy all else to its device, in its type."""
    return cast(MicroBatch, {name: value for name, value in batch.items() if name in INPUTS})


def build_policy(args: Args, mesh: DeviceMesh) -> Policy:
    """Return the model of --hf-checkpoint, sharded over a mesh and empty (collective).

    Args:
        args: `hf_checkpoint`, `attn_implementation`, `recompute_granularity`, `params_dtype`, `fsdp_` flags.
        mesh: of `make_mesh`.

    Raises:
        UsageError: transformers cannot build it, or its output layer is not a plain product.
    """
    register_attention(compiles=args.fsdp_compile)
    hf = _on_meta(args)
    attach_adapters(args, hf)
    if args.recompute_granularity is not None:
        hf.gradient_checkpointing_enable({"use_reentrant": False})
    policy = Policy(hf, has_value_head=is_value_model(args), trains_tower=trains_tower(args))
    offload = CPUOffloadPolicy(pin_memory=accelerator.kind() == "cuda") if args.fsdp_cpu_offload else OffloadPolicy()
    dtype = None if args.params_dtype == "float32" else getattr(torch, args.params_dtype)
    mp = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    options: dict[str, Any] = {
        "mesh": mesh,
        # where one rank has it all, letting go of a layer saves a 16-bit copy and costs reading it anew
        "reshard_after_forward": args.fsdp_reshard_after_forward and mesh.size(mesh.ndim - 1) > 1,
        "offload_policy": offload,
        "mp_policy": mp,
    }
    layers = decoder_layers(hf)
    blocks = [] if (tower := tower_of(hf)) is None else list(tower.blocks)
    if args.fsdp_compile:
        for layer in layers:
            layer.forward = compiled(layer.forward, dynamic=True)
    elif accelerator.kind() == "cuda":
        use_kernels(hf)
    for group in grouped(blocks, args.fsdp_min_group_params):  # they take angles in fp32, as an engine's do
        fully_shard(group, **options | {"mp_policy": replace(mp, cast_forward_inputs=False)})
    for group in (groups := grouped(layers, args.fsdp_min_group_params)):
        fully_shard(group, **options)
    fully_shard(policy, **options)
    if args.fsdp_forward_prefetch:
        for group, following in zip(groups[:-1], groups[1:], strict=True):
            group[0].set_modules_to_forward_prefetch([following[0]])
    device = torch.device("cpu") if args.fsdp_cpu_offload else accelerator.current_device()
    # Not `to_empty`, which would also empty buffers that no checkpoint has (the frequencies of rotary positions).
    policy._apply(lambda tensor: _materialised(tensor, device))
    if not is_value_model(args):
        hf.tie_weights()
    _move_buffers(policy)
    for adapter in adapters_of(policy).values():
        adapter.start()
    return policy.train()


def grouped(layers: Sequence[Any], min_params: int) -> list[list[Any]]:
    """Layers, in their order, in groups of at least so many parameters each; what is left at the end is the last."""
    groups: list[list[Any]] = [[]]
    num_params = 0
    for layer in layers:
        groups[-1].append(layer)
        num_params += sum(parameter.numel() for parameter in layer.parameters())
        if num_params >= min_params:
            groups.append([])
            num_params = 0
    return [group for group in groups if group]


def _materialised(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.zeros_like(tensor, device=device) if tensor.is_meta else tensor


def _move_buffers(policy: Policy) -> None:
    """Buffers stay on the device, where the forward pass wants them."""
    for module in policy.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(accelerator.current_device())


def _on_meta(args: Args) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    trusted = {"trust_remote_code": args.trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(args.hf_checkpoint, **trusted)  # nosec B615: a local directory
        _prepare(args, config.get_text_config())
        family, attention = family_of_config(config.to_dict()), args.attn_implementation
        kind: Any = AutoModelForCausalLM
        implementations: Any = attention
        if family is not None and family.sees_images:
            kind = AutoModelForImageTextToText
            implementations = {"text_config": attention, "vision_config": "sdpa", "": attention}
        with parameters_on_meta():
            hf = kind.from_config(config, dtype=torch.float32, attn_implementation=implementations, **trusted)
    except UsageError:  # a ValueError, too
        raise
    except ValueError as error:
        raise UsageError(
            f"--hf-checkpoint {args.hf_checkpoint}: transformers cannot build it ({str(error).splitlines()[0]}); use "
            "--train-backend megatron."
        ) from error
    hf.tie_weights()
    if args.attn_implementation == PACKED_ATTENTION and _hides_its_window(hf):
        raise UsageError(
            f"--hf-checkpoint {args.hf_checkpoint}: {type(hf).__name__} puts its sliding window into a mask, which "
            f"--attn-implementation {PACKED_ATTENTION} does not read; give sdpa."
        )
    if getattr(hf.get_output_embeddings(), "bias", None) is not None:
        raise UsageError(
            f"--hf-checkpoint {args.hf_checkpoint}: {type(hf).__name__} has a bias in its output layer, which "
            "--train-backend fsdp does not compute; use --train-backend megatron."
        )
    return hf


def _prepare(args: Args, config: Any) -> None:
    """Refuse what only the defaults of a config's class say, and turn dropout off."""
    values = config.to_dict()
    if problem := next(unsupported_models(args, values), None):
        raise UsageError(f"--hf-checkpoint {args.hf_checkpoint}: {problem}")
    # Old log-probs are compared with those of the loss's own pass: a mask drawn there would be taken for the policy.
    drawn = [key for key, value in values.items() if _DRAWN.search(key) and isinstance(value, float) and value]
    for key in drawn:
        setattr(config, key, 0.0)
    if drawn and dist.get_rank() == 0:
        logger.warning("%s: %s set to 0: a policy is trained without dropout", args.hf_checkpoint, ", ".join(drawn))


def _hides_its_window(hf: Any) -> bool:
    """Whether a model has sliding windows, and does not pass them to its attention function."""
    config = hf.config.get_text_config()
    if not (getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)):
        return False
    attentions = {type(module) for module in hf.modules() if type(module).__name__.endswith("Attention")}
    return not any("sliding_window" in inspect.getsource(kind.forward) for kind in attentions)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Build modules inside the block whose parameters take no memory; their buffers are real."""
    register = torch.nn.Module.register_parameter

    def on_meta(module: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = torch.nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        register(module, name, param)

    with mock.patch.object(torch.nn.Module, "register_parameter", on_meta):
        yield


def decoder_layers(hf: Any) -> list[Any]:
    """The decoder layers of a model of transformers, which are groups of their own.

    Raises:
        UsageError: it has none under the name that every decoder of transformers uses.
    """
    layers = getattr(language_model(hf), "layers", None)
    if layers is None:
        raise UsageError(
            f"{type(hf).__name__} has no list of decoder layers (`model.layers`), which --train-backend fsdp shards; "
            "use --train-backend megatron."
        )
    return list(layers)


def language_model(hf: Any) -> Any:
    """The decoder of a model of transformers; where it sees images, that is behind the tower."""
    return getattr(hf.base_model, "language_model", hf.base_model)


def tower_of(hf: Any) -> Any | None:
    """The part of a model that sees images, if it has one."""
    return getattr(hf.base_model, "visual", None)


def trains_tower(args: Args) -> bool:
    """Whether the vision tower is trained."""
    return bool(args.multimodal_keys) and not args.freeze_vision_tower


def make_mesh(args: Args) -> DeviceMesh:
    """Return the ranks over which parameters are sharded; with --fsdp-replicate-size several copies of them."""
    kind, world = accelerator.current_device().type, dist.get_world_size()
    copies = args.fsdp_replicate_size
    if copies == 1:
        return init_device_mesh(kind, (world,), mesh_dim_names=("shard",))
    return init_device_mesh(kind, (copies, world // copies), mesh_dim_names=("replicate", "shard"))
