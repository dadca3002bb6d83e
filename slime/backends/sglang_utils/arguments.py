"""The `--sglang-*` and `--router-*` flags: the options of the installed packages, minus what slime sets itself.

Importing SGLang takes seconds, so it is put off: a command line that uses only the flags of `COMMON` never pays for
it. Any other flag (and `--help`) registers the real options of the installed version. It knows nothing about
placement, free ports or how an engine is started.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from slime.utils.arguments.flags import flag
from slime.utils.errors import UsageError


@dataclass
class SglangFlags:
    """Engines and router (slime's own flags)."""

    sglang_router_ip: str | None = flag(None, "use the router that runs at this address")
    sglang_router_port: int | None = flag(
        None, "port of that router, or of the one that slime starts (default: a free one)"
    )
    sglang_router_request_timeout_secs: int = flag(14400, "seconds the router waits for one request", at_least=1)
    sglang_server_concurrency: int = flag(512, "requests in flight per engine", at_least=1)


class ServerOption(NamedTuple):
    """One SGLang option that is registered without importing SGLang.

    `plain` are the values that are surely valid (`int` and `float`: every such number); any other value is left to the
    installed SGLang, which then judges the whole command line.
    """

    dest: str
    kind: type
    default: Any
    help: str
    plain: tuple[str, ...] = ()

    @property
    def option(self) -> str:
        """Its name on our command line."""
        return "--sglang-" + self.dest.replace("_", "-")

    def is_plain(self, text: str) -> bool:
        """Whether this value needs no second opinion."""
        if self.kind is str:
            return text in self.plain
        try:
            self.kind(text)
        except ValueError:
            return False
        return True


# What runs of ours commonly set, and what slime itself reads. A test compares each row with the installed ServerArgs.
COMMON = (
    ServerOption("enable_deterministic_inference", bool, False, "honour sampling seeds, whatever the batch"),
    ServerOption("max_running_requests", int, None, "requests that run at the same time"),
    ServerOption("max_total_tokens", int, None, "tokens of the KV cache"),
    ServerOption("mem_fraction_static", float, None, "share of GPU memory for weights and KV cache"),
    ServerOption("context_length", int, None, "longest context"),
    ServerOption("chunked_prefill_size", int, None, "tokens of one prefill chunk"),
    ServerOption("disable_radix_cache", bool, False, "no prefix cache"),
    ServerOption("disable_cuda_graph", bool, False, "no CUDA graphs"),
    ServerOption("attention_backend", str, None, "attention kernels", ("torch_native", "triton", "flashinfer", "fa3")),
    ServerOption("dtype", str, "auto", "type of weights and activations", ("auto", "bfloat16", "float16", "float32")),
    ServerOption("log_level", str, "info", "log level of the engine", ("debug", "info", "warning", "error")),
    ServerOption("load_format", str, "auto", "how weights are read; dummy = random", ("auto", "safetensors", "dummy")),
    ServerOption("speculative_algorithm", str, None, "speculative decoding"),
)
# dest -> what to use instead. slime sets these for every engine.
OWNED = {
    "model_path": "use --hf-checkpoint",
    "config": "give each --sglang-* flag on the command line",
    "trust_remote_code": "use --trust-remote-code",
    "random_seed": "it follows from --seed",
    "enable_memory_saver": "it follows from --offload-rollout",
    "tp_size": "use --rollout-num-gpus-per-engine",
    "host": "engines listen on their node's address",
    "port": "slime finds free ports",
    "nnodes": "it follows from --rollout-num-gpus-per-engine",
    "node_rank": "slime places the engines",
    "dist_init_addr": "slime finds free ports",
    "gpu_id_step": "slime places the engines",
    "base_gpu_id": "slime places the engines",
    "nccl_port": "slime finds free ports",
    "skip_server_warmup": "slime always skips the warm-up",
    "enable_return_routed_experts": "it follows from the training flags",
}
ROUTER_OWNED = {
    "worker_urls": "slime registers its engines",
    "router_prefill": "slime registers its engines",
    "router_decode": "slime registers its engines",
    "router_model_path": "use --hf-checkpoint",
}
ROUTER_DEFAULTS = {"log_level": "warn", "balance_abs_threshold": 10, "balance_rel_threshold": 1.2}
PREFIX, ROUTER_PREFIX = "sglang_", "router_"


def needs_installed_options(tokens: Sequence[str], own_options: Sequence[str]) -> bool:
    """Whether a command line has a flag, or a value, that only the installed SGLang or its router can judge."""
    common = {entry.option: entry for entry in COMMON}
    for token, following in itertools.zip_longest(tokens, tokens[1:], fillvalue=""):
        name, equals, value = token.partition("=")
        entry = common.get(name)
        if entry and entry.kind is not bool and not entry.is_plain(value if equals else following):
            return True
        is_ours = name in own_options or name in common or explain_owned(name) is not None
        if name.startswith(("--sglang-", "--no-sglang-", "--router-")) and not is_ours:
            return True
    return False


def is_installed() -> bool:
    """Whether the packages sglang and sglang_router can be imported."""
    return all(importlib.util.find_spec(name) is not None for name in ("sglang", "sglang_router"))


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `COMMON`, without importing SGLang."""
    group = parser.add_argument_group("SGLang engine", "every option of SGLang's server, with --sglang- in front")
    for entry in COMMON:
        kind: dict[str, Any] = {"action": "store_true"} if entry.kind is bool else {"type": entry.kind}
        group.add_argument(entry.option, dest=PREFIX + entry.dest, default=entry.default, help=entry.help, **kind)


def add_installed_arguments(parser: argparse.ArgumentParser) -> None:
    """Add every option of the installed SGLang server and router; imports both.

    Raises:
        UsageError: one of them is not installed.
    """
    if not is_installed():
        known = ", ".join(entry.option for entry in COMMON)
        raise UsageError(
            f"sglang or sglang-router is not installed, so of their flags only {known} are known; run "
            "scripts/setup_env.sh, or leave the others out (--debug-train-only needs none)."
        )
    from slime.utils.accelerator import cuda_is_available

    if not cuda_is_available():
        from slime.backends.sglang_utils import cpu_standins

        cpu_standins.install()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "Triton is not supported on current platform"
        from sglang.srt.server_args import ServerArgs
        from sglang_router.router_args import RouterArgs

    group = parser.add_argument_group("SGLang engine", "every option of SGLang's server, with --sglang- in front")
    ServerArgs.add_cli_args(_Prefixed(group, owned=OWNED))
    RouterArgs.add_cli_args(_Router(parser), use_router_prefix=True, exclude_host_port=True)
    parser.set_defaults(**{ROUTER_PREFIX + name: value for name, value in ROUTER_DEFAULTS.items()})


class _Prefixed:
    """Stands where SGLang expects a parser: `--x` becomes `--sglang-x`, and owned options are left out."""

    def __init__(self, group: argparse._ArgumentGroup, *, owned: Any) -> None:
        self._group = group
        self._owned = owned

    def add_argument(self, *names: str, **keywords: Any) -> argparse.Action | None:
        """As argparse's."""
        dest = keywords.pop("dest", None) or names[0].lstrip("-").replace("-", "_")
        if dest in self._owned:
            return None
        if "new_flag" in keywords:  # SGLang's own deprecated aliases name their successor
            keywords["new_flag"] = f"--sglang-{keywords['new_flag'][2:]}"
        return self._group.add_argument(*(f"--sglang-{name[2:]}" for name in names), dest=PREFIX + dest, **keywords)


class _Router:
    """Stands where the router expects a parser: one group per topic, owned options left out."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._parser = parser

    def add_argument_group(self, title: str, description: str) -> _Router:
        """As argparse's."""
        return _RouterGroup(self._parser.add_argument_group(f"Router: {title}", description))


class _RouterGroup(_Router):
    def __init__(self, group: argparse._ArgumentGroup) -> None:
        self._group = group

    def add_argument(self, *names: str, **keywords: Any) -> argparse.Action | None:
        dest = keywords.get("dest") or names[0].lstrip("-").replace("-", "_")
        return None if dest in ROUTER_OWNED else self._group.add_argument(*names, **keywords)


def explain_owned(name: str) -> str | None:
    """The sentence for a flag that exists in SGLang but belongs to slime; None for every other name."""
    aliases = {"tensor_parallel_size": "tp_size", "model": "model_path", "nccl_init_addr": "dist_init_addr"}
    dest = name.lstrip("-").replace("-", "_")
    remedy = ROUTER_OWNED.get(dest)
    if dest.startswith(PREFIX):
        bare = dest.removeprefix(PREFIX)
        remedy = OWNED.get(aliases.get(bare, bare))
    return f"{name} is set by slime: {remedy}." if remedy else None


def derive_sglang(args: argparse.Namespace, explicit: set[str], own: Sequence[str]) -> dict[str, Any]:
    """What follows from the parsed flags.

    Args:
        args: the parsed flags.
        explicit: attributes whose flags are on the command line.
        own: attributes of `SglangFlags`, which are no server options.

    Returns:
        sglang_overrides: ServerArgs field -> value, explicit ones only.
        router_overrides: RouterArgs option (without `router_`) -> value: slime's changed defaults and explicit ones.
        sglang_tp_size and the size aliases that upstream's users read.
    """
    values = vars(args)

    def pick(prefix: str) -> dict[str, Any]:
        names = sorted(name for name in explicit if name.startswith(prefix) and name not in own)
        return {name.removeprefix(prefix): values[name] for name in names}

    server = pick(PREFIX)
    sizes = {short: server.get(short, 1) for short in ("pp_size", "dp_size", "ep_size", "moe_dp_size")}
    tp_size = args.rollout_num_gpus_per_engine // max(1, sizes["pp_size"])
    derived = {PREFIX + name: value for name, value in {"tp_size": tp_size, **sizes}.items()}
    for short, long in _SIZE_ALIASES.items():
        derived[PREFIX + long] = derived[PREFIX + short]
    return derived | {"sglang_overrides": server, "router_overrides": ROUTER_DEFAULTS | pick(ROUTER_PREFIX)}


_SIZE_ALIASES = {
    "tp_size": "tensor_parallel_size",
    "pp_size": "pipeline_parallel_size",
    "dp_size": "data_parallel_size",
    "ep_size": "expert_parallel_size",
    "moe_dp_size": "moe_data_parallel_size",
}


def sglang_problems(args: argparse.Namespace, *, port_is_free: Callable[[int], bool]) -> list[str]:
    """Sentences about engine and router flags that cannot work."""
    problems = []
    if args.sglang_router_ip and args.sglang_router_port is None:
        problems.append(f"--sglang-router-ip {args.sglang_router_ip} needs --sglang-router-port too.")
    router_port, prometheus_port = args.sglang_router_port, args.router_overrides.get("prometheus_port")
    problems += port_problems("--sglang-router-port", None if args.sglang_router_ip else router_port, port_is_free)
    problems += port_problems("--router-prometheus-port", prometheus_port, port_is_free)
    if args.sglang_pp_size < 1 or args.rollout_num_gpus_per_engine % args.sglang_pp_size:
        problems.append(
            f"--sglang-pp-size {args.sglang_pp_size} does not divide --rollout-num-gpus-per-engine "
            f"{args.rollout_num_gpus_per_engine}."
        )
    if args.sglang_dp_size > 1 and not args.sglang_overrides.get("enable_dp_attention"):
        problems.append(f"--sglang-dp-size {args.sglang_dp_size} needs --sglang-enable-dp-attention.")
    return problems


def port_problems(option: str, port: int | None, port_is_free: Callable[[int], bool]) -> list[str]:
    """Sentences about a port that a process of ours is to listen on."""
    if port is None:
        return []
    if not 0 < port < 65536:
        return [f"{option} {port} is no port; choose one from 1 to 65535."]
    if port_is_free(port):
        return []
    reuse = ", or add --sglang-router-ip to use a router that runs there" if option == "--sglang-router-port" else ""
    return [f"{option} {port} is taken on this host; choose another, or leave it out (slime finds a free one){reuse}."]
