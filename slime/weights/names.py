"""Names of a checkpoint's tensors, and the files they are in: which ones a sync has to send, which belong together.

1. `expected_hf_names` reads from a checkpoint's headers which tensors it has: the yardstick of a complete weight sync.
2. Checkpoints may hold the experts of a layer as one tensor. transformers >= 5 keeps experts so in memory, and writes
   them so with save_original_format=False: "...mlp.experts.gate_up_proj" [E, 2 F, H] and "...mlp.experts.down_proj"
   [E, H, F] in place of "...mlp.experts.<e>.{gate,up}_proj.weight" [F, H] and "...mlp.experts.<e>.down_proj.weight"
   [H, F].
3. SGLang loads some tensors only where one call gives it both of a pair; alone, it forgets them without a word. Its
   latent attention (DeepSeek, Kimi, GLM lite) joins the two down projections into one weight, and dequantises an
   indexer's fp8 keys as soon as it has their scales. A call of `load_weights` keeps what waits for its partner, and
   drops it at its end. So a bucket has both, and an engine that loads what a delta changed loads the other one, too.
4. Checkpoints that also see images (Qwen3.5) keep the language model's numbers in `text_config`, and have tensors that
   are not the language model's.

No weights are read here. `files_of`, `read_header` and their like say by the headers of the files which tensors are
where, and whether all of it is there. Importing it needs no torch.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


@dataclass(frozen=True)
class Header:
    """The front of a safetensors file.

    Attributes:
        tensors: name -> {"dtype", "shape", "data_offsets"}, in bytes behind `data_start`.
        metadata: the file's own strings.
        data_start: bytes before the first tensor.
    """

    tensors: dict[str, dict[str, Any]]
    metadata: dict[str, str]
    data_start: int

    @property
    def file_bytes(self) -> int:
        """Size of the whole file."""
        return self.data_start + max((entry["data_offsets"][1] for entry in self.tensors.values()), default=0)


def read_header(file: Path) -> Header:
    """Read the JSON at the front of a safetensors file: 8 bytes of its length, then itself.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no safetensors file.
    """
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > file.stat().st_size - 8:  # before so much memory is asked for
            raise ValueError(f"{file} ends inside its header")
        text = stream.read(length)
    tensors = json.loads(text)
    return Header(tensors, tensors.pop("__metadata__", {}), 8 + length)


def read_index(directory: Path) -> dict[str, Any]:
    """The index: {"metadata": {...}, "weight_map": {name of a tensor: name of its file}}.

    Raises:
        OSError: there is none that could be read.
        ValueError: it is not what it should be.
    """
    index = json.loads((directory / INDEX_FILE).read_text())
    if not isinstance(index, dict) or not isinstance(index.get("weight_map"), dict):
        raise ValueError(f"{directory / INDEX_FILE} has no weight_map")
    check_names(directory / INDEX_FILE, index["weight_map"].values())
    return index


def check_names(told_by: Path, names: Iterable[Any]) -> None:
    """Refuse names of files that lie outside the directory of the file that names them.

    Raises:
        ValueError: one is absolute, leads upwards, or is no text.
    """
    for name in set(names):
        if not isinstance(name, str) or not name or Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"{told_by} names the file {name!r}, which is not in its directory: do not trust it")


def files_of(directory: Path) -> Iterator[Path]:
    """The files that the index of a directory names, in order."""
    for name in sorted(set(read_index(directory)["weight_map"].values())):
        yield directory / name


# Buffers that old checkpoints carry and no engine loads.
NOT_WEIGHTS = ("rotary_emb.inv_freq", ".masked_bias", ".attn.bias")
_FUSED = re.compile(r"(?P<experts>.*\.mlp\.experts)\.(?P<what>gate_up|down)_proj")
_SINGLE = re.compile(r"(?P<experts>.*\.mlp\.experts)\.(?P<expert>\d+)\.(?P<what>gate|up|down)_proj\.weight")
_PARTS = {"gate_up": ("gate", "up"), "down": ("down",)}
_APART = ((".q_a_proj.", ".kv_a_proj_with_mqa."),)
"""The first comes first in a model, with other weights between the two."""
_WITH_SCALE = ((".indexer.wk.weight", ".indexer.wk.weight_scale_inv"),)
"""Quantising makes the one of the other, so that they are never apart until one of the two changes alone."""

T = TypeVar("T")


def expected_hf_names(checkpoint: Path, num_predictions: int = 0, *, with_tower: bool = False) -> set[str]:
    """Names of the trained tensors of an HF directory; empty when it has no safetensors (nothing to compare with).

    A tied `lm_head.weight` is left out: it is the embedding. So are layers that predict further tokens, behind the
    first `num_predictions`, and their copies of the embedding and the output layer, which engines do not load; and
    what is not of the language model, but for the part that sees images where the trainer has it (`with_tower`).
    Experts stored as one tensor are sent one by one.
    """
    names = _names(checkpoint)
    path = checkpoint / "config.json"
    config = text_config(json.loads(path.read_text())) if path.is_file() else {}
    if config.get("tie_word_embeddings", False):
        names.discard("lm_head.weight")
    last = config["num_hidden_layers"] + num_predictions if config.get("num_nextn_predict_layers") else math.inf
    return {
        name
        for name in names
        if not name.endswith(NOT_WEIGHTS)
        and not prediction_copy_of(name)
        and not (name.startswith(_ADDED) if with_tower else is_of_other_part(name))
        and _is_of_first_layers(name, last, num_predictions)
    }


def left_over(checkpoint: Path, known: Collection[str], used: Collection[str], num_predictions: int = 0) -> str | None:
    """A sentence about the trained tensors of an HF directory that no weight of a model is made of, if there are any.

    Args:
        checkpoint: the directory.
        known: tensors as a reader names them, which takes scales together with what they scale.
        used: what the model's weights are made of.
        num_predictions: as in `expected_hf_names`.
    """
    left = sorted((expected_hf_names(checkpoint, num_predictions) & set(known)) - set(used))
    if not left:
        return None
    first = ", ".join(left[:5])
    return f"{checkpoint}: {len(left)} tensor(s) have no place in the model that the flags describe: {first}."


def prediction_copy_of(name: str) -> str | None:
    """The tensor of the model that a tensor of a prediction layer is a copy of, if it is one."""
    if not (match := re.fullmatch(r"model\.layers\.\d+\.(embed_tokens|shared_head\.head)\.weight", name)):
        return None
    return "model.embed_tokens.weight" if match[1] == "embed_tokens" else "lm_head.weight"


def _is_of_first_layers(name: str, num_layers: float, num_predictions: int) -> bool:
    """Whether it is of no layer, or of the first so many; MiMo counts prediction layers by themselves."""
    match = re.match(r"model\.(mtp_)?layers\.(\d+)\.", name)
    return match is None or int(match[2]) < (num_predictions if match[1] else num_layers)


def _names(checkpoint: Path) -> set[str]:
    index = checkpoint / "model.safetensors.index.json"
    if index.is_file():
        file_of: dict[str, str] = read_index(checkpoint)["weight_map"]
    else:
        file_of = {name: file.name for file in checkpoint.glob("*.safetensors") for name in read_header(file).tensors}
    fused = [name for name in file_of if is_fused(name)]
    headers = {file: read_header(checkpoint / file).tensors for file in {file_of[name] for name in fused}}
    singles = {one for name in fused for one in single_names(name, headers[file_of[name]][name]["shape"][0])}
    return file_of.keys() - set(fused) | singles


class Place(NamedTuple):
    """Where a single expert's tensor is: fused[expert], cut into `parts` along its rows, the `part`-th of them."""

    fused: str
    expert: int
    part: int
    parts: int


