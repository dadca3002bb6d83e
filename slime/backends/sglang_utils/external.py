"""Engines that someone else started (--rollout-external-engine-addrs): found out about, used, and left running.

`discover_external_engines` asks each server what it is, before anything is started; the run then takes its sizes from
the answers. The servers are put behind the run's router and get the trainer's weights like engines of our own. It
does not start or end a server.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime.backends.sglang_utils import server_control
from slime.backends.sglang_utils.engine_client import EngineClient
from slime.backends.sglang_utils.engine_patches import DRAFTS_OFF
from slime.backends.sglang_utils.server_control import Worker
from slime.config.args import Args
from slime.processes.wait import WaitTimeout
from slime.utils.errors import HttpError, UsageError, refuse
from slime.utils.http.api_keys import protect, protect_engine
from slime.weights.names import read_config
from slime.weights.transports import transport_of

logger = logging.getLogger(__name__)

FLAG = "--rollout-external-engine-addrs"
DISCOVERY_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class ExternalEngineInfo:
    """What a server says of itself.

    Attributes:
        url: `http://host:port`.
        num_gpus: ranks that take weights: tensor times pipeline parallel.
        worker_type: regular, prefill or decode.
        bootstrap_port: of a prefill server.
        model_path: HF directory, on the server's host.
        architectures: of the model's config; empty where the server does not say.
        is_deterministic: whether it heeds the sampling seed of a request.
        has_prefix_cache: whether it keeps what it computed of a prompt for the next request.
        num_stages: pipeline parallel.
        returns_experts: whether it records which experts took each token.
        drafts: whether it drafts (speculative decoding), and `can_stop_drafts` whether it would stop when told to.
        key: of its own; None: it has that of the run's engines, or none.
    """

    url: str
    num_gpus: int
    worker_type: str = "regular"
    bootstrap_port: int | None = None
    model_path: str = ""
    architectures: tuple[str, ...] = ()
    is_deterministic: bool = False
    has_prefix_cache: bool = True
    num_stages: int = 1
    returns_experts: bool = False
    drafts: bool = False
    can_stop_drafts: bool = False
    key: str | None = field(default=None, repr=False)

    @property
    def worker(self) -> Worker:
        """As a router is told of it."""
        return Worker(self.url, self.worker_type, self.bootstrap_port)


def discover_external_engines(
    addrs: Sequence[str], timeout: float = DISCOVERY_TIMEOUT_S, *, api_key: str | None = None
) -> list[ExternalEngineInfo]:
    """Ask every server what it is, all at once.

    Args:
        addrs: host:port, or http://host:port.
        timeout: seconds for each answer.
        api_key: that they ask for (--sglang-api-key).

    Raises:
        UsageError: with a sentence for each server that does not answer, or is none of SGLang.
    """
    problems: list[str] = []
    for address in addrs:
        protect(_url(address), api_key)
    with ThreadPoolExecutor(max_workers=min(32, max(1, len(addrs)))) as threads:
        asked = [threads.submit(_ask, _url(address), timeout) for address in addrs]
    found = []
    for address, answer in zip(addrs, asked, strict=True):
        try:
            found.append(answer.result())
        except (HttpError, KeyError, TypeError, ValueError) as error:
            reason = str(error) if isinstance(error, HttpError) else f"its /server_info lacks {error}"
            problems.append(f"{FLAG} {address}: {reason}; start an SGLang server there first, or leave it out.")
    refuse(problems)
    return found


def _url(address: str) -> str:
    return (address if "://" in address else f"http://{address}").rstrip("/")


def _ask(url: str, timeout_s: float) -> ExternalEngineInfo:
    server = server_control.server_info_sync(url, timeout_s=timeout_s)
    model = server_control.model_info_sync(url, timeout_s=timeout_s)
    mode = server.get("disaggregation_mode") or "null"
    return ExternalEngineInfo(
        url=url,
        num_gpus=int(server["tp_size"]) * int(server.get("pp_size") or 1),
        worker_type="regular" if mode == "null" else mode,
        bootstrap_port=server.get("disaggregation_bootstrap_port") if mode == "prefill" else None,
        model_path=str(server["model_path"]),
        architectures=tuple(model.get("architectures") or ()),
        is_deterministic=bool(server.get("enable_deterministic_inference")),
        has_prefix_cache=not server.get("disable_radix_cache"),
        num_stages=int(server.get("pp_size") or 1),
        returns_experts=bool(server.get("enable_return_routed_experts")),
        drafts=bool(server.get("speculative_algorithm")),
        can_stop_drafts=server.get("speculative_adaptive_config") == DRAFTS_OFF,
    )


def apply_external_engine_info_to_args(args: Args, infos: Sequence[ExternalEngineInfo]) -> None:
    """Set what follows from the servers: `rollout_external_engine_infos`, `rollout_num_gpus`, `rollout_num_engines`.

    Args:
        args: not frozen yet.
        infos: of `discover_external_engines`.
    """
    args.rollout_external_engine_infos = list(infos)
    args.rollout_num_gpus = sum(info.num_gpus for info in infos)
    args.rollout_num_engines = len(infos)


def external_engine_problems(args: Args, infos: Sequence[ExternalEngineInfo], explicit: set[str]) -> list[str]:
    """Why these servers cannot serve this run: another model, another size, half of a disaggregated pair.

    Args:
        args: reads `hf_checkpoint`, `rollout_num_gpus_per_engine`, `sglang_enable_deterministic_inference`,
            `spec_auto_off`, `update_weights_in_flight`, `use_rollout_routing_replay`, and what says how weights go.
        infos: of the servers that answered.
        explicit: attributes whose flags are on the command line.
    """
    expected = tuple(read_config(Path(args.hf_checkpoint or "")).get("architectures") or ())
    problems = [sentence for info in infos for sentence in _misfits(args, info, expected, explicit)]
    types = {info.worker_type for info in infos}
    if len(types & {"prefill", "decode"}) == 1 or ("regular" in types and len(types) > 1):
        problems.append(
            f"{FLAG} has {' and '.join(sorted(types))} servers only; prefill servers need decode servers, and neither "
            "goes with regular ones behind one router."
        )
    twice = [url for url, count in Counter(info.url for info in infos).items() if count > 1]
    problems += [f"{FLAG} names {url} more than once: it is one engine; name it once." for url in twice]
    return problems


def _misfits(args: Args, info: ExternalEngineInfo, expected: tuple[str, ...], explicit: set[str]) -> Iterator[str]:
    """What is wrong with one server; `expected` are the architectures of the run's model, empty where not known."""
    name, way = f"{FLAG} {info.url}", transport_of(args.update_weight_transport, args.update_weight_mode)
    stays = way.versions_are_whole and args.update_weight_disk_keep_files
    rows = (
        (
            expected and info.architectures and expected != info.architectures,
            f"{name} serves a {' '.join(info.architectures)} ({info.model_path}), but --hf-checkpoint "
            f"{args.hf_checkpoint} is a {' '.join(expected)}; start it with that model.",
        ),
        (
            "rollout_num_gpus_per_engine" in explicit and info.num_gpus != args.rollout_num_gpus_per_engine,
            f"{name} has {info.num_gpus} GPUs (tensor times pipeline parallel), not the "
            f"--rollout-num-gpus-per-engine {args.rollout_num_gpus_per_engine}; leave that out.",
        ),
        (
            args.sglang_enable_deterministic_inference and not info.is_deterministic,
            f"{name} was started without --enable-deterministic-inference, so it ignores the seeds that "
            "--sglang-enable-deterministic-inference sends; start it with that, or leave this out.",
        ),
        (
            args.spec_auto_off and info.drafts and not info.can_stop_drafts,
            f"{name} drafts and would not stop when --spec-auto-off says so; start it without "
            "--speculative-algorithm, or have it join without --url.",
        ),
        (
            args.update_weights_in_flight and info.has_prefix_cache,
            f"{name} was started without --disable-radix-cache, so it would go on with prefixes that older weights "
            "computed, when weights are synced in flight; start it with that, or give "
            "--no-update-weights-in-flight.",
        ),
        (
            args.use_rollout_routing_replay and not info.returns_experts,
            f"{name} was started without --enable-return-routed-experts, so there is nothing for "
            "--use-rollout-routing-replay; give --use-routing-replay, or let the run start its engines.",
        ),
        (
            info.num_stages > 1 and not (stays or args.debug_rollout_only),
            f"{name} has {info.num_stages} pipeline stages, which take the trainer's weights from files that stay: "
            "give --update-weight-transport disk and --update-weight-disk-keep-files, or start it with --pp-size 1.",
        ),
    )
    yield from (sentence for is_wrong, sentence in rows if is_wrong)


