"""Small tensor functions as one kernel on CUDA, the function as it is written elsewhere.

Elementwise work between matrix products is bound by memory, and eager torch reads and writes it once per operation.
What is decorated here must therefore be plain torch without side effects on Python objects, so that both ways mean the
same; the tests of a function run it uncompiled. `fused_on_cuda` leaves the kernel to torch.compile, each call of which
takes the host some 0.1 to 0.3 ms beside the device's work; what every layer calls has a kernel by hand instead
(`kernel_on_cuda`). Where nothing can be compiled (no C compiler, no triton), or with TORCHDYNAMO_DISABLE=1, the
function runs as it is, and a warning says so once.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import torch

from slime.utils.misc import load_function

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")
_unavailable: list[str] = []
VARIANTS = 64
"""Compilations of one function. Beyond torch's own limit of 8, which two models of different shapes can reach, it runs
what is new unfused, and says so in its own words alone."""


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
            _unavailable.append(_not_fused("torch.compile", error))
            logger.warning("%s", _unavailable[-1])
            return function(*args, **kwargs)

    return call


def kernel_on_cuda(path: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: the function at `path` (`module.function`), which may import triton, where the first argument lies
    on CUDA and triton works, the decorated one elsewhere."""
    kernel = functools.cache(lambda: load_function(path))

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            first = args[0]
            is_on_cuda = isinstance(first, torch.Tensor) and first.device.type == "cuda"
            if not is_on_cuda or not triton_works():
                return function(*args, **kwargs)
            return cast(R, kernel()(*args, **kwargs))

        return call

    return decorate


@functools.cache
def triton_works() -> bool:
    """Whether triton is there, is wanted, and can compile what it starts kernels with."""
    if torch._dynamo.config.disable:
        return False
    try:
        from triton.runtime import driver

        driver.active.get_current_device()
        if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
            raise FileNotFoundError(
                "there is no C compiler (gcc, clang or $CC)"
            )  # what triton had built is in a cache
    except Exception as error:  # what is missing decides its kind: a module, a compiler, a library of the driver
        logger.warning("%s", _not_fused("triton", error))
        return False
    return True


def _not_fused(what: str, error: Exception) -> str:
    reason = str(error).strip().splitlines() or [type(error).__name__]
    return f"{what} does not work here, so small kernels are not fused: {reason[0]}"
