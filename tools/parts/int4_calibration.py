"""GPTQ (arXiv:2210.17323) for tools/convert_hf_to_int4.py: the arithmetic, and the layers that samples go through.

`quantize` rounds the columns of a matrix one after the other; what each loses is made up for by those that come after
it, as the inputs' second moments H = sum x x^T say. It departs from the paper in one point: scales belong to groups of
columns and are chosen, symmetric, when the first column of a group is reached.

`CalibratedLayers` runs samples through a transformers model one layer after the other, each quantised before the next
one sees its output. Memory holds one layer, the hidden states of the samples and the second moments of the inputs of
one layer's matrices. The inputs of each matrix that is to be quantised are seen: those of a linear layer, and those of
an expert, which transformers keeps with its like in one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from slime.utils.errors import UsageError
from slime.weights.formats import Int4Format
from slime.weights.names import is_fused, place_of, single_names
from slime.weights.quantization import HIGHEST, LOWEST, dequantize_groups, quantize_groups

if TYPE_CHECKING:
    from slime.conversion.reader import TensorInfo

BLOCK = 128


class SingularInputsError(ValueError):
    """The inputs leave columns without a second moment that could be inverted."""


def quantize(
    weight: torch.Tensor, moments: torch.Tensor, group_size: int, *, dampening: float = 0.01
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a matrix for the inputs with these second moments.

    Args:
        weight: [N, K].
        moments: sum of x x^T over inputs, fp32 [K, K]; all zero (an expert that saw no token): plain rounding.
        group_size: columns that share a scale; K is a multiple.
        dampening: of the mean of the diagonal, added to it.

    Returns:
        values int8 [N, K] in -8 .. 7, and scales [N, K / group_size] in the weight's dtype.

    Raises:
        SingularInputsError: the moments cannot be inverted.
    """
    if not bool(moments.any()):
        values, scales, _ = quantize_groups(weight, group_size)
        return values, scales
    left, factor = weight.float().clone(), _inverse_factor(moments, dampening)
    values, scales = torch.empty_like(weight, dtype=torch.int8), []
    block_size = max(BLOCK // group_size, 1) * group_size
    for start in range(0, weight.shape[1], block_size):
        block = slice(start, min(start + block_size, weight.shape[1]))
        errors = torch.zeros_like(left[:, block])
        for column in range(block.start, block.stop):
            if column % group_size == 0:
                _, scale, _ = quantize_groups(left[:, column : column + group_size].to(weight.dtype), group_size)
                scales.append(scale[:, 0])
            step = scales[-1].float()
            values[:, column] = (left[:, column] / step).round().clamp(LOWEST, HIGHEST).to(torch.int8)
            error = (left[:, column] - values[:, column] * step) / factor[column, column]
            left[:, column : block.stop] -= torch.outer(error, factor[column, column : block.stop])
            errors[:, column - block.start] = error
        left[:, block.stop :] -= errors @ factor[block, block.stop :]
    return values, torch.stack(scales, 1)


def _inverse_factor(moments: torch.Tensor, dampening: float) -> torch.Tensor:
    """The upper factor U of the inverse of the dampened moments: U^T U."""
    damped = moments.float().clone()
    diagonal = damped.diagonal()
    diagonal[diagonal == 0] = 1  # a column whose input is always zero may be anything
    diagonal += dampening * diagonal.mean()
    try:
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
        return torch.linalg.cholesky(inverse, upper=True)
    except torch.linalg.LinAlgError as error:
        raise SingularInputsError(f"the inputs' second moments cannot be inverted ({error})") from error


# HF name of a weight -> values int8 [N, K], scales [N, K / group]
Quantized = dict[str, tuple[torch.Tensor, torch.Tensor]]


class CalibratedLayers:
    """The decoder layers of one checkpoint, to be quantised in order.

    Args:
        model_dir: HF directory.
        flag: that named it.
        read: reads a tensor of it by name (experts one by one).
        infos: name -> dtype and shape of all its tensors.
        fmt: which weights are quantised, and how.
        samples: token ids, [T] each.
        dampening: see `quantize`.
        device: where layers run.
        trust_remote_code: whether the checkpoint's own code may be run.

    Raises:
        UsageError: transformers has no class of this model, a tensor of its layers is missing or of another shape, or
            samples hold tokens that it does not have.
    """

    def __init__(
        self,
        model_dir: Path,
        fmt: Int4Format,
        *,
        flag: str,
        read: Callable[[str], torch.Tensor],
        infos: Mapping[str, TensorInfo],
        samples: Sequence[torch.Tensor],
        dampening: float,
        device: torch.device,
        trust_remote_code: bool = False,
    ) -> None:
        from transformers import AutoConfig
        from transformers.models.auto.modeling_auto import AutoModelForCausalLM

        try:
            config = AutoConfig.from_pretrained(model_dir, trust_remote_code=trust_remote_code)  # nosec B615
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(
                    config, attn_implementation="sdpa", trust_remote_code=trust_remote_code
                )
        except (ValueError, KeyError, OSError) as error:
            said = str(error).splitlines()[0]
            raise UsageError(
                f"{flag} {model_dir}: transformers cannot build this model ({said}); use "
                "tools/convert_hf_to_int4_direct.py, which needs no model."
            ) from error
        self._read, self._infos, self._fmt = read, infos, fmt
        self._dampening, self._device = dampening, device
        self._layers = model.model.layers
        self._check(f"{flag} {model_dir}")
        rotary = type(model.model.rotary_emb)(config).to(device)
        embedding = read("model.embed_tokens.weight").to(device)
        if (largest := max(int(ids.max()) for ids in samples)) >= embedding.shape[0]:
            raise UsageError(
                f"the tokenizer of {model_dir} makes token {largest}, and the embedding has {embedding.shape[0]} "
                "rows; is it the tokenizer of another model?"
            )
        self._hidden, self._keywords = [], []
        for ids in samples:
            hidden = torch.nn.functional.embedding(ids[None].to(device), embedding)
            positions = torch.arange(ids.shape[0], device=device)[None]
            self._hidden.append(hidden)
            # Without a mask, sdpa attends causally.
            keywords = {"position_ids": positions, "position_embeddings": rotary(hidden, positions)}
            self._keywords.append({"attention_mask": None, "use_cache": False, **keywords})

    @torch.no_grad()
    def quantize(self, number: int) -> Quantized:
        """Quantise the next layer, and let the samples go through it as it is then.

        Raises:
            UsageError: a weight, or what samples make on their way to it, is infinite or no number.
        """
        layer = self._filled(number)
        moments, hooks = self._watch(layer, _prefix(number))
        self._forward(layer)
        for hook in hooks:
            hook.remove()
        found = {name: self._quantized(layer, number, name, seen) for name, seen in moments.items()}
        self._go_through(layer, number, found)
        return found

    def _quantized(
        self, layer: torch.nn.Module, number: int, name: str, moments: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Values, and scales in the dtype in which the checkpoint has the weight."""
        weight, size = self._weight(layer, _prefix(number), name), self._fmt.group_size
        try:
            values, scales = quantize(weight, moments, size, dampening=self._dampening)
        except SingularInputsError as error:
            raise UsageError(f"{name}: {error}; raise --dampening-frac or give more samples.") from error
        if not bool(scales.isfinite().all()):
            raise UsageError(
                f"{name} has a weight that is infinite or no number, or is given such inputs, and so cannot be "
                "quantised."
            )
        return values.cpu(), scales.to(self._infos[name].dtype).cpu()

    def _go_through(self, layer: torch.nn.Module, number: int, quantized: Quantized) -> None:
        """Let the samples go through a layer with these weights, and give its memory back."""
        for name, (values, scales) in quantized.items():
            weight = self._weight(layer, _prefix(number), name)
            weight.copy_(dequantize_groups(values, scales, self._fmt.group_size).to(weight))
        self._hidden = self._forward(layer)
        layer.to_empty(device="meta")

    def _forward(self, layer: torch.nn.Module) -> list[torch.Tensor]:
        outputs = [layer(hidden, **more) for hidden, more in zip(self._hidden, self._keywords, strict=True)]
        return [output[0] if isinstance(output, tuple) else output for output in outputs]

    def _check(self, source: str) -> None:
        """Compare the layers with the headers of the checkpoint: values are read hours later."""
        for number, layer in enumerate(self._layers):
            for name, tensor in layer.state_dict().items():
                for part, place in self._parts(_prefix(number) + name, tensor):
                    if part not in self._infos:
                        raise UsageError(f"{source} has no tensor {part}, which transformers' model of it has.")
                    if self._infos[part].shape != tuple(place.shape):
                        raise UsageError(
                            f"{source}: {part} has the shape {list(self._infos[part].shape)}, and "
                            f"{list(place.shape)} in the model that config.json describes."
                        )

    def _filled(self, number: int) -> torch.nn.Module:
        """A layer with the checkpoint's values."""
        layer = self._layers[number].to_empty(device=self._device).eval()
        for name, tensor in layer.state_dict().items():
            for part, place in self._parts(_prefix(number) + name, tensor):
                place.copy_(self._read(part))
        return layer

    def _parts(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of the checkpoint that make up one of transformers' model, and where in it they are."""
        if name in self._infos or not is_fused(name):
            yield name, tensor
            return
        for single in single_names(name, tensor.shape[0]):
            place = place_of(single)
            assert place is not None
            yield single, tensor[place.expert].chunk(place.parts)[place.part]

    def _weight(self, layer: torch.nn.Module, prefix: str, name: str) -> torch.Tensor:
        """A view of the values of one HF tensor in the layer."""
        inner = name.removeprefix(prefix)
        state = layer.state_dict()
        if inner in state:
            return state[inner]
        experts, expert, part = inner.removesuffix(".weight").rsplit(".", 2)
        if part == "down_proj":
            return state[f"{experts}.down_proj"][int(expert)]
        return state[f"{experts}.gate_up_proj"][int(expert)].chunk(2)[part == "up_proj"]

    def _watch(self, layer: torch.nn.Module, prefix: str) -> tuple[dict[str, torch.Tensor], list[Any]]:
        """Sums of x x^T, by HF name, of every matrix that is to be quantised; and the hooks that add to them."""
        moments: dict[str, torch.Tensor] = {}
        hooks: list[Any] = []

        def of_linear(name: str) -> Callable[..., None]:
            def see(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
                _add(moments, name, inputs[0].flatten(0, -2))

            return see

        def of_experts(base: str) -> Callable[..., None]:
            def see(module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
                hidden, chosen = inputs[0].flatten(0, -2), inputs[1]
                for expert in range(module.gate_up_proj.shape[0]):
                    seen = hidden[(chosen == expert).any(-1)]
                    gate, up = torch.nn.functional.linear(seen, module.gate_up_proj[expert]).chunk(2, -1)
                    both = f"{base}.{expert}.gate_proj.weight", f"{base}.{expert}.up_proj.weight"
                    _add(moments, both[0], seen)
                    moments[both[1]] = moments[both[0]]  # of a model with many experts these are most of the memory
                    _add(moments, f"{base}.{expert}.down_proj.weight", module.act_fn(gate) * up)

            return see

        for name, module in layer.named_modules():
            weight = f"{prefix}{name}.weight"
            if isinstance(module, torch.nn.Linear) and self._fmt.quantizes(weight):
                hooks.append(module.register_forward_pre_hook(of_linear(weight)))
            is_experts = isinstance(getattr(module, "gate_up_proj", None), torch.nn.Parameter)
            if is_experts and self._fmt.quantizes(f"{prefix}{name}.0.down_proj.weight"):
                hooks.append(module.register_forward_pre_hook(of_experts(f"{prefix}{name}")))
        return moments, hooks


def _add(moments: dict[str, torch.Tensor], name: str, inputs: torch.Tensor) -> None:
    """Add the second moments of inputs [T, K]."""
    found = inputs.float().T @ inputs.float()
    moments[name] = moments[name] + found if name in moments else found


def _prefix(number: int) -> str:
    """What the names of a layer's tensors begin with."""
    return f"model.layers.{number}."
