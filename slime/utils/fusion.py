"""Small tensor functions as one kernel on CUDA: torch.compile there, the function as it is written elsewhere.

Elementwise work between matrix products is bound by memory, and eager torch reads and writes it once per operation.
What is decorated here must therefore be plain torch without side effects on Python objects, so that both ways mean
the same; the tests of a function run it uncompiled. Where nothing can be compiled (no C compiler, no triton), or with
TORCHDYNAMO_DISABLE=1, the function runs as it is, and a warning says so once. It knows nothing about what is computed.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")
_unavailable: list[str] = []
VARIANTS = 64
"""Compilations of one function. Beyond torch's own limit of 8, which two models of different shapes reach with their
norms, it runs what is new unfused, and says so in its own words alone."""


def compiled(function: Callable[P, R], **options: Any) -> Callable[P, R]:
    """torch.compile(function, **options) for up to `VARIANTS` kinds of arguments."""
    run = torch.compile(function, **options)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch._dynamo.config.recompile_limit < VARIANTS:  # from torch 2.13 on each thread has a value of its own
            torch._dynamo.config.recompile_limit = VARIANTS
        return run(*args, **kwargs)

    return call


def fused_on_cuda(function: Callable[P, R]) -> Callable[P, R]:
    """A decorator: `function` compiled when its first argument lies on CUDA.

    Dimension 0 of every tensor argument may change from call to call without a new compilation; any other size is
    compiled for, as are the values of numbers.
    """
    compiled_once = functools.cache(lambda: compiled(function))

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        first = args[0]
        # device.type, not is_cuda: the CPU stand-ins for CUDA answer the second
        if _unavailable or not (isinstance(first, torch.Tensor) and first.device.type == "cuda"):
            return function(*args, **kwargs)
        for value in args:
            if isinstance(value, torch.Tensor) and value.dim():
                torch._dynamo.maybe_mark_dynamic(value, 0)
        try:
            return compiled_once()(*args, **kwargs)
        except (torch._dynamo.exc.TorchDynamoException, torch._inductor.exc.InductorError) as error:
            reason = str(error).strip().splitlines()
            _unavailable.append(reason[0] if reason else type(error).__name__)
            logger.warning("torch.compile does not work here, so small kernels are not fused: %s", _unavailable[0])
            return function(*args, **kwargs)

    return call
