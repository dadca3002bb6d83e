"""Weight sync of LoRA adapters: engines keep the model that they were started from, and get each version's adapter.

Before the pause, while engines generate, every rank gathers its part of the adapter; the source rank checks it and
copies it to the host. Then: pause, load version v+1, continue. Engines of ours (`engine_patches.serve_live_adapter`)
give requests the version that was loaded last; v leaves an engine when its last request has ended. Prefixes are cached
by adapter, so nothing is flushed.

An engine on the source rank's host gets tensors in shared memory. Engines elsewhere read a PEFT directory of the
version in --update-weight-disk-dir; so do all with --update-weight-transport disk.

Whenever engines are connected, be they new or not, the model under the adapters is compared once: a few elements of a
few tensors have to be the trainer's (`SyncChecks`), and the adapter's tensors are sent with checksums. After the first
sync with adapters that a 16-bit engine must show, each engine has to answer otherwise than without them; and in the
first syncs nearer to the trainer's log-probs with adapters than to those without, and its base the other way round.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from safetensors import SafetensorError

from slime.backends.megatron_utils.layers.lora import adapter_tensors
from slime.backends.megatron_utils.update_weight.base import WeightSyncError, WeightUpdater
from slime.backends.megatron_utils.update_weight.buckets import Bucket, check_versions
from slime.backends.megatron_utils.update_weight.engines import contact_of
from slime.backends.megatron_utils.update_weight.hf_weight_iterator import finish_param_gather, iter_hf_buckets
from slime.backends.sglang_utils.weight_transfer import (
    SharedRoom,
    SharedTensors,
    adapter_tensors_of,
    in_shared_memory,
)
from slime.config.args import Args
from slime.config.lora_policies import LoraPolicy
from slime.config.megatron.lora_plan import LoraPlan
from slime.training.adapters import peft_config, write_adapter
from slime.utils.errors import UsageError
from slime.utils.http.network import is_of_this_host
from slime.utils.misc import needed
from slime.weights.adapters import BASE, adapter_name, check_adapter, live_name
from slime.weights.formats import PACKED, format_of_checkpoint
from slime.weights.transports import FLAG, WeightDir

logger = logging.getLogger(__name__)

PROBE_TOKENS = range(1, 17)
"""A prompt whose log-probs have to move; every model has so many tokens."""
TRIES = 4
"""Syncs at which the trainer is asked for its log-probs, until they have moved far enough to compare."""
ROOM_DEADLINE_S = 300.0
FAINT = 1e-6
"""B times the scale; an adapter that is smaller everywhere, as after the first steps of a warm-up, may change no bit
of an engine's answers in bf16."""


@dataclass
class _Adapter:
    """One policy's adapter of one version, on the source rank.

    Attributes:
        policy: its name; None where there is one.
        config: of adapter_config.json, with the scale as alpha.
        tensors: what was gathered. shared: a copy in memory that engines share.
        answers: the trainer's log-probs of `PROBE_TOKENS` with the adapter, and without; None where it was not asked.
    """

    policy: str | None
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    shared: SharedTensors
    answers: tuple[list[float], list[float]] | None = None

    @property
    def largest(self) -> float:
        """The largest number of any B, times the scale."""
        of_b = (tensor for name, tensor in self.shared.tensors.items() if ".lora_B." in name)
        return max(float(tensor.abs().max()) for tensor in of_b) * self.config["lora_alpha"] / self.config["r"]


