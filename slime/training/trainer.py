"""A rollout's training on one rank, over any backend: `Trainer`, and `CriticTrainer` for the value model of PPO.

Fetch the share -> reference, teacher and old log-probs, unless the loss gives them -> advantages -> hook -> one update
per train step. With a critic, another trainer on the same slot, its values come with the share, and the returns go to
it. The trainer decides the order of these and whose weights are in the model; the modules that it calls do each, and
the model's part is the backend's (`slime.training.backend`). slime.ray wraps a trainer in a Ray actor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from slime.algorithms.advantages import Advantages
from slime.algorithms.losses import KlController
from slime.checkpoints.paths import classify_checkpoint, resolve_checkpoint_dir
from slime.config.args import Args
from slime.config.lora_policies import policies_of
from slime.observability.profiler import Profiler, memory_after, recorder_of
from slime.observability.timer import Timer, timer
from slime.training.adapters import PART, Policies, named_after, over_policies
from slime.training.backend import Backend, CheckpointSource, UnfinishedSave
from slime.training.ci_checks import CiChecks
from slime.training.micro_batches import (
    REFERENCE,
    TEACHER,
    Columns,
    MicroBatches,
    keep_version,
    needs_old_log_probs,
    needs_reference,
    needs_teacher,
    passes_over,
    swapped_old_actor,
    to_host,
    to_tensors,
)
from slime.training.reports import TrainerRecorder, column_means, perf_metrics, save_train_data
from slime.training.resume import (
    DiskFull,
    load_moved_reference,
    note_state_of_data_source,
    prune_after_save,
    restore_controller,
    restore_tensors,
    write_resumed_state,
)
from slime.utils import accelerator
from slime.utils.accelerator.tensor_backper import TensorBackuper
from slime.utils.data import process_rollout_data
from slime.utils.distributed_utils import init_gloo_group
from slime.utils.misc import hook_args, load_function, needed
from slime.utils.train_data import RolloutBatch

MetricRecord = tuple[dict[str, float], str]
HF_PART = "hf"
"""The HF export's directory inside an iteration (--checkpoint-contents hf)."""


