"""Which parameters are trained: --only-train-params-name-list and --freeze-params-name-list.

A frozen parameter takes no gradient, so Megatron gives it neither a place in the gradient buffers nor optimizer state;
it stays in checkpoints and is sent to the engines like any other. It must be frozen before the model is wrapped for
data parallelism. Names are those of Megatron's modules in the whole model, whatever the layout: the copy of a tied
embedding that the last pipeline stage has as its output layer is called as the embedding, so that both are trained or
neither is. (Megatron sums their gradients in a collective that only stages with a trained copy enter.)
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist

from slime.backends.megatron_utils.model.model_weights import EMBEDDING, is_tied_copy, iter_weights, named_tensors
from slime.backends.megatron_utils.model_provider import unwrap
from slime.utils.errors import UsageError
from slime.utils.names import nearest

logger = logging.getLogger(__name__)

NOTHING = "(?!)"
"""A regular expression that matches no name."""


def freeze_parameters(
    models: Sequence[torch.nn.Module],
    *,
    only: Sequence[str] | None = None,
    frozen: Sequence[str] | None = None,
    always_trained: str = NOTHING,
) -> None:
    """Let only some parameters take gradients; every rank calls it.

    Args:
        models: this rank's chunks, in Megatron's 16-bit wrapper or bare.
        only: regular expressions (re.search on names) of the parameters that stay trainable if they are, or
        frozen: of those that do not.
        always_trained: regular expression of parameters that stay trainable whatever the lists say.

    Raises:
        UsageError: an expression matches no parameter of any rank, or none is left to train.
    """
    option = "--only-train-params-name-list" if only else "--freeze-params-name-list"
    patterns = only or frozen
    if not patterns:
        return
    named = list(_named_parameters(models))
    can_be_trained = _of_all_ranks([(name, parameter.requires_grad) for name, parameter in named])
    trained = {
        name
        for name, can_be in can_be_trained.items()
        if can_be and (_matches(patterns, name) == bool(only) or re.search(always_trained, name))
    }
    _check(option, patterns, can_be_trained, any_is_trained=bool(trained))
    kept = [pattern for pattern in frozen or () if _matches_only(pattern, always_trained, can_be_trained)]
    if kept and (not dist.is_initialized() or dist.get_rank() == 0):
        logger.warning(
            "%s %s freezes nothing: what it matches is always trained; leave it out", option, " ".join(kept)
        )
    for name, parameter in named:
        parameter.requires_grad_(name in trained)


def _named_parameters(models: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for model in models:
        for (_, live), weight in zip(named_tensors(unwrap(model)), iter_weights(model), strict=True):
            if isinstance(live, torch.nn.Parameter):  # a buffer takes no gradient anyway
                yield EMBEDDING if is_tied_copy(model, weight) else weight.name, live


def _of_all_ranks(named: list[tuple[str, bool]]) -> dict[str, bool]:
    """Name -> whether the parameter takes a gradient: indexers, and prediction layers that never run, do not."""
    if not dist.is_initialized():
        return dict(named)
    everywhere: list[list[tuple[str, bool]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, named)
    return dict(sorted(pair for rank in everywhere for pair in rank))


def _check(option: str, patterns: Sequence[str], names: Collection[str], *, any_is_trained: bool) -> None:
    problems = [
        f"{option} {pattern!r} matches no parameter: {_hint(pattern, names)}"
        for pattern in patterns
        if not any(re.search(pattern, name) for name in names)
    ]
    if not problems and not any_is_trained:
        problems.append(f"{option} {' '.join(patterns)} freezes every parameter: nothing is left to train.")
    if problems:
        raise UsageError(problems)


def _matches(patterns: Sequence[str], name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)


def _matches_only(pattern: str, other: str, names: Iterable[str]) -> bool:
    return all(re.search(other, name) for name in names if re.search(pattern, name))


def _hint(pattern: str, names: Collection[str]) -> str:
    r"""The nearest parts of names; numbers are \d+, so that what is shown can be used."""
    general = sorted({re.sub(r"(?<=\.)\d+(?=\.)", r"\\d+", name) for name in names})
    parts = [name.split(".") for name in general]
    pieces = {".".join(p[i:j]) for p in parts for i in range(len(p)) for j in range(i + 1, len(p) + 1)}
    if near := nearest(pattern, pieces, likeness=0.6):
        return f"did you mean {' or '.join(near)}?"
    return f"there are {', '.join(general)}."