class AdapterUpdater(WeightUpdater):
    """Loads each version's LoRA adapter into the engines; of several policies all of them, as one version.

    Args:
        args: as of `WeightUpdater`, the `lora_*` flags, `update_weight_transport`, `update_weight_disk_dir`,
            `update_weight_disk_keep_files`, `output_dir`, `offload_rollout`.
        model: this rank's Megatron model chunks, or what has the weights and adapters of another backend.

    Attributes:
        policies: lets the model hold the adapter of each policy in turn; None where there is one.
        of_trainer: tokens -> the trainer's log-probs with the adapter that the model holds, and without (collective).
    """

    is_over_files = True  # no other way takes its place: engines cannot load weights under their adapters

    def __init__(self, args: Args, model: Any) -> None:
        super().__init__(args, model)
        root = args.update_weight_disk_dir
        keeps, run = args.update_weight_disk_keep_files, str(args.output_dir)
        self._dir = WeightDir(Path(root).absolute(), keeps_files=keeps, run=run) if root else None
        self.policies: Callable[[], Iterable[LoraPolicy]] | None = None
        self.of_trainer: Callable[[Sequence[int]], tuple[list[float], list[float]]] | None = None
        self._tries = TRIES
        self._max_rank = args.sglang_max_lora_rank or needed(args.lora_rank)
        self._readers: list[int] = []
        self._base: dict[str, tuple[int, ...]] = {}
        self._adapters: list[_Adapter] = []
        self._rooms: list[Future[SharedRoom]] = []
        self._making_room = ThreadPoolExecutor(1, thread_name_prefix="room for adapters")
        self._is_new = self._is_unseen = True
        self._pack_s = 0.0
        self._checked: dict[str | None, tuple[dict[str, Any], dict[str, tuple[int, ...]]]] = {}

    def _iterate(self) -> Iterator[Bucket]:
        """The model under the adapters."""
        return iter_hf_buckets(self.args, self.model, buffer_size=self.args.update_weight_buffer_size, merged=False)

    def _open_anew(self) -> None:
        self._is_new = self._is_unseen = True
        self._tries = TRIES
        self._by_source(self._choose_readers, also=(UsageError, OSError))

    def _choose_readers(self) -> None:
        """Which engines read files: those elsewhere, or all."""
        all_read = self.args.update_weight_transport == "disk"
        self._readers = [n for n, engine in self.fleet.engines.items() if all_read or _is_elsewhere(engine, n)]
        if not self._readers:
            return
        if self._dir is None:
            where = contact_of(self.fleet.engines[self._readers[0]], self._readers[0])
            raise UsageError(
                f"{where} is on another host than the trainer's first rank, and reads adapters from files; give a "
                f"directory that all hosts share as {FLAG}, or --lora-serve merged."
            )
        self._dir.claim(goes_on=self.weight_version > 0)

    def _prepare(self) -> None:
        if self._is_new:
            self._look_at_base()
        begin = time.monotonic()
        for chunk in self.model if isinstance(self.model, Sequence) else ():
            finish_param_gather(chunk)
        self._adapters = []
        for policy in (None,) if self.policies is None else self.policies():
            args = self.args if policy is None else policy.of(self.args)
            tensors, name = adapter_tensors(self.model), None if policy is None else policy.name
            asks = self._tries and self.of_trainer and not (args.offload_rollout or args.use_rollout_routing_replay)
            answers = self.of_trainer(PROBE_TOKENS) if self.of_trainer and asks else None
            ready = partial(self._make_ready, tensors, args, name, answers)
            self._by_source(ready, also=(OSError, SafetensorError))
        self._pack_s = time.monotonic() - begin

    def _look_at_base(self) -> None:
        """Note what the engines must hold under the adapters (collective)."""
        for bucket in self._buckets():
            self._base |= {name: tuple(tensor.shape) for name, tensor in bucket}
            packed = ((name, tensor.shape) for name, tensor in bucket if name.endswith(PACKED))
            self._base |= {name.removesuffix("_packed"): (n, 8 * columns) for name, (n, columns) in packed}
        for name in [name for name in self._base if name.endswith(".embed_tokens.weight")]:
            self._base.setdefault("lm_head.weight", self._base[name])  # it is tied, and sent once

    def _make_ready(self, tensors: dict[str, torch.Tensor], args: Args, policy: str | None, answers: Any) -> None:
        """Check the adapter, and copy it to the host, and to a file where engines read one."""
        begin = time.monotonic()
        config = self._config_of(tensors, args, policy)
        if policy is not None:  # the model holds another's soon
            tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        checked = time.monotonic()
        room = self._rooms.pop(0).result(ROOM_DEADLINE_S) if self._rooms else None
        had_room = time.monotonic()
        self._adapters.append(_Adapter(policy, config, tensors, in_shared_memory(tensors, room), answers))
        if room:
            self._making_room.submit(room.close)
        times = (checked - begin, had_room - checked, time.monotonic() - had_room)
        logger.info(
            "adapter of %d tensors: checked %.3f s, waited for memory %.3f s, copied %.3f s", len(tensors), *times
        )
        if self._readers:
            self._write(self._adapters[-1])

    def _config_of(self, tensors: dict[str, torch.Tensor], args: Args, policy: str | None) -> dict[str, Any]:
        """The adapter's configuration; what has the shapes of the last version has been checked with it."""
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        config, checked = self._checked.get(policy, ({}, {}))
        if shapes == checked:
            return config
        plan = needed(LoraPlan.of(args))
        config = peft_config(args) | {"lora_alpha": plan.scale * plan.rank}
        try:
            check_adapter(shapes, config, base=self._base, max_rank=self._max_rank)
        except ValueError as error:
            raise WeightSyncError(f"weight sync {self.weight_version}: {error}", is_final=True) from None
        self._checked[policy] = config, shapes
        return config

    def _path(self, adapter: _Adapter) -> Path:
        """The version's directory, in it one of each policy where there are several."""
        path = needed(self._dir).path(self.weight_version)
        return path / adapter.policy if adapter.policy else path

    def _write(self, adapter: _Adapter) -> None:
        """Write the adapter's directory; it has its name once it is complete."""
        path = self._path(adapter)
        path.parent.mkdir(exist_ok=True)
        unfinished = path.with_name(f"{path.name}.unfinished")
        for left in (path, unfinished):  # of a sync that failed
            needed(self._dir).remove(left)
        own = {name: tensor.clone() for name, tensor in adapter.shared.tensors.items()}
        write_adapter(own, adapter.config, unfinished)
        unfinished.rename(path)

    def _pause(self) -> None:
        """Stop the engines; a prefix cache is one adapter's, so that there is nothing to flush."""
        mode = "retract" if self.args.update_weights_in_flight else "abort"
        self.fleet.call("pause", mode, what="pausing generation")

    def _attempt(self) -> WeightSyncError | None:
        if not self.is_source:
            return None
        try:
            for adapter in self._adapters:
                self._load(adapter)
            if self._is_new:
                self.checks.compare(self.fleet, self.weight_version)
        except WeightSyncError as error:
            return error
        return None

    def _before_next_attempt(self) -> None:
        """Copy the adapter anew: checksums of a copy that was damaged would agree with it."""
        if self.is_source:
            for adapter in self._adapters:
                adapter.shared = in_shared_memory(adapter.tensors)

    def _load(self, adapter: _Adapter) -> None:
        """Have every engine load an adapter, and wait for all; their answers name the version that they serve."""
        name, calls = adapter_name(self.weight_version, adapter.policy), {}
        local = [number for number in self.fleet.engines if number not in self._readers]
        kept = None
        if local:
            sizes = [self.engine_sizes[number] for number in local]
            bodies, kept = adapter_tensors_of(adapter.shared, adapter.config, sizes, with_checksums=self._is_new)
            calls = self.fleet.some(local).start_each("load_adapter", [((name,), body) for body in bodies])
        if self._readers:
            path = str(self._path(adapter))
            calls |= self.fleet.some(self._readers).start("load_adapter", name, path=path)
        found = self.fleet.wait(calls, f"the load of adapter {name}")
        check_versions(self.fleet, dict(zip(calls, found, strict=True)), str(self.weight_version))
        del kept

    def _release(self) -> None:
        """Every engine has a copy of its own."""
        self._is_new = False
        if self._readers and self._dir is not None:
            self._dir.discard(self.weight_version)

    def _more_metrics(self) -> dict[str, float]:
        return {"perf/update_weights_pack_time": self._pack_s}

    def _update(self) -> dict[str, float]:
        metrics = super()._update()
        self._tries = max(0, self._tries - 1)
        self._by_source(self.see_that_it_is_served)
        adapters, self._adapters = self._adapters, []
        rooms = [(one.shared.data.nbytes, next(iter(one.tensors.values())).device) for one in adapters]
        self._rooms = [self._making_room.submit(SharedRoom, *room) for room in rooms]  # of the next version
        return metrics

    def see_that_it_is_served(self) -> None:
        """Once for connected engines: their answers differ from those of the model without adapters.

        Engines that gave their memory up have no cache to generate with yet; what they serve shows in
        `train/train_rollout_logprob_abs_diff`.
        """
        if not self._is_unseen or self.args.offload_rollout or min(one.largest for one in self._adapters) < FAINT:
            return
        base = self.fleet.wait(self._asked(BASE), "answering without the adapter")
        for adapter in self._adapters:
            asked = self._asked(live_name(adapter.policy) if adapter.policy else None)
            live = self.fleet.wait(asked, "answering with the adapter")
            for number, ours, theirs in zip(self.fleet.engines, live, base, strict=True):
                if ours == theirs:
                    raise WeightSyncError(
                        f"{contact_of(self.fleet.engines[number], number)} has loaded "
                        f"{adapter_name(self.weight_version, adapter.policy)}, and answers as without it",
                        is_final=True,
                    )
                if adapter.answers is not None:
                    self._check_move(adapter, contact_of(self.fleet.engines[number], number), ours, theirs)
        moves = [_distance(*one.answers) for one in self._adapters if one.answers is not None]
        self._is_unseen = bool(self._tries) and min(moves, default=math.inf) < self._least_move

    @property
    def _least_move(self) -> float:
        """Least move of log-probs that is told from what an engine and the trainer compute differently.

        In bf16 the two lie up to about 0.1 apart with experts; three times that says which of two answers is nearer.
        Over a quantised base they lie as far apart as its weights are rounded.
        """
        if format_of_checkpoint(self.args.hf_checkpoint) is not None:
            return 1.0
        return 1e-3 if self.args.params_dtype == "float32" else 0.3

    def _check_move(self, adapter: _Adapter, engine: Any, ours: list[float], base: list[float]) -> None:
        """An engine's log-probs have moved as the trainer's did, and those of the base have not."""
        live, without = needed(adapter.answers)
        if _distance(live, without) < self._least_move or self.args.rollout_temperature != 1.0:
            return
        name = adapter_name(self.weight_version, adapter.policy)
        if _distance(ours, live) >= _distance(ours, without):
            told = f"serves {name} otherwise than it was trained: its log-probs are nearer to the base's"
        elif _distance(base, without) >= _distance(base, live):
            told = f"has changed its base with {name}: what it answers without adapter is nearer to the trained one"
        else:
            return
        raise WeightSyncError(f"{engine} {told}", is_final=True)

    def _asked(self, adapter: str | None) -> Any:
        return self.fleet.start("prompt_log_probs", PROBE_TOKENS, adapter=adapter)


def _distance(one: Sequence[float], other: Sequence[float]) -> float:
    """Root of the mean square of the differences."""
    return math.dist(one, other) / math.sqrt(len(one))


def _is_elsewhere(engine: Any, number: int) -> bool:
    host = urlsplit(contact_of(engine, number).url).hostname
    return host is not None and not is_of_this_host(host)
