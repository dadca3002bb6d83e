"""Tensors that SGLang loads only where one call gives it both: alone, it forgets them without a word.

Its latent attention (DeepSeek, Kimi, GLM lite) joins the two down projections into one weight, and dequantises an
indexer's fp8 keys as soon as it has their scales. A call of `load_weights` keeps what waits for its partner, and drops
it at its end. So a bucket has both, and an engine that loads what a delta changed loads the other one, too. It knows
names, no files and no weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

_APART = ((".q_a_proj.", ".kv_a_proj_with_mqa."),)
"""The first comes first in a model, with other weights between the two."""
_WITH_SCALE = ((".indexer.wk.weight", ".indexer.wk.weight_scale_inv"),)
"""Quantising makes the one of the other, so that they are never apart until one of the two changes alone."""

T = TypeVar("T")


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
