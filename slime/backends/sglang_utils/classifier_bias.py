"""A classification head without a bias in its checkpoint has none in SGLang either.

SGLang 0.5.17 gives the `score` layer of Qwen2 and Qwen3 classifiers a bias. Transformers' checkpoints have none, so it
kept its random initial value: scores were off by a constant that differed from engine to engine with their seeds
(seen: -0.03 and +0.06). Installed in the server process, for models that answer /classify.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

BIAS = "score.bias"


def install() -> None:
    """Have SGLang's default loader set the bias to zero where the checkpoint has none. Imports SGLang."""
    from sglang.srt.model_loader.loader import DefaultModelLoader

    load = DefaultModelLoader.load_weights_and_postprocess

    def load_and_clear(model: Any, weights: Iterable[tuple[str, Any]], *others: Any, **keywords: Any) -> Any:
        names: set[str] = set()
        loaded = load(model, _noted(weights, names), *others, **keywords)
        bias = dict(model.named_parameters()).get(BIAS)
        if bias is not None and BIAS not in names:
            bias.data.zero_()
        return loaded

    DefaultModelLoader.load_weights_and_postprocess = staticmethod(load_and_clear)


def _noted(weights: Iterable[tuple[str, Any]], names: set[str]) -> Iterator[tuple[str, Any]]:
    for name, tensor in weights:
        names.add(name)
        yield name, tensor
