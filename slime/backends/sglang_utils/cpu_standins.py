"""Stand-ins that let the stock SGLang 0.5.17 run without CUDA, triton, torchvision and sgl_kernel.

SGLang has a pure-torch path for such machines; only its imports get in the way. `install()` puts SGLang's own triton
stub, an empty torchvision and an `sgl_kernel` whose functions raise when called in place of the *absent* packages; a
package that is installed is left alone, and on a machine with CUDA nothing at all is done. Every process that imports
`sglang.srt` calls it first: the server and its spawned children (`launch_server`), the weight sender
(`weight_transfer`) and the flag registration (`arguments`).

`install_deterministic()` adds what seeded, batch-independent sampling needs on CPU: SGLang honours `sampling_seed`
only with `--enable-deterministic-inference`, and that refuses the CPU attention backend and hashes with a triton
kernel. `install_kernels()` stands in for the triton kernels that models call without looking at the device.

`install_attention()` computes attention over all sequences of a batch at once. SGLang's "torch_native" backend runs
one attention call a sequence and layer; with hundreds of short sequences these small calls are half of a step. A
subclass is registered under the same name that pads sequences of similar length to one tensor. What it does not cover
(cross attention, sliding windows, an encoder, another cache dtype) and sequences without company go the old way.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

CPU_ATTENTION_BACKEND = "torch_native"
MAX_SCORES = 2**24  # elements of a padded score matrix (per head): 64 MiB of mask and scores at most
SHORTEST_BUCKET = 16
_MASK_32 = 0xFFFFFFFF
_TORCHVISION_MODULES = (
    "torchvision",
    "torchvision.io",
    "torchvision.transforms",
    "torchvision.transforms.functional",
)


def install() -> None:
    """Put the stand-ins in place; does nothing the second time, or on a machine with CUDA."""
    import torch

    if torch.cuda.is_available():
        return
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    if not _absent("triton") and not _absent("torchvision") and not _absent("sgl_kernel"):
        return
    # Both cache, at import time, whether triton and torchvision exist: they must look before the stand-ins are there.
    import torch._inductor.runtime.triton_compat
    import transformers.processing_utils  # noqa: F401  (it re-creates the transformers module, so it comes before the edit below)

    stub = _triton_stub()
    if _absent("triton"):
        stub.install()
    if _absent("torchvision"):
        for name in _TORCHVISION_MODULES:
            sys.modules[name] = stub._MockModule(name)
        sys.modules["transformers"].AutoImageProcessor = _NoImageProcessor  # type: ignore[attr-defined]
    if _absent("sgl_kernel"):
        sys.modules["sgl_kernel"] = _sgl_kernel()


def install_deterministic() -> None:
    """`install()`, then make `--enable-deterministic-inference` work on CPU; does nothing with CUDA.

    The hash is the one of SGLang's triton kernel, so a seed means the same draw on both devices.
    """
    import torch

    install()
    if torch.cuda.is_available():
        return
    from sglang.srt import server_args

    if CPU_ATTENTION_BACKEND not in server_args.DETERMINISTIC_ATTENTION_BACKEND_CHOICES:
        server_args.add_deterministic_attention_backend_choices([CPU_ATTENTION_BACKEND])
        server_args.add_radix_supported_deterministic_attention_backend_choices([CPU_ATTENTION_BACKEND])
    # Its triton kernels fix the reduction order of CUDA matmuls; torch's CPU kernels give equal tokens without help.
    for module, name, replacement in (
        ("sglang.srt.batch_invariant_ops", "enable_batch_invariant_mode", _do_nothing),
        ("sglang.kernels.ops.sampling.murmur_hash", "murmur_hash32", murmur_hash32),
        ("sglang.srt.layers.sampler", "murmur_hash32", murmur_hash32),
    ):
        setattr(importlib.import_module(module), name, replacement)


def install_kernels() -> None:
    """Let the models of a server that has no triton compute with torch; called before SGLang imports them."""
    from sglang.kernels.ops.elementwise import elementwise

    elementwise.fused_gate_sigmoid_mul_add = add_gated


def install_image_processors() -> None:
    """Let SGLang import its processors of images on any CPU; called before it does.

    They import Qwen3.5, which takes four kernels by name. Models that have none of its layers never call them.
    """
    import torch

    for name in (
        "fused_sigmoid_mul",
        "fused_qk_gemma_rmsnorm",
        "fused_qk_gemma_rmsnorm_with_gate",
        "fused_qkvzba_split_reshape_cat_contiguous",
    ):
        setattr(torch.ops.sgl_kernel, f"{name}_cpu", _missing_kernel(f"{name}_cpu"))


def install_latent_attention() -> None:
    """Let models with latent attention run without CUDA, YaRN or not; called before the server makes one.

    SGLang sends a prompt through uncompressed keys where a backend has not said otherwise, and its torch attention
    takes keys from the cache, which holds the compressed ones: log-probs would be wrong without a word. Its CPU path
    knows YaRN's rotary embedding alone.
    """
    from sglang.srt.layers.rotary_embedding.factory import get_rope
    from sglang.srt.models import deepseek_v2
    from sglang.srt.models.deepseek_common import attention_backend_handler as handlers

    handlers.AttentionBackendRegistry.register(CPU_ATTENTION_BACKEND, handlers._dispatch_mla_subtype)
    with_yarn = deepseek_v2.get_rope_wrapper

    def rope(*sizes: Any, rope_scaling: Any = None, device: Any = None, **options: Any) -> Any:
        if rope_scaling is not None and rope_scaling.get("rope_type") == "deepseek_yarn":
            return with_yarn(*sizes, rope_scaling=rope_scaling, device=device, **options)
        return get_rope(*sizes, rope_scaling=rope_scaling, **options)

    deepseek_v2.get_rope_wrapper = rope


def install_all_heads_norm() -> None:
    """Let MiniMax-M2 norm queries and keys with torch; SGLang does so by itself only on CPUs with AMX."""
    from sglang.srt.models.minimax_m2 import MiniMaxM2QKRMSNorm

    MiniMaxM2QKRMSNorm._forward_naive = MiniMaxM2QKRMSNorm._forward_cpu


def install_structured_output() -> None:
    """Let regex and JSON schemas bind the sampling on CPU: SGLang pins the mask and applies it with triton."""
    from sglang.srt.constrained import xgrammar_backend
    from xgrammar import allocate_token_bitmask, apply_token_bitmask_inplace

    def allocate(vocab_size: int, batch_size: int) -> torch.Tensor:
        return allocate_token_bitmask(batch_size, vocab_size)

    def apply(logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
        apply_token_bitmask_inplace(logits, vocab_mask)

    xgrammar_backend._allocate_token_bitmask = allocate
    for kind in (xgrammar_backend.XGrammarGrammar, xgrammar_backend.XGrammarGrammarBackend):
        kind.apply_vocab_mask = staticmethod(apply)


def drop_pinned_memory() -> None:
    """Let torch ignore wishes for pinned memory, which needs CUDA: routed experts and LoRA ask for it."""
    import torch

    def without_pinning(factory: Callable[..., Any]) -> Callable[..., Any]:
        def make(*args: Any, pin_memory: bool = False, **options: Any) -> Any:
            return factory(*args, **options)

        return make

    for name in ("empty", "zeros", "ones", "full", "empty_like", "zeros_like", "tensor", "arange"):
        setattr(torch, name, without_pinning(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, *_: tensor


def murmur_hash32(seed: Any, positions: Any, col_indices: Any) -> Any:
    """MurmurHash3 of (64-bit seed, position, column), as SGLang's triton kernel computes it.

    Args:
        seed: `[n]` integers, one a request.
        positions: `[n]` integers, the position of the token to draw.
        col_indices: `[m]` integers, the vocabulary indices.

    Returns:
        `[n, m]` int64 in `[0, 2**32)`.
    """
    import torch

    seed = seed.to(torch.int64)
    rows = torch.zeros_like(seed)
    for block in (seed & _MASK_32, (seed >> 32) & _MASK_32, positions.to(torch.int64) & _MASK_32):
        rows = _absorb(rows, _scramble(block))
    hashed = _absorb(rows[:, None], _scramble(col_indices.to(torch.int64))[None, :])
    hashed = hashed ^ 16  # the length in bytes of seed, position and column together
    hashed = ((hashed ^ (hashed >> 16)) * 0x85EBCA6B) & _MASK_32
    hashed = ((hashed ^ (hashed >> 13)) * 0xC2B2AE35) & _MASK_32
    return hashed ^ (hashed >> 16)


def add_gated(hidden: Any, gate_weight: Any, shared: Any, total: Any) -> None:
    """Add the output of a shared expert, weighted by its gate, in place.

    Args:
        hidden: `[n, H]` what the gate sees.
        gate_weight: `[H]`.
        shared: `[n, H]` what the shared expert made of it.
        total: `[n, H]` what it is added to.
    """
    total.add_((hidden @ gate_weight).sigmoid()[:, None] * shared)


def _rotate_left(value: Any, bits: int) -> Any:
    return ((value << bits) | (value >> (32 - bits))) & _MASK_32


def _scramble(block: Any) -> Any:
    return (_rotate_left((block * 0xCC9E2D51) & _MASK_32, 15) * 0x1B873593) & _MASK_32


def _absorb(state: Any, scrambled: Any) -> Any:
    return (_rotate_left(state ^ scrambled, 13) * 5 + 0xE6546B64) & _MASK_32


def _absent(package: str) -> bool:
    if sys.modules.get(package) is not None:
        return False  # imported for real, or a stand-in of an earlier call
    return importlib.util.find_spec(package) is None  # also where None in `sys.modules` hides it


def _triton_stub() -> types.ModuleType:
    """SGLang's own stub, loaded by path: `import sglang._triton_stub` would import sglang, which wants triton."""
    package = importlib.util.find_spec("sglang")
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError("sglang is not installed; install requirements-cpu.txt (scripts/setup_env.sh does)")
    path = os.path.join(package.submodule_search_locations[0], "_triton_stub.py")
    spec = importlib.util.spec_from_file_location("_slime_triton_stub", path)
    if spec is None or spec.loader is None or not os.path.exists(path):
        raise ModuleNotFoundError(f"{path} does not exist: this SGLang does not ship the triton stub; 0.5.17 does")
    stub = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stub)
    return stub


