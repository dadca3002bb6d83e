"""Models that see images (Qwen2.5-VL, Qwen3-VL, Qwen3.5): transformers' tower before Megatron's language model.

1. The first pipeline stage has the whole tower, under the names of transformers, and so does each of its tensor- and
   context-parallel ranks. Each computes all images of a micro-batch, and puts those of its own rows there.
2. With sequence or context parallelism a rank's gradient of the tower is that of its rows: Megatron adds them up.
3. Inner layers of the tower may feed the first decoder layers (deepstack): they are added to what these return.
4. Positions are of three kinds; every stage makes the angles of its tokens from them.
5. A micro-batch without images runs the tower on a blank one, so that all its gradients are always there.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from slime.backends.megatron_utils.model.spec import assemble_block
from slime.config.args import Args
from slime.utils.errors import UsageError
from slime.utils.train_data import MicroBatch
from slime_plugins.models.hf_attention import as_from_pretrained
from slime_plugins.models.qwen3_next import get_qwen3_next_spec


def get_qwen3_5_vl_model_provider(
    args: Args, config: TransformerConfig, vp_stage: int | None = None
) -> TransformerBlockSubmodules | Any:
    """Return the layers behind the tower (--spec), which comes by itself with --multimodal-keys."""
    if args.experimental_attention_variant == "gated_delta_net":
        return get_qwen3_next_spec(args, config, vp_stage)
    return assemble_block(args, config, vp_stage)


def build_tower(checkpoint: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """Return (config of an HF directory, its tower with random weights)."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    whole = AutoConfig.from_pretrained(checkpoint)  # nosec B615: a local directory
    with torch.device("meta"):
        kind = type(AutoModelForImageTextToText.from_config(whole).base_model.visual)
    with as_from_pretrained(dtype, seed=0):
        tower = kind._from_config(whole.vision_config, attn_implementation="sdpa", dtype=dtype)
    for module in tower.modules():
        for name in list(module._non_persistent_buffers_set):  # Megatron's 16-bit wrapper would round frequencies
            frequencies = module._buffers.pop(name)
            module._non_persistent_buffers_set.discard(name)
            setattr(module, name, frequencies)
    return whole, tower


def mrope_axes(rope: dict[str, Any], device: torch.device) -> torch.Tensor:
    """Return which position (0 time, 1 height, 2 width) each frequency turns by, [rotary dim / 2].

    Args:
        rope: `mrope_section`, the frequencies of each; `mrope_interleaved`: they alternate, and time has the rest.
        device: of the result.
    """
    sections = rope["mrope_section"]
    axes = torch.repeat_interleave(torch.arange(3), torch.tensor(sections))
    if rope.get("mrope_interleaved"):
        axes = torch.zeros_like(axes)
        for axis in (1, 2):
            axes[axis : sections[axis] * 3 : 3] = axis
    return axes.to(device)


class SeeingGPT(GPTModel):
    """A GPTModel that takes images from `see` and M-RoPE positions [4, 1, T] (row 0: those of texts).

    Args:
        checkpoint: HF directory whose config describes the tower.
        is_frozen: the tower gets no gradients.
        further: of GPTModel.
    """

    def __init__(self, *args: Any, checkpoint: str, is_frozen: bool, **further: Any) -> None:
        super().__init__(*args, **further)
        self.batch: MicroBatch | None = None
        self._deepstack: list[torch.Tensor] = []
        config, tower = build_tower(checkpoint, self.config.params_dtype)
        text = config.get_text_config()
        self._rope = getattr(text, "rope_parameters", None) or text.rope_scaling
        self._vision = config.vision_config
        if not self.pre_process:
            return
        self.visual = tower.requires_grad_(not is_frozen)
        in_parts = self.config.sequence_parallel
        for param in tower.parameters():
            param.sequence_parallel = in_parts
            param.average_gradients_across_tp_domain = not in_parts
        depth = len(getattr(self._vision, "deepstack_visual_indexes", ()))
        if depth > len(self.decoder.layers):
            raise UsageError(
                f"--pipeline-model-parallel-size: images feed the first {depth} layers of this model, and the first "
                f"stage has {len(self.decoder.layers)}; give it more."
            )
        for number in range(depth):
            self.decoder.layers[number].register_forward_hook(functools.partial(self._add, number))

    def see(self, batch: MicroBatch) -> None:
        """Take the images of the micro-batch that comes next."""
        self.batch = batch

    def _preprocess(self, input_ids: Any, position_ids: Any, decoder_input: Any = None, **further: Any) -> Any:
        self._deepstack = []
        of_text = position_ids[0] if position_ids.ndim == 3 else position_ids
        if self.pre_process:
            decoder_input = self._embedded(input_ids, of_text)
        found = super()._preprocess(input_ids, of_text, decoder_input, **further)
        if position_ids.ndim != 3:
            return found
        rotary: Any = self.rotary_pos_emb
        axes = mrope_axes(self._rope, position_ids.device)
        angles = position_ids[1:][axes, 0].T.float() * rotary.inv_freq.to(position_ids.device)
        return (found[0], torch.cat((angles, angles), dim=-1)[:, None], *found[2:])

    def _embedded(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """This rank's rows [T, 1, H], images in their places."""
        embedded = self.embedding(input_ids=input_ids, position_ids=position_ids)
        batch = self.batch or {}
        images = batch.get("multimodal_train_inputs") or {}
        trains = next(self.visual.parameters()).requires_grad
        if not images and not trains:
            return embedded
        features = self._features(images, embedded)
        if not images:
            nothing = torch.stack([feature.sum() for feature in features]).sum() * 0.0
            return embedded + nothing.to(embedded.dtype)
        self._rows, kept = self._own(batch["image_rows"], len(embedded))
        of_tokens, *self._deepstack = [x[batch["image_tokens"][kept]].to(embedded.dtype) for x in features]
        return embedded.index_put((self._rows, torch.zeros_like(self._rows)), of_tokens)

    def _features(self, images: dict[str, torch.Tensor], like: torch.Tensor) -> list[torch.Tensor]:
        """What the tower makes of all images, [tokens of images, H], for the embedding and for each decoder layer."""
        side = self._vision.spatial_merge_size
        size = self._vision.in_channels * self._vision.temporal_patch_size * self._vision.patch_size**2
        pixels = images.get("pixel_values", like.new_zeros(side * side, size))
        grids = images.get("image_grid_thw", torch.tensor([[1, side, side]], device=like.device))
        weight = next(self.visual.parameters())
        with torch.set_grad_enabled(torch.is_grad_enabled() and weight.requires_grad):
            found = self.visual(pixels.to(weight.dtype), grid_thw=grids)
        return [found.pooler_output, *(getattr(found, "deepstack_features", None) or ())]

    def _own(self, rows: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return those of a pack's rows that this sequence-parallel rank has, from its first; and which they are."""
        first = self.pg_collection.tp.rank() * num_rows if self.config.sequence_parallel else 0
        kept = (rows >= first) & (rows < first + num_rows)
        return rows[kept] - first, kept

    def _add(self, number: int, _: Any, __: Any, output: Any) -> Any:
        if number >= len(self._deepstack):
            return None
        hidden, *rest = output
        places = (self._rows, torch.zeros_like(self._rows))
        return (hidden.index_put(places, self._deepstack[number], accumulate=True), *rest)
