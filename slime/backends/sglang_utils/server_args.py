"""From slime's flags to the keyword arguments of SGLang's `ServerArgs`, and to the environment of the server process.

Four layers, each overriding the one before: what suits an engine of this kind of device, the explicit `--sglang-*`
flags, and what slime owns (model, ports, seed, size). It imports no SGLang: names are checked by `arguments.py` at
parse time, and by `ServerArgs` itself when the server starts.
"""

from __future__ import annotations

import os
from typing import Any

from slime.backends.sglang_utils.cpu_standins import CPU_ATTENTION_BACKEND

# Measured with 512 requests of 8 + 6 tokens on two cores (the figures are in benchmarks/RESULTS.md).
CPU_DEFAULTS: dict[str, Any] = {
    "attention_backend": CPU_ATTENTION_BACKEND,
    "dtype": "float32",  # bfloat16 is slower on CPU, and its log-probs are worse
    "disable_cuda_graph": True,
    "sleep_on_idle": True,  # an idle scheduler burns a whole core otherwise
    "max_running_requests": 512,  # a decode step costs the same Python for one request as for hundreds
    "max_total_tokens": 65536,
    # SGLang takes it from the GPU's memory; with max_total_tokens it only decides whether the start is refused.
    "mem_fraction_static": 0.9,
    "log_level": "warning",
    "log_level_http": "warning",
}
CUDA_DEFAULTS: dict[str, Any] = {
    "log_level_http": "warning",  # one line a request otherwise
}


def build_server_args(
    args: Any, *, rank: int, model_path: str, host: str, port: int, nccl_port: int, dist_init_port: int
) -> dict[str, Any]:
    """The `ServerArgs` keyword arguments of one engine.

    Args:
        args: reads `accelerator`, `sglang_overrides`, `rollout_num_gpus_per_engine`, `seed`, `trust_remote_code`.
        rank: number of the engine; it shifts the seed, so that engines do not repeat each other's samples.
        model_path: HF directory with the weights and the tokenizer.
        host: address to listen on.
        port: of the HTTP server.
        nccl_port: of the engine's own process group.
        dist_init_port: first of the consecutive ports that data-parallel attention uses.
    """
    overrides = dict(args.sglang_overrides)
    size = args.rollout_num_gpus_per_engine
    owned = {
        "model_path": model_path,
        "trust_remote_code": args.trust_remote_code,
        "random_seed": args.seed + rank * size,
        "tp_size": size // overrides.get("pp_size", 1),
        "host": host,
        "port": port,
        "nccl_port": nccl_port,
        "skip_server_warmup": True,
    }
    if overrides.get("enable_dp_attention"):
        owned["dist_init_addr"] = f"{host}:{dist_init_port}"
    return device_defaults(args.accelerator) | overrides | owned


def device_defaults(accelerator: str) -> dict[str, Any]:
    """What an engine runs with unless a flag says otherwise."""
    if accelerator == "cpu":
        return {"device": "cpu", **CPU_DEFAULTS}
    return dict(CUDA_DEFAULTS)


def server_environment(accelerator: str, *, num_threads: int | None = None) -> dict[str, str]:
    """The environment of a server process: this process's, with what SGLang reads.

    Args:
        accelerator: "cpu" or "cuda".
        num_threads: OMP threads of a CPU engine; None leaves the choice to the environment.
    """
    env = dict(os.environ)
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [root, env.get("PYTHONPATH")]))
    env["PYTHONUNBUFFERED"] = "1"
    env["HF_HUB_OFFLINE"] = "1"
    # GET /health answers at once; /health_generate stays the thorough check.
    env["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] = "false"
    if accelerator == "cpu":
        env["SGLANG_USE_CPU_ENGINE"] = "1"
        env["CUDA_VISIBLE_DEVICES"] = ""  # --accelerator cpu on a machine with CUDA
        if num_threads is not None:
            env["OMP_NUM_THREADS"] = str(num_threads)
    else:
        # Both ends of the NCCL group that carries weights must agree; with SGLang's own "1" on newer drivers they do
        # not.
        env["NCCL_CUMEM_ENABLE"] = "0"
        env["NCCL_NVLS_ENABLE"] = "0"
    return env