def is_fused(name: str) -> bool:
    """Whether a tensor of that name holds all experts of a layer."""
    return _FUSED.fullmatch(name) is not None


def single_names(fused: str, num_experts: int) -> list[str]:
    """The names of the tensors that a fused one stands for, expert by expert."""
    match = _FUSED.fullmatch(fused)
    assert match is not None, fused
    parts = _PARTS[match["what"]]
    return [f"{match['experts']}.{expert}.{part}_proj.weight" for expert in range(num_experts) for part in parts]


def place_of(single: str) -> Place | None:
    """Where the tensor of that name is in a checkpoint with fused experts; None for what is no expert's."""
    match = _SINGLE.fullmatch(single)
    if match is None:
        return None
    what = next(what for what, parts in _PARTS.items() if match["what"] in parts)
    parts = _PARTS[what]
    return Place(f"{match['experts']}.{what}_proj", int(match["expert"]), parts.index(match["what"]), len(parts))


def partner_of(name: str) -> str | None:
    """The tensor without which this one is not loaded, if a checkpoint has it."""
    for one, other in _APART:
        for here, there in ((one, other), (other, one)):
            if here in name:
                return name.replace(here, there)
    for one, other in _WITH_SCALE:
        for here, there in ((one, other), (other, one)):
            if name.endswith(here):
                return name.removesuffix(here) + there
    return None


def with_partners(names: Iterable[str]) -> set[str]:
    """These names, and those of their partners, which a checkpoint need not have."""
    given = set(names)
    return given | {partner for name in given if (partner := partner_of(name)) is not None}


def kept_together(parts: Iterable[list[tuple[str, T]]]) -> Iterator[list[tuple[str, T]]]:
    """The same (name, weight) pairs, in parts that are not to be cut: what comes before its partner waits for it."""
    waiting: dict[str, list[tuple[str, T]]] = {}
    for part in parts:
        name = part[0][0]
        if any(first in name for first, _ in _APART) and (partner := partner_of(name)) is not None:
            waiting[partner] = part
        else:
            yield [*waiting.pop(name, []), *part]
    yield from waiting.values()


TOWER = ("model.visual.", "visual.")
"""Names of the part that sees images, and those of published Qwen2.5-VL."""
_ADDED = ("mtp.",)
OF_OTHER_PARTS = (*TOWER, *_ADDED)
"""Names of what stays as it is while the language model is trained: the part that sees images, and layers that predict
further tokens of families for which there are no rules."""


def read_config(checkpoint: str | Path) -> dict[str, Any]:
    """Return the config.json of an HF directory; empty where none can be read, which the command line refuses."""
    try:
        config = json.loads(Path(checkpoint, "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of the language model under the names of a plain config.json; the model_type stays."""
    inner = config.get("text_config")
    if not isinstance(inner, Mapping):
        return dict(config)
    return {**config, **inner, "model_type": config.get("model_type")}


def is_of_other_part(name: str) -> bool:
    """Whether a tensor of that name is none of the language model's."""
    return name.startswith(OF_OTHER_PARTS)
