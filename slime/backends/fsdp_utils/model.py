"""A transformers model sharded by FSDP2: built on the meta device, filled from HF files, run over packed rows.

Each decoder layer is one group of parameters, the rest (embedding, last norm, output layer) is the root's. Whatever
reads the output layer's weight runs inside the root's forward pass, where the weight is whole and gets its gradient in
time. Parameters are fp32, and so is the optimizer; with --bf16 they are cast when they are gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from slime.backends.megatron_utils.layers.value_head import is_value_model
from slime.backends.megatron_utils.layers.varlen_attention import (
    attend_packed,
    cu_seqlens_of,
    host_ends,
    varlen_kernel,
)
from slime.backends.megatron_utils.loss import DeferredLogits
from slime.config.args import Args
from slime.conversion.reader import SafetensorsReader
from slime.utils import accelerator
from slime.utils.errors import UsageError
from slime.utils.train_data import MicroBatch
from slime.weights.names import is_fused, single_names

T = TypeVar("T")
PACKED_ATTENTION = "slime_packed"
"""Name under which transformers knows our attention (--attn-implementation)."""
HEAD = "value_head."
GATHER_BYTES = 64 * 2**20
"""Parameters are gathered this many bytes at a time, or one by one where they are larger."""


# ---- attention


def register_attention() -> None:
    """Let transformers find `PACKED_ATTENTION`: causal attention within each sample of a pack, without a mask."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(PACKED_ATTENTION, _attend)
    AttentionMaskInterface.register(PACKED_ATTENTION, _no_mask)


def _no_mask(*_: Any, **__: Any) -> None:
    """Build no mask: the sequences' ends say what a token sees."""


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
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """As transformers calls it: q [1, h, t, d], k and v [1, g, t, d] -> [1, t, h, d]."""
    if attention_mask is not None or sliding_window is not None:
        raise ValueError(f"{type(module).__name__} asks for a mask or a window, which packed attention has not")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
        ends, longest = cu_seqlens_of(pack), int(pack.max_seqlen_q)
        out = varlen_kernel(q, k, v, (ends, ends), (longest, longest), scale=scale)
    else:
        out = attend_packed(q, k, v, host_ends(pack), scale=scale)
    return out[None], None


# ---- the model


class Policy(torch.nn.Module):
    """The root that is sharded: a transformers model, and what reads its last hidden states.

    Args:
        hf: a causal language model of transformers.
        has_value_head: a critic's: a head [1, H] takes the place of the output layer.
    """

    def __init__(self, hf: Any, *, has_value_head: bool) -> None:
        super().__init__()
        self.hf = hf
        self.value_head: torch.nn.Linear | None = None
        if has_value_head:
            hf.set_output_embeddings(None)
            hf.lm_head = torch.nn.Identity()
            with parameters_on_meta():
                self.value_head = torch.nn.Linear(hf.config.get_text_config().hidden_size, 1)
        self.is_packed = hf.config._attn_implementation == PACKED_ATTENTION

    def forward(self, batch: MicroBatch, read: Callable[[Any], T]) -> T:
        """Return `read(output)`: the output is `DeferredLogits`, of a critic values [1, T, 1]."""
        more = {"pack": batch["packed_seq_params"]} if self.is_packed else {}
        inputs = {"input_ids": batch["tokens"], "position_ids": batch["position_ids"], "attention_mask": None}
        # transformers' own attention finds the samples where positions begin again, which needs no mask either
        hidden = self.hf.base_model(**inputs, use_cache=False, **more).last_hidden_state[0]
        if self.value_head is not None:
            weight, bias = self.value_head.weight.float(), self.value_head.bias.float()
            return read(torch.nn.functional.linear(hidden.float(), weight, bias)[None])
        weight = self.hf.get_output_embeddings().weight
        return read(DeferredLogits(hidden.to(weight.dtype), weight))


