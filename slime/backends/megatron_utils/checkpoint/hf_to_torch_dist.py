"""The weights of an HF checkpoint as those of a Megatron model, one at a time: for a conversion on disk.

The rule tables are those of megatron_to_hf. It writes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from slime.backends.megatron_utils.model_provider import build_stage
from slime.config.args import Args
from slime.models.families import family_of_args
from slime.models.layouts import TensorShape
from slime.utils.errors import UsageError
from slime.weights.names import left_over

if TYPE_CHECKING:
    from slime.backends.megatron_utils.checkpoint.torch_dist_writer import Parameter
    from slime.conversion.reader import SafetensorsReader

EMBEDDING = "embedding.word_embeddings.weight"


def model_without_memory(args: Args) -> Any:
    """The whole model of the flags, with parameters that have shapes and no values."""
    args.perform_initialization = False
    with torch.device("meta"):
        return build_stage(args)


class HfWeights:
    """Weights by the name that they have in Megatron's whole model.

    Args:
        args: derived flags; the family comes from --model-name or --hf-checkpoint.
        reader: of the HF checkpoint.
        dtypes: HF name -> dtype to train in.
    """

    def __init__(self, args: Args, reader: SafetensorsReader, dtypes: Mapping[str, torch.dtype]) -> None:
        self._args, self._reader, self._dtypes = args, reader, dtypes
        self._family, self._infos = family_of_args(args), reader.infos()

    def hf_names(self, name: str) -> tuple[str, ...]:
        """The HF tensors that make up a weight."""
        return self._family.find(name, self._args.num_layers)[1]

    def dtype_of(self, name: str) -> torch.dtype:
        """The narrowest dtype that holds its HF tensors exactly; one that is missing does not count here."""
        found = [self._dtypes[hf_name] for hf_name in self.hf_names(name) if hf_name in self._dtypes]
        return reduce(torch.promote_types, found) if found else torch.float32

    def rows_of(self, name: str) -> int | None:
        """Rows of the one HF tensor of a weight; None where the checkpoint has none."""
        (hf_name,) = self.hf_names(name)
        return self._infos[hf_name].shape[0] if hf_name in self._infos else None

    def check(self, parameters: Sequence[Parameter]) -> None:
        """Compare names and shapes, by the headers alone, before anything is written.

        Raises:
            UsageError: everything that is missing, of another shape, or left over.
        """
        problems: list[str] = []
        used: set[str] = set()
        for one in parameters:
            names = self.hf_names(one.name)
            used.update(names)
            if missing := [name for name in names if name not in self._infos]:
                problems.append(f"{self._root} has no tensor {', '.join(missing)}, of which {one.name} is made.")
                continue
            given = [self._infos[name].shape for name in names]
            if (shape := self._shape_in_megatron(one.name, given)) != one.shape:
                problems.append(
                    f"{self._root}: {', '.join(names)} of shape {', '.join(str(list(one)) for one in given)} make a "
                    f"{one.name} of shape {shape and list(shape)}, the flags describe {list(one.shape)}."
                )
        if left := left_over(Path(self._root), self._infos, used, self._args.mtp_num_layers or 0):
            problems.append(left)
        if problems:
            more = [f"... and {len(problems) - 5} more of the kind."] if len(problems) > 5 else []
            raise UsageError(problems[:5] + more)

    def value_of(self, one: Parameter) -> torch.Tensor:
        """The full weight, in its dtype.

        Raises:
            UsageError: its HF tensors cannot be read.
        """
        rule, names = self._family.find(one.name, self._args.num_layers)
        tensors = [self._reader.get(name).to(one.dtype) for name in names]
        return rule.layout.to_megatron(tensors, TensorShape.of(self._args))

    @property
    def _root(self) -> str:
        return str(self._args.hf_checkpoint)

    def _shape_in_megatron(self, name: str, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
        """What a weight of tensors with these shapes is like; None where they do not go together."""
        layout = self._family.find(name, self._args.num_layers)[0].layout
        try:
            return tuple(
                layout.to_megatron(
                    [torch.empty(one, device="meta") for one in shapes], TensorShape.of(self._args)
                ).shape
            )
        except (RuntimeError, ValueError):
            return None


def check_vocabulary(args: Args, weights: HfWeights) -> None:
    """Compare the vocabulary of the flags with the rows of the embedding.

    Raises:
        UsageError: they differ; says which --vocab-size fits.
    """
    rows = weights.rows_of(EMBEDDING)
    if rows is not None and rows != args.vocab_size:
        raise UsageError(
            f"--vocab-size {args.vocab_size}, but the embedding of {args.hf_checkpoint} has {rows} rows; give "
            f"--vocab-size {rows} (what --make-vocab-size-divisible-by adds comes on top)."
        )