class ExternalEngine(EngineClient):
    """A server that is not ours. Picklable: trainers get it as it is, where engines of our own are Ray actors."""

    disk_load_format = "auto"
    is_ours = False

    def __init__(self, info: ExternalEngineInfo, *, rank: int) -> None:
        super().__init__(rank=rank)
        self.info = info
        protect_engine(self.url, info.key)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        protect_engine(self.url, self.info.key)  # each process knows the servers that it may send the key to

    @property
    def url(self) -> str:
        """`http://host:port` of the server."""
        return self.info.url

    def init_weights_update_group(
        self, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None:
        """As of `EngineClient`; leaves the group of an earlier run first, which the server has outlived."""
        with suppress(RuntimeError):  # there is none, which is as good
            self.destroy_weights_update_group(group_name)
        super().init_weights_update_group(master_address, master_port, rank_offset, world_size, group_name, backend)

    def shutdown(self) -> None:
        """Nothing: the server goes on."""


def start_external_rollout_servers(args: Args, router_url: str, *, first_rank: int = 0) -> list[ExternalEngine]:
    """Put the servers of `args.rollout_external_engine_infos` behind a router; those that are there already stay.

    Args:
        args: after `apply_external_engine_info_to_args`.
        router_url: a running router.
        first_rank: number of the first server among the engines of the run.

    Raises:
        UsageError: a server no longer answers, or the router does not take it.
    """
    known = set(server_control.list_workers_sync(router_url))
    engines = [ExternalEngine(info, rank=first_rank + i) for i, info in enumerate(args.rollout_external_engine_infos)]
    for engine in engines:
        if engine.url in known:
            continue
        try:
            server_control.register_worker_sync(router_url, engine.info.worker)
        except (HttpError, WaitTimeout) as error:
            raise UsageError(f"{FLAG} {engine.url}: {error}; is the server still running?") from None
    return engines