def build_policy(args: Args, mesh: DeviceMesh) -> Policy:
    """Return the model of --hf-checkpoint, sharded over a mesh and empty (collective).

    Args:
        args: `hf_checkpoint`, `attn_implementation`, `recompute_granularity`, `params_dtype`, the `fsdp_` flags.
        mesh: of `make_mesh`.

    Raises:
        UsageError: transformers cannot build it, or its output layer is not a plain product.
    """
    register_attention()
    hf = _on_meta(args)
    if args.recompute_granularity is not None:
        hf.gradient_checkpointing_enable({"use_reentrant": False})
    policy = Policy(hf, has_value_head=is_value_model(args))
    offload = CPUOffloadPolicy(pin_memory=accelerator.kind() == "cuda") if args.fsdp_cpu_offload else OffloadPolicy()
    options: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": args.fsdp_reshard_after_forward,
        "offload_policy": offload,
    }
    if args.params_dtype != "float32":
        dtype = getattr(torch, args.params_dtype)
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    layers = decoder_layers(hf)
    for layer in layers:
        fully_shard(layer, **options)
    fully_shard(policy, **options)
    if args.fsdp_forward_prefetch:
        for layer, following in zip(layers[:-1], layers[1:], strict=True):
            layer.set_modules_to_forward_prefetch([following])
    device = torch.device("cpu") if args.fsdp_cpu_offload else accelerator.current_device()
    # Not `to_empty`, which would also empty buffers that no checkpoint has (the frequencies of rotary positions).
    policy._apply(lambda tensor: _materialised(tensor, device))
    if not is_value_model(args):
        hf.tie_weights()
    _move_buffers(policy)
    return policy.train()


def _materialised(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.zeros_like(tensor, device=device) if tensor.is_meta else tensor


def _move_buffers(policy: Policy) -> None:
    """Buffers stay on the device, where the forward pass wants them."""
    for module in policy.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(accelerator.current_device())


def _on_meta(args: Args) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    trusted = {"trust_remote_code": args.trust_remote_code}
    try:
        config = AutoConfig.from_pretrained(args.hf_checkpoint, **trusted)  # nosec B615: a local directory
        with parameters_on_meta():
            hf = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation=args.attn_implementation, **trusted
            )
    except ValueError as error:
        raise UsageError(
            f"--hf-checkpoint {args.hf_checkpoint}: transformers cannot build it ({str(error).splitlines()[0]}); use "
            "--train-backend megatron."
        ) from error
    hf.tie_weights()
    if getattr(hf.get_output_embeddings(), "bias", None) is not None:
        raise UsageError(
            f"--hf-checkpoint {args.hf_checkpoint}: {type(hf).__name__} has a bias in its output layer, which "
            "--train-backend fsdp does not compute; use --train-backend megatron."
        )
    return hf


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
    layers = getattr(hf.base_model, "layers", None)
    if layers is None:
        raise UsageError(
            f"{type(hf).__name__} has no list of decoder layers (`model.layers`), which --train-backend fsdp shards; "
            "use --train-backend megatron."
        )
    return list(layers)


