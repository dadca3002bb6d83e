"""What an engine holds of a few of its weights: an action of SGLang's `/weights_checker` that takes milliseconds.

SGLang's own action "checksum" hashes every weight, far more work than the sync that it would check. Installed in the
server process, "sample NAME NAME ..." answers in its form, for tensors that the engine has under these names: 1024
elements of each, evenly spread. What an engine stores otherwise (fused, cut over ranks, quantised) has another name,
shape or type there, and is not compared. `install` also makes SGLang's own actions work on CPU. The rest of the file
is used on both sides; it does not know which tensors are worth asking for.
"""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

SAMPLE_ACTION = "sample "
SAMPLE_SIZE = 1024
COMPARABLE = ("float32", "bfloat16", "float16")


def sample(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of at most `SAMPLE_SIZE` elements, evenly spread over a tensor; [n]."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, -(-flat.numel() // SAMPLE_SIZE))].clone()


def on_host(samples: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Samples of one device in the host's memory; the device is waited for once, not once a sample."""
    import torch

    if not samples:
        return []
    sizes = [sampled.nbytes for sampled in samples]
    together = torch.cat([sampled.to(samples[0].device).view(torch.uint8) for sampled in samples]).cpu()
    # Each at the beginning of memory of its own: a view of its type may not begin anywhere.
    parts = (part.clone() for part in together.split(sizes))
    return [part.view(sampled.dtype) for part, sampled in zip(parts, samples, strict=True)]


def describe(shape: tuple[int, ...], sampled: torch.Tensor) -> str:
    """Type, shape and a hash of the bytes, as in "bfloat16 1024x4096 0123456789abcdef"."""
    import torch

    data = sampled.contiguous().cpu().view(torch.uint8).numpy().tobytes()
    dtype = str(sampled.dtype).removeprefix("torch.")
    return f"{dtype} {'x'.join(map(str, shape))} {hashlib.sha256(data).hexdigest()[:16]}"


def agrees(shape: tuple[int, ...], sampled: torch.Tensor, held: str) -> bool | None:
    """Whether an engine holds what was sent.

    Args:
        shape: of the tensor that was sent.
        sampled: its `sample`.
        held: the engine's description; its type may be another: loading casts.

    Returns:
        None where the two cannot be compared.
    """
    import torch

    dtype, held_shape, _ = held.split(" ")
    if dtype not in COMPARABLE or held_shape != "x".join(map(str, shape)):
        return None
    if str(sampled.dtype).removeprefix("torch.") not in COMPARABLE:
        return None
    return describe(shape, sampled.to(getattr(torch, dtype))) == held


def install(*, on_cpu: bool) -> None:
    """Add the action to the server that runs in this process. Imports SGLang."""
    from sglang.srt.utils.weight_checker import WeightChecker

    if on_cpu:
        _work_on_cpu()
    handle = WeightChecker.handle

    def handle_or_sample(checker: Any, action: str, *values: Any, **keywords: Any) -> Any:
        if not action.startswith(SAMPLE_ACTION):
            return handle(checker, action, *values, **keywords)
        return _answer(checker, set(action.removeprefix(SAMPLE_ACTION).split(" ")))

    WeightChecker.handle = handle_or_sample


def _answer(checker: Any, names: set[str]) -> dict[str, Any]:
    held = dict(_named(checker._get_model(), names))
    samples = zip(held.items(), on_host([sample(tensor) for tensor in held.values()]), strict=True)
    return {
        "checksums": {name: describe(tuple(tensor.shape), sampled) for (name, tensor), sampled in samples},
        "per_gpu_checksum": "",
        "parallelism_info": checker._parallelism_info().model_dump(),
    }


def _named(model: torch.nn.Module, names: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Those parameters and buffers of a model that have these names, without a walk over all of it."""
    for name in names:
        path, _, own_name = name.rpartition(".")
        # Engines have both parts of a model that sees images under names of their own.
        places = (path, path.replace("model.language_model", "model"), path.removeprefix("model."), *_in_draft(path))
        module = next((found for place in places if (found := _submodule(model, place)) is not None), None)
        if module is None:
            continue
        # Where the server has LoRA, a linear layer is wrapped, and its weight is the inner layer's.
        module = module._modules.get("base_layer") or module
        tensor = {**module._parameters, **module._buffers}.get(own_name)
        if tensor is not None:
            yield name, tensor


def _in_draft(path: str) -> tuple[str, ...]:
    """Where a model that drafts has a module of the layer that predicts further tokens, which is all that it has."""
    own = re.sub(r"^model\.(layers|mtp_layers)\.\d+\.", "", path)
    return () if own == path else (f"model.decoder.{own}", f"model.mtp_block.{own}", f"model.{own}")


def _submodule(model: torch.nn.Module, path: str) -> torch.nn.Module | None:
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


def _work_on_cpu() -> None:
    """SGLang compares on the GPU, and takes `cpu()` for a copy, which it is not where weights are there already."""
    from sglang.srt.utils import weight_checker, weight_checker_comparator

    def snapshot(checker: Any) -> None:
        checker._snapshot_tensors = {name: tensor.detach().clone() for name, tensor in checker._model_state()}

    def whole(comparable: Any) -> Iterator[tuple[Any, None]]:
        yield comparable.tensor.reshape(-1), None

    weight_checker.WeightChecker._snapshot = snapshot
    weight_checker_comparator.RawComparable.iter_chunks = whole
