"""Compile SGLang's kernels of a model side by side while its engine starts: `python -m ... MODEL SERVER_ARGS`.

SGLang 0.5.17 compiles a kernel when it is first called, one nvcc after the other: five of a Qwen3 take 88 s of a start
on a fresh machine. This process asks for them all at once, while the engine's processes still import. An engine that
wants a kernel waits for the lock of its folder, and loads it. One that it never wants has cost CPU time alone.
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
from pathlib import Path
from typing import Any, NamedTuple

from slime.models.families import family_of_config
from slime.weights.names import read_config, text_config

OPS = "sglang.kernels.ops"
TYPES = {"float16": "fp16_t", "bfloat16": "bf16_t", "int32": "int32_t", "int64": "int64_t"}
"""torch's types as SGLang writes them in the names of folders."""


class Kernel(NamedTuple):
    """A function of SGLang that compiles one kernel.

    Args:
        module: below `OPS`.
        function: of that module.
        values: of the call; names of torch's types stand for them.
        folder: how the name of its folder begins and goes on, as a glob.
    """

    module: str
    function: str
    values: tuple[Any, ...]
    folder: str


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
    row = max(1, text.get("num_key_value_heads", heads) // ranks) * head_dim * of_cache
    rotated = int(head_dim * (text.get("partial_rotary_factor") or 1))
    own = TYPES[dtype]
    found = [
        Kernel("activation.activation", "activation_module", (dtype,), f"activation_{own}_*"),
        Kernel("kvcache.kvcache", "_jit_kvcache_module", (row, row), f"kvcache_{row}_{row}_*"),
        Kernel("attention.clamp_position", "_jit_clamp_position_module", ("int64",), "clamp_position_int64_t_*"),
        Kernel(
            *("attention.rope", "_jit_fused_rope_module", (True, rotated, dtype, dtype)),
            f"fused_rope_true_{rotated}_*_{own}_{own}_*",
        ),
    ]
    has_norms = family and any(name.endswith("q_norm.weight") for rule in family.rules for name in rule.hf)
    if family and has_norms and not family.norms_all_heads:
        found.append(Kernel("layernorm.norm", "_jit_qknorm_module", (head_dim, dtype), f"qknorm_{head_dim}_*_{own}_*"))
    return found


def missing(kernels: list[Kernel], environment: Mapping[str, str]) -> list[Kernel]:
    """Those that no process has compiled on this machine yet."""
    cache = Path(environment.get("TVM_FFI_CACHE_DIR", "~/.cache/tvm-ffi")).expanduser()
    return [kernel for kernel in kernels if not any(cache.glob(f"sgl_kernel_jit_{kernel.folder}/*.so"))]


def start(server_args: Mapping[str, Any]) -> None:
    """Start a process that compiles what this engine will miss; nothing is started where it misses nothing."""
    kernels = missing(kernels_of(read_config(server_args["model_path"]), server_args), os.environ)
    if kernels:
        subprocess.Popen([sys.executable, "-m", __spec__.name, json.dumps(kernels)])


def compile_all(kernels: list[Kernel]) -> None:
    """Compile kernels, each in a thread that waits for its nvcc; one that fails is the engine's to report."""
    sys.modules.setdefault("megatron", None)  # type: ignore[arg-type]  # as in `launch_server.prepare`
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
        getattr(importlib.import_module(f"{OPS}.{kernel.module}"), kernel.function)(*values)
    except Exception as error:
        return f"slime: kernel {kernel.module} is not compiled ahead: {str(error)[:200]}"
    return f"slime: kernel {kernel.module} compiled in {time.monotonic() - begin:.0f} s"


if __name__ == "__main__":
    compile_all([Kernel(*values) for values in json.loads(sys.argv[1])])