def make_mesh(args: Args) -> DeviceMesh:
    """Return the ranks over which parameters are sharded; with --fsdp-replicate-size several copies of them."""
    kind, world = accelerator.current_device().type, dist.get_world_size()
    copies = args.fsdp_replicate_size
    if copies == 1:
        return init_device_mesh(kind, (world,), mesh_dim_names=("shard",))
    return init_device_mesh(kind, (copies, world // copies), mesh_dim_names=("replicate", "shard"))


# ---- weights in and out, by the names of HF checkpoints


def named_parameters(policy: Policy) -> list[tuple[str, torch.Tensor]]:
    """(name in transformers' model, parameter) of each parameter, a tied one once; all are sharded."""
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # after a pass without gradients the root's are whole, and other tensors
    return [(name.removeprefix("hf."), parameter) for name, parameter in policy.named_parameters()]


def fixed_tensors(policy: Policy) -> list[tuple[str, torch.Tensor]]:
    """(name in transformers' model, buffer) of what checkpoints hold and no gradient changes: biases of routers."""
    return [
        (f"{prefix}.{name}".removeprefix("hf."), buffer)
        for prefix, module in policy.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    ]


def load_hf(policy: Policy, path: str) -> None:
    """Fill parameters and fixed tensors from an HF directory; each rank reads the rows of its own shards.

    A critic's head keeps what it has.

    Raises:
        UsageError: the directory lacks a tensor of the model, or has it in another shape.
    """
    reader = SafetensorsReader(path)
    names = set(reader.names())
    for name, parameter in [*named_parameters(policy), *fixed_tensors(policy)]:
        if name.startswith(HEAD):
            continue
        local, first = local_rows(parameter)
        rows = (first, first + len(local))
        if is_fused(name) and name not in names:
            singles = single_names(name, parameter.shape[0])
            width = len(singles) // parameter.shape[0]
            experts = [singles[number * width : (number + 1) * width] for number in range(*rows)]
            found = [torch.cat([reader.get(single) for single in of_expert]) for of_expert in experts]
            value = torch.stack(found) if found else local
        elif name in names:
            value = reader.get_rows(name, *rows)
        else:
            raise UsageError(
                f"{path} has no tensor {name}, which transformers' model of --hf-checkpoint needs; give a checkpoint "
                "with transformers' names, or use --train-backend megatron."
            )
        if value.shape != local.shape:
            raise UsageError(
                f"{path}: {name} has the shape {tuple(value.shape)} here, the model {tuple(local.shape)}."
            )
        with torch.no_grad():
            local.copy_(value)


def local_rows(parameter: torch.Tensor) -> tuple[torch.Tensor, int]:
    """This rank's rows of a parameter (a live view), and the number of the first."""
    if not isinstance(parameter, DTensor):
        return parameter.data, 0
    mesh = parameter.device_mesh
    rows = -(-parameter.shape[0] // mesh.size(mesh.ndim - 1))
    first = min(rows * mesh.get_local_rank(mesh.ndim - 1), parameter.shape[0])
    return parameter.to_local().data, first


class WeightSource:
    """The full tensors of a policy, for engines and HF files (`hf_weight_iterator.iter_hf_buckets`).

    Args:
        policy: whose.
        dtype: in which they are given, that of the engines.
    """

    def __init__(self, policy: Policy, dtype: torch.dtype) -> None:
        self.policy, self.dtype = policy, dtype

    @torch.no_grad()
    def full_tensors(self) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """Yield the HF tensors of each parameter, gathered over the ranks, and the fixed tensors (collective)."""
        waiting: list[tuple[str, torch.Tensor]] = []
        num_bytes = 0
        for name, parameter in named_parameters(self.policy):
            size = parameter.numel() * self.dtype.itemsize
            if waiting and num_bytes + size > GATHER_BYTES:
                yield from map(as_hf, gathered(waiting))
                waiting, num_bytes = [], 0
            waiting.append((name, parameter.detach().to(self.dtype)))
            num_bytes += size
        yield from map(as_hf, gathered(waiting))
        yield from ([(name, tensor)] for name, tensor in fixed_tensors(self.policy))


def gathered(shards: Sequence[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """(name, full tensor) of sharded parameters; all gathers are under way at once (collective)."""
    device = accelerator.current_device()
    on_device = [(name, shard.to(device)) for name, shard in shards]
    whole = [(name, _replicated(shard)) for name, shard in on_device]
    return [(name, tensor.to_local() if isinstance(tensor, DTensor) else tensor) for name, tensor in whole]


def _replicated(shard: torch.Tensor) -> torch.Tensor:
    if not isinstance(shard, DTensor):
        return shard
    from torch.distributed.tensor import Replicate

    return shard.redistribute(placements=[Replicate()] * shard.device_mesh.ndim, async_op=True)


def as_hf(named: tuple[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """The tensors that an HF checkpoint has for one of transformers: the experts of a layer one by one."""
    name, tensor = named
    if not is_fused(name):
        return [named]
    singles = single_names(name, len(tensor))
    width = len(singles) // len(tensor)
    return list(zip(singles, [part for expert in tensor for part in expert.chunk(width)], strict=True))
