"""From slime's flags to the keyword arguments of SGLang's `ServerArgs`, and to the environment of the server process.

Three layers, each overriding the one before: what suits an engine of this kind of device, what was asked for (the
explicit `--sglang-*` flags, and the overrides of --sglang-config over them), and what slime owns (model, ports, seed,
size). It imports no SGLang: names are checked by `arguments.py` at parse time, and by `ServerArgs` itself when the
server starts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime.backends.sglang_utils.cpu_standins import CPU_ATTENTION_BACKEND
from slime.backends.sglang_utils.engine_patches import DRAFTS_OFF
from slime.config.args import Args
from slime.config.lora_policies import policies_of
from slime.config.megatron.lora_plan import LoraPlan, served_plan
from slime.utils.misc import url_host
from slime.weights.names import read_config

# Chosen with 512 requests of 8 + 6 tokens to a model of 0.8 M parameters on two cores: 2.0 s of CPU time with
# SGLang's own values and attention, 1.0 s with these and `install_attention`.
CPU_DEFAULTS: dict[str, Any] = {
    "attention_backend": CPU_ATTENTION_BACKEND,
    "dtype": "float32",  # bfloat16 is slower on CPU, and its log-probs are worse
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,  # there is no GPU whose work the scheduler could overlap with
    "sleep_on_idle": True,  # an idle scheduler burns a whole core otherwise
    "chunked_prefill_size": 8192,  # a burst of short prompts is one prefill
    "max_total_tokens": 65536,
    # SGLang derives it from the chunk size for GPUs, down to below zero; with max_total_tokens it bounds nothing.
    "mem_fraction_static": 0.9,
    "log_level": "warning",
    "log_level_http": "warning",
}
# A decode step costs almost the same Python for one request as for hundreds, so many run at once; but seeded
# sampling makes several float64 copies of [requests, vocabulary].
MAX_RUNNING_REQUESTS = 512
MAX_SAMPLED_LOGITS = 2**24
DECODE_GRAPHS = (
    "cuda_graph_bs_decode",
    "cuda_graph_config",
    "cuda_graph_backend_decode",
    "disable_cuda_graph",
    "disable_cuda_graph_padding",
    "disable_decode_cuda_graph",
    "speculative_algorithm",
)
"""What is given of these decides about decode graphs; drafts have sizes of their own."""
DRAFTED_TOKENS = 3
"""Those of a verification that SGLang itself chooses for most models."""
CUDA_DEFAULTS: dict[str, Any] = {
    "log_level_http": "warning",  # one line a request otherwise
}


@dataclass(frozen=True)
class EngineSpec:
    """One engine, before it has a place.

    Attributes:
        rank: its number among the engines of the run.
        model_path: HF directory with the weights and the tokenizer.
        num_gpus: GPUs (slots) that it takes.
        first_slot: the first of them, among those of all engines; it shifts the seed, so that engines do not repeat
            each other's samples.
        settings: ServerArgs values that were asked for.
        worker_type: regular, prefill, decode or encoder.
        encoder_urls: servers that encode images for it.
        releases_memory: whether it is asked to give its GPU memory up for a while,
        takes_weights: and to what it then takes it again: the trainer's weights, or those that it had.
    """

    rank: int
    model_path: str
    num_gpus: int = 1
    first_slot: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)
    worker_type: str = "regular"
    encoder_urls: tuple[str, ...] = ()
    releases_memory: bool = False
    takes_weights: bool = True


@dataclass(frozen=True)
class EnginePlace:
    """Where an engine listens.

    Attributes:
        host: address.
        port: of the HTTP server.
        nccl_port: of the engine's own process group.
        bootstrap_port: where a prefill engine, or one that uses encoders, is found by the engines it works with.
        dist_init_port: first of the consecutive ports that data-parallel attention uses, and at which the nodes of an
            engine meet.
        num_nodes: over which the engine lies; each has a server process with its share of the ranks.
        node_rank: of this process among them.
        meeting: `host:port` where they meet, on the first of them; None is this place's own.
    """

    host: str
    port: int
    nccl_port: int
    bootstrap_port: int
    dist_init_port: int
    num_nodes: int = 1
    node_rank: int = 0
    meeting: str | None = None

    @property
    def dist_init_addr(self) -> str:
        """Where the ranks of the engine meet."""
        return self.meeting or f"{url_host(self.host)}:{self.dist_init_port}"


def build_server_args(args: Args, spec: EngineSpec, place: EnginePlace) -> dict[str, Any]:
    """The `ServerArgs` keyword arguments of one engine.

    Args:
        args: reads `accelerator`, `seed`, `trust_remote_code`, `update_weights_in_flight`,
            `use_rollout_routing_replay`, `hf_checkpoint`, `params_dtype`, `sglang_server_concurrency`; for an engine
            that drafts also `spec_auto_off`.
        spec, place: which engine, and its ports.
    """
    owned = {
        "model_path": spec.model_path,
        "trust_remote_code": args.trust_remote_code,
        "random_seed": args.seed + spec.first_slot,
        "tp_size": spec.num_gpus // spec.settings.get("pp_size", 1),
        "host": place.host,
        "port": place.port,
        "nccl_port": place.nccl_port,
        "skip_server_warmup": True,
    }
    adapters = served_plan(args) if spec.takes_weights and spec.worker_type == "regular" else None
    replays = args.use_rollout_routing_replay and spec.model_path == args.hf_checkpoint
    rows: tuple[tuple[Any, dict[str, Any]], ...] = (
        # It would keep prefixes that the old weights computed: a sync cannot flush it while requests are in flight.
        (args.update_weights_in_flight and adapters is None, {"disable_radix_cache": True}),
        (replays, {"enable_return_routed_experts": True}),
        # Weights of a draft of its own are never sent, nor are those of a model that is not trained, or has adapters.
        (spec.releases_memory, {"enable_memory_saver": True, "enable_draft_weights_cpu_backup": True}),
        (spec.releases_memory and (not spec.takes_weights or adapters), {"enable_weights_cpu_backup": True}),
        (place.num_nodes > 1, {"nnodes": place.num_nodes, "node_rank": place.node_rank}),
        (place.num_nodes > 1 or spec.settings.get("enable_dp_attention"), {"dist_init_addr": place.dist_init_addr}),
        (spec.worker_type == "encoder", {"encoder_only": True}),
        (spec.worker_type in ("prefill", "decode"), {"disaggregation_mode": spec.worker_type}),
        (spec.worker_type == "prefill", {"disaggregation_bootstrap_port": place.bootstrap_port}),
        (spec.encoder_urls, {"language_only": True, "encoder_urls": list(spec.encoder_urls)}),
        # SGLang's own port for late encoders has a fixed default that two engines of a node would fight over.
        (spec.encoder_urls, {"encoder_bootstrap_port": place.bootstrap_port + 1}),
    )
    for is_so, values in rows:
        owned |= values if is_so else {}
    defaults = device_defaults(args.accelerator, Path(spec.model_path))
    defaults |= graph_defaults(args, spec.settings, spec.worker_type)
    if spec.takes_weights:
        # SGLang itself would take a checkpoint in fp32 for fp16, to which bf16 weights are rounded as they arrive.
        defaults.setdefault("dtype", args.params_dtype)
    if spec.settings.get("speculative_algorithm"):
        defaults |= draft_defaults(args)
    if adapters:
        owned |= {"enable_lora": True, "lora_target_modules": list(adapters.target_modules)}
        defaults |= adapter_defaults(args, adapters)
    return defaults | dict(spec.settings) | owned


def draft_defaults(args: Args) -> dict[str, Any]:
    """How an engine drafts, unless flags say otherwise: SGLang itself would run no more than 48 requests at once."""
    found: dict[str, Any] = {"max_running_requests": args.sglang_server_concurrency}
    if args.spec_auto_off:  # whose own flags are refused with it
        found |= {"speculative_adaptive": True, "speculative_adaptive_config": DRAFTS_OFF}
        found["speculative_num_steps"] = DRAFTED_TOKENS
    return found


def graph_defaults(args: Args, settings: Mapping[str, Any], worker_type: str) -> dict[str, Any]:
    """Sizes of an engine's decode graphs, up to the requests that it may have at once, unless flags say otherwise.

    SGLang captures 36 sizes up to 256 requests, and decodes larger batches without a graph.

    Args:
        args: reads `accelerator`, `sglang_server_concurrency`.
        settings: ServerArgs values that were asked for.
        worker_type: of the engine; some decode nothing.
    """
    decodes = worker_type in ("regular", "decode") and not settings.get("is_embedding")
    if args.accelerator == "cpu" or not decodes or any(settings.get(name) for name in DECODE_GRAPHS):
        return {}
    most = settings.get("cuda_graph_max_bs_decode") or args.sglang_server_concurrency
    if settings.get("enable_dp_attention"):  # each rank decodes requests of its own
        most = -(-most // (settings.get("dp_size") or 1))
    most = min(most, settings.get("max_running_requests") or most)
    return {"cuda_graph_bs_decode": decode_graph_sizes(most)}


def decode_graph_sizes(most: int) -> list[int]:
    """Numbers of requests to capture a decode graph for; a batch takes the next larger one.

    From 8 on two sizes for each doubling: decoding waits for memory there, and rows that stand for no request cost
    next to nothing. From 128 on four, where they cost matrix products.

    Example:
        >>> decode_graph_sizes(200)
        [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 192, 200]
    """
    sizes, size = [1, 2, 4], 8
    while size < most:
        parts = 2 if size < 128 else 4
        sizes += [size * (parts + part) // parts for part in range(parts)]
        size *= 2
    return sorted({size for size in sizes if size < most} | {most})


def adapter_defaults(args: Args, plan: LoraPlan) -> dict[str, Any]:
    """Sizes of an engine's room for LoRA adapters, unless flags say otherwise.

    The model without adapters takes a place in a batch, too. With requests in flight over a sync, a batch may hold
    the newest version and two earlier ones, of each policy; what finds no place waits.
    """
    places = 1 + (3 if args.update_weights_in_flight else 1) * max(1, len(policies_of(args)))
    found: dict[str, Any] = {"max_lora_rank": plan.rank, "max_loras_per_batch": places}
    if args.accelerator == "cpu":
        found["lora_backend"] = "torch_native"
    elif plan.has_experts:
        found["moe_runner_backend"] = "triton"  # the one that takes adapters of experts
    return found


def device_defaults(accelerator: str, model_path: Path) -> dict[str, Any]:
    """What an engine runs with unless a flag says otherwise; on CPU the batch depends on the model's vocabulary."""
    if accelerator != "cpu":
        return dict(CUDA_DEFAULTS)
    vocab_size = read_config(model_path).get("vocab_size", 1)
    requests = max(1, min(MAX_RUNNING_REQUESTS, MAX_SAMPLED_LOGITS // vocab_size))
    return {"device": "cpu", "max_running_requests": requests, **CPU_DEFAULTS}


def server_environment(
    accelerator: str, *, num_threads: int | None = None, tp_size: int = 1, keeps_embeddings: bool = False
) -> dict[str, str]:
    """The environment of a server process: this process's, with what SGLang reads.

    Args:
        accelerator: "cpu" or "cuda".
        num_threads: OMP threads of a CPU engine; None leaves the choice to the environment.
        tp_size: tensor-parallel ranks of the engine.
        keeps_embeddings: the part of its model that sees images is never trained.
    """
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    fixed = {
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        # GET /health answers at once; /health_generate stays the thorough check.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
        # The client closes idle connections, never the server: its default of 5 s races with the router's next
        # request.
        "SGLANG_TIMEOUT_KEEP_ALIVE": "3600",
    }
    # Embeddings of images are kept by the image, and neither a flush nor new weights of the tower that made them would
    # forget them.
    usual = {} if keeps_embeddings else {"SGLANG_VLM_CACHE_SIZE_MB": "0"}
    if accelerator == "cpu":
        # The second: --accelerator cpu on a machine with CUDA.
        fixed |= {"SGLANG_USE_CPU_ENGINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        # Threads that wait must sleep: when they spin for a core that others use, two take three times as long as one.
        usual["OMP_WAIT_POLICY"] = "PASSIVE"
        if num_threads is not None:
            fixed["OMP_NUM_THREADS"] = str(num_threads)
        if tp_size > 1:
            # Unset, SGLang wants a NUMA node for each rank.
            usual["SGLANG_CPU_OMP_THREADS_BIND"] = cores_of_ranks(sorted(os.sched_getaffinity(0)), tp_size)
    else:
        # Both ends of the NCCL group that carries weights must agree; with SGLang's own "1" on newer drivers they do
        # not.
        fixed |= {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
    return usual | dict(os.environ) | fixed


def cores_of_ranks(cores: Sequence[int], num_ranks: int) -> str:
    """An equal share of the cores for each rank, as SGLANG_CPU_OMP_THREADS_BIND has it ("0,1|2,3").

    Ranks share cores where there are fewer of these.
    """
    each = max(1, len(cores) // num_ranks)
    shares = [[cores[(rank * each + i) % len(cores)] for i in range(each)] for rank in range(num_ranks)]
    return "|".join(",".join(map(str, share)) for share in shares)