class Trainer:
    """One rank of the trainer.

    Args:
        args: the run's flags.
        backend: the model's side of this rank.
        rank: among all trainer ranks.
    """

    role = "actor"

    def __init__(self, args: Args, backend: Backend, *, rank: int) -> None:
        self.args = args
        self.backend = backend
        self._saving: tuple[int, UnfinishedSave] | None = None
        self._export_problem: str | None = None
        self.columns_for_critic: Columns = {}
        """What the critic trains on, of the last rollout; with a critic only."""
        self._records = TrainerRecorder(args, rank) if self.role == "actor" else None
        self._memory = recorder_of(args, rank, role=self.role)
        self._kl_controller = KlController(args.kl_coef)
        if args.kl_ctrl == "adaptive":
            self._kl_controller = KlController(args.kl_coef, args.kl_target, needed(args.kl_horizon))
        records = args.use_pytorch_profiler and rank in args.profile_ranks
        self._profiler = Profiler(
            Path(args.output_dir) / "profile" if records else "",
            rank=rank,
            targets=args.profile_target if records else (),
            rollouts=range(args.profile_step_start, args.profile_step_end),
        )

    def init(self) -> dict[str, int]:
        """Join the other ranks, build the model and load its weights (every rank calls it).

        Returns:
            "start_rollout_id": the first rollout to do, 0 unless a run is resumed.
        """
        args, backend = self.args, self.backend
        backend.join_ranks()
        if self._memory is not None:
            self._memory.start()
        init_gloo_group(timedelta(minutes=args.distributed_timeout_minutes))
        backend.build()
        self._weights = TensorBackuper(backend.named_weights)
        if needs_reference(args):
            if not load_moved_reference(args, self._resumed_dir(), backend):
                backend.load(CheckpointSource(needed(args.ref_load), args.ref_ckpt_step, False, False))
            self._weights.backup(REFERENCE)
        if needs_teacher(args):
            backend.load(CheckpointSource(needed(args.opd_teacher_load), args.opd_teacher_ckpt_step, False, False))
            self._weights.backup(TEACHER)
        with_optimizer = not args.no_load_optim and not args.use_stateless_adam
        start = CheckpointSource(
            args.load,
            args.ckpt_step,
            with_optimizer,
            not args.no_load_rng,
            is_start=True,
            load_schedule=args.use_stateless_adam and not args.no_load_optim,
        )
        iteration = backend.load(start)
        restore_controller(args, self._resumed_dir(), self._kl_controller)
        self._policies = Policies(args, backend) if policies_of(args) else None
        if self._policies is not None:
            self._policies.begin(self._resumed_dir(), start, iteration)
        self._checks = CiChecks(args, self._weights, role=self.role)
        Timer().start("train_wait")
        return {"start_rollout_id": 0 if iteration is None or args.finetune else iteration + 1}

    def parallel_config(self) -> dict[str, int]:
        """Sizes of the parallel layout and this rank's place in it (`Layout.sizes`)."""
        return dict(self.backend.layout().sizes)

    # ---- a rollout

    def train(
        self, rollout_id: int, refs: list[Any] | dict[str, list[Any]], columns: Columns | None = None
    ) -> list[MetricRecord]:
        """Train on one rollout.

        Args:
            rollout_id: which.
            refs: one Box of training data per data-parallel rank, with several policies of each by its name.
            columns: more columns of this rank's share, made by the other role: the critic's `values`.

        Returns:
            metric records over all ranks, except the times, which are this rank's.
        """
        if Timer().is_running("train_wait"):
            Timer().end("train_wait")
        with timer("train"):
            if isinstance(refs, dict):
                data, records = self._train_in_turns(rollout_id, refs)
            else:
                data = cast(RolloutBatch, self._fetch(refs) | (columns or {}))
                records = self.train_on(rollout_id, data)
        seconds = Timer().log_dict()
        Timer().reset()
        Timer().start("train_wait")
        perf = self._perf(seconds, data)
        return [({**perf, "rollout/step": rollout_id}, "rollout/step"), *records]

    def _train_in_turns(
        self, rollout_id: int, refs: Mapping[str, list[Any]]
    ) -> tuple[RolloutBatch, list[MetricRecord]]:
        """Train each policy on its samples; returns the lengths of all of them, and the records."""
        lengths: dict[str, list[int]] = {"total_lengths": [], "response_lengths": []}
        per_policy, named = [], []
        for policy in needed(self._policies).turns():
            data = self._fetch(refs[policy.name])
            per_policy.append(self.train_on(rollout_id, data))
            named += named_after(policy, per_policy[-1])
            for name, found in lengths.items():
                found += cast(dict[str, Any], data)[name]
        return cast(RolloutBatch, lengths), [*over_policies(per_policy), *named]

    def _fetch(self, refs: list[Any]) -> RolloutBatch:
        """This rank's share of a rollout."""
        with timer("data_preprocess"):
            layout = self.parallel_config()
            return process_rollout_data(self.args, refs, layout["dp_rank"], layout["dp_size"])

    def _perf(self, seconds: dict[str, float], data: RolloutBatch) -> dict[str, float]:
        return perf_metrics(self.args, seconds, data["total_lengths"], data["response_lengths"])

    def train_on(self, rollout_id: int, rollout_data: RolloutBatch) -> list[MetricRecord]:
        """Train on this rank's share of a rollout, given as plain lists (`train` without Ray and without times)."""
        with self._profiler.record("train_overall", rollout_id):
            records = self._train_on(rollout_id, rollout_data)
        if self._memory is not None:
            self._memory.end_rollout()
        return records

    def _train_on(self, rollout_id: int, rollout_data: RolloutBatch) -> list[MetricRecord]:
        args, micro_batches = self.args, self._pack(rollout_data)
        group = self.backend.layout().dp_group  # context-parallel ranks have the same columns
        if args.loss_type != "sft_loss" and args.compute_advantages_and_returns:
            with self._profiler.record("train_log_probs", rollout_id):
                self._add_log_probs(micro_batches)
            add_advantages = Advantages.of(args, self._kl_controller.coef)
            add_advantages(rollout_data, group if args.normalize_advantages else None)
        if args.rollout_data_postprocess_path:
            load_function(args.rollout_data_postprocess_path)(hook_args(args), rollout_id, rollout_data)
        rollout_metrics = {**column_means(micro_batches, group), "rollout/step": rollout_id}
        if args.kl_coef:
            rollout_metrics["rollout/kl_coef"] = self._kl_controller.coef
            self._kl_controller.update(rollout_metrics["rollout/kl"], sum(micro_batches.global_batch_sizes))
        self._checks.rollout(rollout_id, rollout_metrics)
        records: list[MetricRecord] = [(rollout_metrics, "rollout/step")]
        if args.use_critic:
            self.columns_for_critic = to_host({name: rollout_data[name] for name in ("values", "returns")})
        if rollout_id >= args.num_critic_only_steps:
            with self._profiler.record("train_actor", rollout_id):
                records += self._update(rollout_id, micro_batches)
        if args.save_debug_train_data is not None:
            save_train_data(args.save_debug_train_data, rollout_id, micro_batches, self.parallel_config())
        if self._records is not None and self._policies is None:  # a file holds the samples of one training
            self._records.record(rollout_id, micro_batches, self.parallel_config())
        if args.ref_update_interval and (rollout_id + 1) % args.ref_update_interval == 0:
            with timer("ref_model_update"):
                self._weights.backup(REFERENCE)
        return records

    def _pack(self, rollout_data: RolloutBatch) -> MicroBatches:
        """A share of plain lists as tensors, in its micro-batches."""
        with timer("data_preprocess"):
            return self.backend.micro_batches(to_tensors(rollout_data, accelerator.current_device()))

    def _add_log_probs(self, micro_batches: MicroBatches) -> None:
        """Add the log-prob columns that this rollout's training needs; the model holds the policy's weights after."""
        args, data = self.args, micro_batches.rollout_data
        with_reference, with_teacher = needs_reference(args), needs_teacher(args)
        with_old = needs_old_log_probs(args, micro_batches.num_steps * args.ppo_epochs)
        if not (with_reference or with_teacher or with_old):
            return
        batches = self._without_gradients(micro_batches)
        if with_reference:
            with timer("ref_log_probs"), self._weights.swapped(REFERENCE):
                data.update(self.backend.forward(batches, ("log_probs",), prefix="ref_"))
        if with_teacher:
            with timer("teacher_log_probs"), self._weights.swapped(TEACHER):
                data.update(self.backend.forward(batches, ("log_probs",), prefix="teacher_"))
        if with_old:
            names = ("log_probs", "entropy") if args.use_rollout_entropy else ("log_probs",)
            weights_of_old = swapped_old_actor(self._weights, data) if args.keep_old_actor else nullcontext()
            with timer("log_probs"), weights_of_old:
                data.update(self.backend.forward(batches, names))

    def _without_gradients(self, micro_batches: MicroBatches) -> MicroBatches:
        """The micro-batches of a pass without gradients, which may hold more tokens."""
        budget = self.args.log_probs_max_tokens_per_gpu
        if not self.args.use_dynamic_batch_size or budget == self.args.max_tokens_per_gpu:
            return micro_batches
        return micro_batches.repacked(needed(budget), as_many_over=self.backend.layout().coupled)

    def _update(self, rollout_id: int, micro_batches: MicroBatches, *, prefix: str = "train/") -> list[MetricRecord]:
        """Do every train step of a rollout; returns a record of each, its metrics' names behind `prefix`."""
        records: list[MetricRecord] = []
        with timer(f"{self.role}_train"), self.backend.updates():
            first_step = rollout_id * self.args.ppo_epochs * micro_batches.num_steps
            for position, (batches, step_id) in enumerate(self._steps(rollout_id, micro_batches)):
                metrics = self.backend.update(batches, rollout_id=rollout_id, step_id=step_id)
                self._checks.step(rollout_id, position, metrics)
                named = {f"{prefix}{name}": value for name, value in metrics.items()}
                records.append(({**named, "train/step": first_step + position}, "train/step"))
        return records

    def _steps(self, rollout_id: int, micro_batches: MicroBatches) -> Iterator[tuple[MicroBatches, int]]:
        """The train steps of all passes over a rollout."""
        layout = self.backend.layout()
        passes = passes_over(self.args, micro_batches, rollout_id, layout=layout.sizes, dp_group=layout.dp_host_group)
        for batches in passes:
            for step_id in range(batches.num_steps):
                yield batches, step_id

    # ---- checkpoints, and copies of this rank's state

    def save_model(self, rollout_id: int) -> None:
        """Write the checkpoint of a rollout to --save and its HF export to --save-hf; then delete what is too old.

        With --async-save the checkpoint is only begun; `finish_save` has to be called before the next.
        """
        args = self.args
        if args.save:
            unfinished = self.backend.begin_save(rollout_id, write_more=partial(self._write_more, rollout_id))
            if args.async_save:
                self._saving = (rollout_id, unfinished)
            else:
                unfinished.finish()
        self._export_problem = None
        if args.save_hf:
            try:
                self.backend.export_hf(Path(args.save_hf.format(rollout_id=rollout_id)))
            except DiskFull as error:  # the run goes on without it
                self._export_problem = str(error)
        if self._saving is None:
            self._prune(rollout_id)

    def _write_more(self, rollout_id: int, directory: Path) -> None:
        """Add to an unfinished iteration what is no weight and no optimizer state of the policy."""
        args = self.args
        if dist.get_rank() == 0:
            note_state_of_data_source(directory, needed(args.save), rollout_id)
        write_resumed_state(
            args, directory, backend=self.backend, weights=self._weights, controller=self._kl_controller
        )
        if "hf" in args.checkpoint_contents:
            self.backend.export_hf(directory / HF_PART)
        for policy in self._policies.turns() if self._policies is not None else ():
            root = directory / PART / policy.name
            self.backend.begin_save(rollout_id, write_more=lambda _: None, root=root).finish()

    def export_problem(self) -> str | None:
        """Return why the last save's HF export was not written."""
        return self._export_problem

    def save_is_written(self) -> bool:
        """Whether all files of this rank are written, so that `finish_save` returns without waiting."""
        return self._saving is None or self._saving[1].is_written

    def finish_save(self) -> None:
        """Complete the checkpoint that was begun, if one was (every rank calls it)."""
        if self._saving is not None:
            (rollout_id, unfinished), self._saving = self._saving, None
            unfinished.finish()
            self._prune(rollout_id)

    def _prune(self, rollout_id: int) -> None:
        args = self.args
        if dist.get_rank() == 0 and (args.keep_checkpoints is not None or args.save_retain_interval is not None):
            prune_after_save(args, rollout_id)

    def _resumed_dir(self) -> Path | None:
        """The iteration that this run goes on from, None where it begins."""
        args = self.args
        if args.finetune or classify_checkpoint(args.load) != "megatron":
            return None
        directory, iteration = resolve_checkpoint_dir(args.load, args.ckpt_step)
        return None if iteration is None else directory

    def state_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name -> live tensor of all that the next step depends on, in one order."""
        yield from self.backend.state_tensors()
        if self.args.ref_update_interval and REFERENCE in self._weights.tags:  # it moves while the run goes on
            for name, tensor in self._weights.copies(REFERENCE):
                yield f"reference/{name}", tensor

    def state_values(self) -> dict[str, Any]:
        """Everything else that it depends on."""
        return self.backend.state_values() | {"kl_coef": self._kl_controller.coef}

    def restore_state(self, pieces: Iterable[Mapping[str, Any]], values: Mapping[str, Any]) -> None:
        """Go on with the state of a rank in the same place of the same layout.

        Args:
            pieces: name -> the bytes of a tensor of `state_tensors`.
            values: of `state_values`.
        """
        restore_tensors(self.state_tensors(), pieces)
        self.backend.restore_values(values)
        self._kl_controller.coef = values["kl_coef"]

    # ---- engines, and whose turn it is on the GPU

    def connect_rollout_engines(self, engines: list[Any], engine_sizes: list[int], weight_version: int = 0) -> None:
        """Take over the engines to keep in step, how many devices each has, and which version of the weights an
        earlier trainer of this run has sent to them."""
        self.backend.connect_engines(engines, engine_sizes, weight_version)

    def update_weights(self) -> dict[str, float]:
        """Send the weights to the engines, and keep a copy of them with --keep-old-actor; returns metrics."""
        version, metrics = self.backend.sync_weights(None if self._policies is None else self._policies.adapters)
        if self.args.keep_old_actor:
            keep_version(self.args, self._weights, version)
        return metrics | memory_after("update_weights")

    def sleep(self) -> dict[str, float]:
        """Leave the GPU; nothing but `wake_up` and `shutdown` may be called until it is back.

        Returns:
            `perf/sleep_time` in seconds, and the memory in use then.
        """
        return _timed("sleep", self.backend.sleep)

    def wake_up(self) -> dict[str, float]:
        """Undo `sleep`; returns `perf/wake_up_time` and the memory in use then."""
        return _timed("wake_up", self.backend.wake_up)

    def shutdown(self) -> None:
        """Leave the process groups."""
        if self._memory is not None:
            self._memory.finish()
        self.backend.shutdown()
        if self._records is not None:
            self._records.finish()


def _timed(phase: str, move: Callable[[], None]) -> dict[str, float]:
    start = time.monotonic()
    move()
    return {f"perf/{phase}_time": time.monotonic() - start, **memory_after(phase)}


class CriticTrainer(Trainer):
    """One rank of the critic, the value model of PPO, on the same slot as the actor's of that rank.

    In a rollout it is called twice: before the actor's training for the values of its rank's share, and after it to
    train on the returns that the actor made of them (with the KL of the policy inside the rewards, which only the
    actor knows). It keeps nothing of a rollout between the two. Its args are `parse_megatron_role_args(args,
    "critic")`: `value_loss`, a value head, checkpoints of its own, no reference, no HF export. No engine gets its
    weights.
    """

    role = "critic"
    TIMES = ("critic_values", "critic_train")

    def compute_values(self, rollout_id: int, refs: list[Any]) -> Columns:
        """`values` of this rank's share of a rollout, before training on it.

        Args:
            rollout_id: which.
            refs: one Box of training data per data-parallel rank.
        """
        return self.values_of(self._fetch(refs))

    def values_of(self, rollout_data: RolloutBatch) -> Columns:
        """`compute_values` of a share that is given as plain lists."""
        micro_batches = self._pack(rollout_data)
        with timer("critic_values"):
            values = self.backend.forward(self._without_gradients(micro_batches), ("values",))["values"]
        return to_host({"values": values})

    def _train_on(self, rollout_id: int, rollout_data: RolloutBatch) -> list[MetricRecord]:
        return self._update(rollout_id, self._pack(rollout_data), prefix="train/critic-")

    def _perf(self, seconds: dict[str, float], data: RolloutBatch) -> dict[str, float]:
        return {f"perf/{name}_time": seconds[name] for name in self.TIMES if name in seconds}