class _NoImageProcessor:
    """In the place of transformers.AutoImageProcessor, which needs torchvision; SGLang registers classes on it."""

    @staticmethod
    def register(*_args: Any, **_kwargs: Any) -> None:
        """Ignore the registration: no image model runs without torchvision."""


def _do_nothing(*_args: Any, **_kwargs: Any) -> None:
    pass


def _sgl_kernel() -> types.ModuleType:
    """A package any name imports from; SGLang's CPU path imports names that only speculative decoding calls."""
    module = types.ModuleType("sgl_kernel")
    module.__path__ = []
    module.__version__ = "0.0.0"  # type: ignore[attr-defined]
    module.__spec__ = importlib.util.spec_from_loader("sgl_kernel", None, is_package=True)
    module.__getattr__ = _missing_kernel  # type: ignore[method-assign]
    return module


def _missing_kernel(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*_args: Any, **_kwargs: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} has no CPU stand-in")

    return kernel


# ---- attention


@dataclass(frozen=True)
class Bucket:
    """Sequences of similar length, padded to one tensor.

    Attributes:
        rows: `[B]` indices of the sequences in the batch.
        queries: `[B, Q]` indices of their query tokens; a padded place repeats the first.
        is_query: `[B, Q]` False where padded; None when nothing is.
        keys: `[B, K]` places of their tokens in the cache; a padded place repeats the first.
        mask: `[B, 1, Q, K]` True where a query may look; None when every query may look everywhere.
    """

    rows: torch.Tensor
    queries: torch.Tensor
    is_query: torch.Tensor | None
    keys: torch.Tensor
    mask: torch.Tensor | None


