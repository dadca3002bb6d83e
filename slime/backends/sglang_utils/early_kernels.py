"""Compile the kernels of a model side by side while its engine starts: `python -m ... KERNELS`.

SGLang 0.5.17 compiles a kernel when it is first called, one nvcc after the other: five of its own take a Qwen3 40 s on
a fresh H200 machine, and FlashInfer's norms 37 s more. This process asks for them all at once, while the engine's
processes still import. An engine that wants a kernel waits for the lock of its folder, and loads it. One that it never
wants has cost CPU time alone.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from slime.models.families import family_of_config
from slime.models.rope import rope_of
from slime.utils.misc import attempt
from slime.weights.names import read_config, text_config

TYPES = {"float16": "fp16_t", "bfloat16": "bf16_t", "int64": "int64_t"}
"""torch's types as SGLang writes them in the names of folders."""
CACHES = {"TVM_FFI_CACHE_DIR": "~/.cache/tvm-ffi", "FLASHINFER_WORKSPACE_BASE": "~"}
"""The variable that says where a library keeps what it compiles, and where that is without it."""


class Kernel(NamedTuple):
    """A function that compiles one kernel.

    Args:
        module: where the function is.
        function: its name.
        values: of the call; names of torch's types stand for them.
        cache: of `CACHES`.
        library: what it makes there, as a glob.
    """

    module: str
    function: str
    values: tuple[Any, ...]
    cache: str
    library: str


def _of_sglang(module: str, function: str, values: tuple[Any, ...], name: str) -> Kernel:
    return Kernel(f"sglang.kernels.ops.{module}", function, values, "TVM_FFI_CACHE_DIR", f"sgl_kernel_jit_{name}/*.so")


_NORM_LIBRARY = ".cache/flashinfer/*/*/cached_ops/norm/norm.so"
NORMS = Kernel("flashinfer.norm", "get_norm_module", (), "FLASHINFER_WORKSPACE_BASE", _NORM_LIBRARY)


def kernels_of(config: Mapping[str, Any], server_args: Mapping[str, Any]) -> list[Kernel]:
    """The kernels of a decoder's forward pass; none of a type, or a latent attention, that takes others.

    Args:
        config: config.json of the model.
        server_args: fields of ServerArgs.
    """
    text, family = text_config(config), family_of_config(config)
    dtype = server_args.get("dtype", "auto")
    if dtype == "auto":
        dtype = text.get("torch_dtype") or text.get("dtype")
    if dtype not in ("float16", "bfloat16") or text.get("kv_lora_rank") or not text.get("num_attention_heads"):
        return []
    heads = text["num_attention_heads"]
    head_dim = text.get("head_dim") or text["hidden_size"] // heads
    ranks = server_args.get("tp_size", 1)
    if server_args.get("enable_dp_attention"):
        ranks //= server_args.get("dp_size", 1)
    of_cache = 1 if str(server_args.get("kv_cache_dtype")).startswith("fp8") else 2
    row = max(1, (text.get("num_key_value_heads") or heads) // ranks) * head_dim * of_cache
    rotated = int(head_dim * rope_of(text)["partial_rotary_factor"])
    own, rope = TYPES[dtype], (True, rotated, dtype, dtype)
    found = [
        _of_sglang("activation.activation", "activation_module", (dtype,), f"activation_{own}_*"),
        _of_sglang("kvcache.kvcache", "_jit_kvcache_module", (row, row), f"kvcache_{row}_{row}_*"),
        _of_sglang("attention.clamp_position", "_jit_clamp_position_module", ("int64",), "clamp_position_int64_t_*"),
        _of_sglang("attention.rope", "_jit_fused_rope_module", rope, f"fused_rope_true_{rotated}_*_{own}_{own}_*"),
    ]
    names = [name for rule in family.rules for name in rule.hf] if family and not family.norms_all_heads else []
    if any(name.endswith("q_norm.weight") for name in names):
        name = f"qknorm_{head_dim}_*_{own}_*"
        found.append(_of_sglang("layernorm.norm", "_jit_qknorm_module", (head_dim, dtype), name))
    return [*found, NORMS] if _compiles_norms() else found


def _compiles_norms() -> bool:
    """Whether FlashInfer is installed without its compiled kernels. Where it is installed, SGLang takes its norms."""
    return find_spec("flashinfer") is not None and find_spec("flashinfer_jit_cache") is None


def missing(kernels: list[Kernel], environment: Mapping[str, str]) -> list[Kernel]:
    """Those that no process has compiled on this machine yet."""
    caches = {name: Path(environment.get(name, default)).expanduser() for name, default in CACHES.items()}
    return [kernel for kernel in kernels if not any(caches[kernel.cache].glob(kernel.library))]


def start(server_args: Mapping[str, Any]) -> None:
    """Start a process that compiles what this engine will miss; nothing is started where it misses nothing.

    The engine starts without it, too: a config.json or arguments that `kernels_of` cannot read are SGLang's to judge.
    """
    config = read_config(server_args["model_path"])
    kernels, error = attempt(lambda: missing(kernels_of(config, server_args), os.environ))
    if error is not None:
        print(f"slime: no kernel is compiled ahead: {_on_one_line(error)}", flush=True)
    elif kernels:
        subprocess.Popen([sys.executable, "-m", __spec__.name, json.dumps(kernels)])


def compile_all(kernels: list[Kernel]) -> None:
    """Compile kernels, each in a thread that waits for its nvcc; one that fails is the engine's to report."""
    from sglang.kernels.jit.utils import get_jit_cuda_arch

    # SGLang sets this for each kernel and takes it away again, under which another thread's would go.
    os.environ["TVM_FFI_CUDA_ARCH_LIST"] = get_jit_cuda_arch().target_name
    with ThreadPoolExecutor(len(kernels)) as pool:
        for line in pool.map(compile_one, kernels):
            print(line, flush=True)


def compile_one(kernel: Kernel) -> str:
    """Compile a kernel, and return how long it took, or why it failed."""
    import torch

    begin = time.monotonic()
    values = [getattr(torch, value) if value in TYPES else value for value in kernel.values]
    try:
        getattr(importlib.import_module(kernel.module), kernel.function)(*values)
    except Exception as error:
        return f"slime: kernel {kernel.module} is not compiled ahead: {_on_one_line(error)}"
    return f"slime: kernel {kernel.module} compiled in {time.monotonic() - begin:.0f} s"


def _on_one_line(error: BaseException) -> str:
    """The beginning of an error's text; a line of its own that named an exception would be taken for the engine's."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


if __name__ == "__main__":
    _, failure = attempt(compile_all, [Kernel(*values) for values in json.loads(sys.argv[1])])
    if failure is not None:
        print(f"slime: no kernel is compiled ahead: {_on_one_line(failure)}", flush=True)
