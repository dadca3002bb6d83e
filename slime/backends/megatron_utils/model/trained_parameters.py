"""Which parameters are trained: --only-train-params-name-list and --freeze-params-name-list.

A frozen parameter takes no gradient, so Megatron gives it neither a place in the gradient buffers nor optimizer state;
it stays in checkpoints and is sent to the engines like any other. It must be frozen before the model is wrapped for
data parallelism. It knows no names: they are those of Megatron's modules in the whole model, whatever the layout.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence

import torch
import torch.distributed as dist

from slime.backends.megatron_utils.model_provider import unwrap
from slime.backends.megatron_utils.model_weights import iter_weights, named_tensors
from slime.utils.errors import UsageError
from slime.utils.names import nearest


def freeze_parameters(
    models: Sequence[torch.nn.Module], *, only: Sequence[str] | None = None, frozen: Sequence[str] | None = None
) -> None:
    """Let only some parameters take gradients; every rank calls it.

    Args:
        models: this rank's chunks, in Megatron's 16-bit wrapper or bare.
        only: regular expressions (re.search on names) of the parameters that stay trainable, or
        frozen: of those that do not.

    Raises:
        UsageError: an expression matches no parameter of any rank, or none is left to train.
    """
    option = "--only-train-params-name-list" if only else "--freeze-params-name-list"
    patterns = only or frozen
    if not patterns:
        return
    named = list(_named_parameters(models))
    names = _names_of_all_ranks([name for name, _ in named])
    _check(option, patterns, names, trains_matches=bool(only))
    for name, parameter in named:
        parameter.requires_grad_(_matches(patterns, name) == bool(only))


def _named_parameters(models: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for model in models:
        for (_, live), weight in zip(named_tensors(unwrap(model)), iter_weights(model), strict=True):
            if isinstance(live, torch.nn.Parameter):  # a buffer takes no gradient anyway
                yield weight.name, live


def _names_of_all_ranks(names: list[str]) -> list[str]:
    if not dist.is_initialized():
        return names
    everywhere: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, names)
    return sorted({name for rank in everywhere for name in rank})


def _check(option: str, patterns: Sequence[str], names: Collection[str], *, trains_matches: bool) -> None:
    problems = [
        f"{option} {pattern!r} matches no parameter: {_hint(pattern, names)}"
        for pattern in patterns
        if not any(re.search(pattern, name) for name in names)
    ]
    if not problems and not any(_matches(patterns, name) == trains_matches for name in names):
        problems.append(f"{option} {' '.join(patterns)} freezes every parameter: nothing is left to train.")
    if problems:
        raise UsageError(problems)


def _matches(patterns: Sequence[str], name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


def _hint(pattern: str, names: Collection[str]) -> str:
    r"""The nearest parts of names; numbers are \d+, so that what is shown can be used."""
    general = sorted({re.sub(r"(?<=\.)\d+(?=\.)", r"\\d+", name) for name in names})
    parts = [name.split(".") for name in general]
    pieces = {".".join(p[i:j]) for p in parts for i in range(len(p)) for j in range(i + 1, len(p) + 1)}
    if near := nearest(pattern, pieces, likeness=0.6):
        return f"did you mean {' or '.join(near)}?"
    return f"there are {', '.join(general)}."