def plan(
    seq_lens: torch.Tensor, query_lens: torch.Tensor, req_to_token: torch.Tensor, req_pool_indices: torch.Tensor
) -> list[Bucket]:
    """Put the sequences of a batch into buckets whose lengths differ by less than a factor of two.

    Args:
        seq_lens: `[N]` tokens of each sequence, the query tokens included, which are its last.
        query_lens: `[N]` query tokens of each.
        req_to_token: `[requests, context]` place in the cache of each token of each request.
        req_pool_indices: `[N]` row of each sequence in `req_to_token`.
    """
    import torch

    starts = torch.cumsum(query_lens, 0) - query_lens
    groups: dict[tuple[int, int], list[int]] = {}
    for row, (num_keys, num_queries) in enumerate(zip(seq_lens.tolist(), query_lens.tolist(), strict=True)):
        groups.setdefault((_bucket(num_keys), _bucket(num_queries)), []).append(row)
    buckets = []
    for (longest, most_queries), members in groups.items():
        at_once = max(1, MAX_SCORES // (longest * most_queries))
        for first in range(0, len(members), at_once):
            rows = torch.tensor(members[first : first + at_once])
            buckets.append(_pad(rows, starts, seq_lens, query_lens, req_to_token[req_pool_indices[rows]]))
    return buckets


def _bucket(length: int) -> int:
    return 1 if length == 1 else max(SHORTEST_BUCKET, 1 << (length - 1).bit_length())


def _pad(
    rows: torch.Tensor,
    starts: torch.Tensor,
    seq_lens: torch.Tensor,
    query_lens: torch.Tensor,
    places: torch.Tensor,
) -> Bucket:
    import torch

    num_keys, num_queries = seq_lens[rows, None], query_lens[rows, None]
    query, key = torch.arange(int(num_queries.max()))[None], torch.arange(int(num_keys.max()))[None]
    is_query, is_key = query < num_queries, key < num_keys
    last_visible = num_keys - num_queries + query  # causal: a query sees itself and what came before
    mask = (key[:, None, :] <= last_visible[:, :, None]) & is_key[:, None, :]
    return Bucket(
        rows=rows,
        queries=starts[rows, None] + torch.where(is_query, query, 0),
        is_query=None if bool(is_query.all()) else is_query,
        keys=torch.where(is_key, places[:, : key.shape[1]], places[:, :1]).long(),
        mask=None if bool(mask.all()) else mask[:, None],
    )


def attend(
    buckets: list[Bucket],
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    *,
    scaling: float | None,
) -> None:
    """Causal attention of every bucket.

    Args:
        buckets: of `plan`.
        query: `[T, heads, D]` query tokens, sequence after sequence.
        output: `[T, heads, D_v]`, written.
        k_cache: `[places, kv_heads, D]`.
        v_cache: `[places, kv_heads, D_v]`.
        scaling: of the scores; None is 1 / sqrt(D).
    """
    from torch.nn.functional import scaled_dot_product_attention

    for bucket in buckets:
        out = scaled_dot_product_attention(
            query[bucket.queries].transpose(1, 2),
            k_cache[bucket.keys].transpose(1, 2),
            v_cache[bucket.keys].transpose(1, 2),
            attn_mask=bucket.mask,
            scale=scaling,
            enable_gqa=query.shape[1] != k_cache.shape[1],
        ).transpose(1, 2)
        if bucket.is_query is None:
            output[bucket.queries] = out
        else:
            output[bucket.queries[bucket.is_query]] = out[bucket.is_query]


def install_attention() -> None:
    """Register the batched backend in the place of SGLang's; call it before the server starts."""
    from sglang.srt.layers.attention import attention_registry

    attention_registry.ATTENTION_BACKENDS[CPU_ATTENTION_BACKEND] = _factory()


def _factory() -> Callable[[Any], Any]:
    import torch
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    class BatchedAttention(TorchNativeAttnBackend):
        """SGLang's backend with its two loops over sequences replaced."""

        def __init__(self, model_runner: Any) -> None:
            super().__init__(model_runner)
            self._buckets: list[Bucket] | None = None

        def init_forward_metadata(self, forward_batch: Any) -> None:
            super().init_forward_metadata(forward_batch)
            self._buckets = None  # made by the first layer, used by all

        def _run_sdpa_forward_decode(self, *args: Any, **kwargs: Any) -> Any:
            return self._run(super()._run_sdpa_forward_decode, args, kwargs)

        def _run_sdpa_forward_extend(self, *args: Any, **kwargs: Any) -> Any:
            if not kwargs["causal"]:
                return super()._run_sdpa_forward_extend(*args, **kwargs)
            return self._run(super()._run_sdpa_forward_extend, args, kwargs)

        def _run(self, one_by_one: Callable[..., Any], operands: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, *rest = operands
            *extend, encoder_lens = rest
            special = encoder_lens is not None or kwargs["is_cross_attn"] or kwargs["sliding_window_size"] is not None
            if special or len(seq_lens) == 1 or not query.dtype == k_cache.dtype == v_cache.dtype:
                return one_by_one(*operands, **kwargs)
            if self._buckets is None:
                query_lens = extend[1] if extend else torch.ones_like(seq_lens)
                self._buckets = plan(seq_lens, query_lens, req_to_token, req_pool_indices)
            attend(self._buckets, query, output, k_cache, v_cache, scaling=kwargs["scaling"])
            return output

    return BatchedAttention
