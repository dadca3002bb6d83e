"""slime's own flags for engines and router, what follows from all of theirs, and which cannot work together.

The options of SGLang and its router themselves are in `options.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from slime.config.args import Args
from slime.config.parser import flag
from slime.config.problems import Check, NoEffect, Problems, Rule, broken, collected
from slime.config.rules.devices import check_external_engines
from slime.config.sglang.drafts import draft_problems
from slime.config.sglang.options import (
    INSTALL,
    PREFIX,
    READ_BY_SLIME,
    ROUTER_DEFAULTS,
    ROUTER_PREFIX,
    add_sglang_arguments,
    explain_unknown,
    missing_packages,
    set_aside,
    sglang_tables,
)
from slime.config.sglang.served_models import served_model_problems
from slime.config.sglang.topology import num_policy_engines, plan_engines, topology_problems
from slime.utils.misc import url_host

__all__ = [
    "SglangFlags",
    "add_sglang_arguments",
    "derive_engines",
    "derive_sglang",
    "draft_problems",
    "explain_unknown",
    "served_model_problems",
    "set_aside",
    "sglang_problems",
    "sglang_tables",
]

# ServerArgs field -> the other attribute that upstream's users read.
_OTHER_SIZE_NAMES = {
    "tp_size": "tensor_parallel_size",
    "pp_size": "pipeline_parallel_size",
    "dp_size": "data_parallel_size",
    "ep_size": "expert_parallel_size",
    "moe_dp_size": "moe_data_parallel_size",
}


@dataclass
class SglangFlags:
    """Engines and router (slime's own flags)."""

    sglang_router_ip: str | None = flag(None, "use the router that runs at this address")
    sglang_router_port: int | None = flag(
        None, "port of that router, or of the one that slime starts (default: a free one)"
    )
    sglang_router_request_timeout_secs: int = flag(14400, "seconds the router waits for one request", at_least=1)
    sglang_server_concurrency: int = flag(512, "requests in flight per engine", at_least=1)
    spec_break_even_length: float | None = flag(
        None,
        "tokens that a verification of drafts has to give on average for drafts to pay; below, there is an alarm",
        needs="sglang_speculative_algorithm",
        at_least=1,
    )
    spec_auto_off: bool = flag(
        False,
        "engines stop drafting for good after 3 rollouts below --spec-break-even-length",
        needs="spec_break_even_length",
    )
    api_key_per_run: bool = flag(
        True,
        "engines and routers answer anybody; otherwise they ask for the run's key, which slime's HTTP helpers send",
    )
    sglang_config: str | None = flag(None, "YAML file with the models and engines of the run")
    prefill_num_servers: int | None = flag(
        None, "engines that only prefill, of one model without --sglang-config", at_least=1
    )


def derive_sglang(args: Args, explicit: set[str], own: Sequence[str]) -> dict[str, Any]:
    """What follows from the parsed flags.

    Args:
        args: the parsed flags.
        explicit: attributes whose flags are on the command line.
        own: attributes of `SglangFlags`, which are no server options.

    Returns:
        sglang_overrides: ServerArgs field -> value, explicit ones only.
        router_overrides: RouterArgs option (without `router_`) -> value: slime's changed defaults and explicit ones.
        sglang_tp_size, the other sizes under both their names, and sglang_router_ip as a URL has it.
    """
    values = vars(args)

    def pick(prefix: str) -> dict[str, Any]:
        names = sorted(name for name in explicit if name.startswith(prefix) and name not in own)
        return {name.removeprefix(prefix): values[name] for name in names}

    server = pick(PREFIX)
    if args.prometheus_port is not None:
        server.setdefault("enable_metrics", True)
    sizes = {PREFIX + name: value for name, value in engine_sizes(args.rollout_num_gpus_per_engine, server).items()}
    return sizes | {
        "sglang_router_ip": args.sglang_router_ip and url_host(args.sglang_router_ip),
        "sglang_overrides": server,
        "router_overrides": ROUTER_DEFAULTS | pick(ROUTER_PREFIX),
    }


def derive_engines(args: Args, explicit: set[str], problems: Problems) -> None:
    """Set which engines there are, in place: `engine_models` (list of `ModelPlan`) and `rollout_num_engines`.

    External engines are asked what they are first; then `rollout_external_engine_infos` and `rollout_num_gpus` follow
    from their answers. Where they do not answer, one engine each is assumed, and `problems` says so.
    """
    args.rollout_external_engine_infos = []
    num_external = 0
    if args.rollout_external and not args.debug_train_only:
        addresses = args.rollout_external_engine_addrs or []
        num_external = len(addresses)
        if not any(check_external_engines(args)):
            from slime.backends.sglang_utils.external import (  # here: it imports aiohttp
                apply_external_engine_info_to_args,
                discover_external_engines,
                external_engine_problems,
            )

            key = args.sglang_overrides.get("api_key")
            infos = collected(problems.environment, discover_external_engines, addresses, api_key=key) or []
            if infos:
                apply_external_engine_info_to_args(args, infos)
            problems.environment += external_engine_problems(args, infos, explicit)
    args.engine_models = plan_engines(args)
    args.rollout_num_engines = num_policy_engines(args.engine_models, num_external=num_external)


def engine_sizes(gpus_per_engine: int, overrides: dict[str, Any]) -> dict[str, int]:
    """The parallel sizes of an engine under both names that SGLang has for each; TP is what PP leaves of its GPUs."""
    sizes = {short: overrides.get(short, 1) for short in _OTHER_SIZE_NAMES}
    sizes["tp_size"] = gpus_per_engine // max(1, sizes["pp_size"])
    return sizes | {long: sizes[short] for short, long in _OTHER_SIZE_NAMES.items()}


RULES: tuple[Check, ...] = (
    Rule(
        lambda a: a.sglang_pp_size < 1 or a.rollout_num_gpus_per_engine % a.sglang_pp_size,
        "--sglang-pp-size {sglang_pp_size} does not divide --rollout-num-gpus-per-engine "
        "{rollout_num_gpus_per_engine}.",
    ),
    Rule(  # only data-parallel attention makes use of several such ranks in one engine
        lambda a: a.sglang_dp_size > 1 and not a.sglang_overrides.get("enable_dp_attention"),
        "--sglang-dp-size {sglang_dp_size} needs --sglang-enable-dp-attention.",
    ),
    Rule(
        lambda a: len(_descriptions(a)) > 1,
        lambda a: f"{' and '.join(_descriptions(a))} exclude each other; keep the one that describes the engines.",
    ),
    Rule(
        lambda a: a.sglang_router_ip and a.sglang_router_port is None,
        "--sglang-router-ip {sglang_router_ip} needs --sglang-router-port too.",
    ),
)


def _descriptions(args: Args) -> list[str]:
    """The flags that say which engines there are."""
    given = {
        f"--sglang-config {args.sglang_config}": args.sglang_config is not None,
        f"--prefill-num-servers {args.prefill_num_servers}": args.prefill_num_servers is not None,
        f"--rollout-external-engine-addrs {' '.join(args.rollout_external_engine_addrs or [])}": bool(
            args.rollout_external_engine_addrs
        ),
    }
    return [name for name, is_given in given.items() if is_given]


def sglang_problems(args: Args, *, port_is_free: Callable[[int], bool]) -> Problems:
    """What is wrong with the engine and router flags of a run with engines."""
    problems = Problems(wrong=list(broken(RULES, args)))
    problems.wrong += external_flag_problems(args.sglang_overrides if args.rollout_external else {})
    if missing := missing_packages():
        what = f"{' and '.join(missing)} not installed, but engines need sglang and sglang_router"
        problems.environment.append(f"{what}: {INSTALL}.")
    problems.extend(topology_problems(args))
    listens = None if args.sglang_router_ip else port_is_free
    ports = {
        "--sglang-router-port": args.sglang_router_port,
        "--router-prometheus-port": args.router_overrides.get("prometheus_port"),
    }
    for option, port in ports.items():
        if port is not None:
            problems.extend(port_problems(option, port, listens))
    return problems


def external_flag_problems(overrides: dict[str, Any]) -> list[str]:
    """Sentences about options of servers that run already; some of them slime itself reads."""
    return [
        NoEffect(
            f"--sglang-{name.replace('_', '-')}",
            "with --rollout-external-engine-addrs, whose servers run already",
            "give it to them",
        )
        for name in overrides
        if name not in READ_BY_SLIME
    ]


def port_problems(option: str, port: int, port_is_free: Callable[[int], bool] | None) -> Problems:
    """What is wrong with a port; `port_is_free` is None for one that no process of ours is to listen on."""
    if not 0 < port < 65536:
        return Problems(wrong=[f"{option} {port} is no port; choose one from 1 to 65535."])
    if port_is_free is None or port_is_free(port):
        return Problems()
    reuse = ", or add --sglang-router-ip to use a router that runs there" if option == "--sglang-router-port" else ""
    remedy = f"choose another, or leave it out (slime finds a free one){reuse}"
    return Problems(environment=[f"{option} {port} is taken on this host; {remedy}."])
