"""Run samples through a transformers model one layer after the other, each quantised before the next one sees its
output.

Memory holds one layer, the hidden states of the samples and the second moments of the inputs of one layer's matrices.
Of each matrix that is to be quantised, the inputs are seen: those of a linear layer, and those of an expert, which
transformers keeps with its like in one tensor. It writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from slime.utils import gptq
from slime.utils.errors import UsageError
from slime.utils.int4 import dequantize_groups
from slime.utils.int4_format import Int4Format

if TYPE_CHECKING:
    from pathlib import Path

Quantized = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""HF name of a weight -> values int8 [N, K], scales [N, K / group]."""


class CalibratedLayers:
    """The decoder layers of one checkpoint, to be quantised in order.

    Args:
        model_dir: HF directory.
        read: reads a tensor of it by name (experts one by one).
        names: of all its tensors.
        fmt: which weights are quantised, and how.
        samples: token ids, [T] each.
        dampening: see `gptq.quantize`.
        device: where layers run.
        trust_remote_code: whether the checkpoint's own code may be run.

    Raises:
        UsageError: transformers has no class of this model, or samples hold tokens that it does not have.
    """

    def __init__(
        self,
        model_dir: Path,
        read: Callable[[str], torch.Tensor],
        names: Sequence[str],
        fmt: Int4Format,
        *,
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
                f"--model-dir {model_dir}: transformers cannot build this model ({said}); use "
                "tools/convert_hf_to_int4_direct.py, which needs no model."
            ) from error
        self._read, self._names, self._fmt = read, set(names), fmt
        self._dampening, self._device = dampening, device
        self._layers = model.model.layers
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
        """Quantise a layer, and let the samples go through it as it is then; layers are taken in order."""
        layer = self._layers[number].to_empty(device=self._device).eval()
        prefix = f"model.layers.{number}."
        self._fill(layer, prefix)
        moments, hooks = self._watch(layer, prefix)
        self._forward(layer)
        for hook in hooks:
            hook.remove()
        found: Quantized = {}
        for name, seen in moments.items():
            try:
                values, scales = gptq.quantize(
                    self._weight(layer, prefix, name), seen, self._fmt.group_size, dampening=self._dampening
                )
            except gptq.SingularInputsError as error:
                raise UsageError(f"{name}: {error}; raise --dampening-frac or give more samples.") from error
            found[name] = (values.cpu(), scales.cpu())
        for name, (values, scales) in found.items():
            weight = self._weight(layer, prefix, name)
            weight.copy_(dequantize_groups(values, scales, self._fmt.group_size).to(weight))
        self._hidden = self._forward(layer)
        layer.to_empty(device="meta")
        return found

    def _forward(self, layer: torch.nn.Module) -> list[torch.Tensor]:
        outputs = [layer(hidden, **more) for hidden, more in zip(self._hidden, self._keywords, strict=True)]
        return [output[0] if isinstance(output, tuple) else output for output in outputs]

    def _fill(self, layer: torch.nn.Module, prefix: str) -> None:
        """Give a layer the checkpoint's values."""
        for name, tensor in layer.state_dict().items():
            if prefix + name in self._names:
                tensor.copy_(self._read(prefix + name))
            elif name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                for expert, one in enumerate(tensor):
                    parts = [self._read(part) for part in _expert_parts(prefix + name, expert)]
                    one.copy_(torch.cat(parts))
            else:
                raise UsageError(f"the checkpoint has no {prefix}{name}, which transformers' model of it has.")

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
                    for part in ("gate_proj", "up_proj"):
                        _add(moments, f"{base}.{expert}.{part}.weight", seen)
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


def _expert_parts(fused: str, expert: int) -> list[str]:
    """The HF tensors of one expert in a tensor of transformers' model that holds all of them."""
    experts, part = fused.rsplit(".", 1)
    parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
    return [f"{experts}.{expert}.{one}.weight" for one in parts]
