"""MegatronTrainActor: one rank of the trainer, as a plain class (slime.ray wraps it in a Ray actor).

A rollout's training on one rank: fetch the share -> reference, teacher and old log-probs, unless the loss gives them
-> advantages -> hook -> one update per train step. With a critic, another actor on the same slot, its values come with
the share, and the returns go to it (slime.backends.megatron_utils.critic). It knows the order of these and whose
weights are in the model; how each is done is in the modules that it calls. Engines are reached only through the weight
updater.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from slime.algorithms.kl import KlController
from slime.backends.megatron_utils import initialize
from slime.backends.megatron_utils.checkpoint.hf_export import save_hf
from slime.backends.megatron_utils.checkpoint.iterations import (
    CheckpointSource,
    UnfinishedCheckpoint,
    begin_checkpoint,
    load_checkpoint,
)
from slime.backends.megatron_utils.checkpoint.training_state import (
    load_moved_reference,
    note_state_of_data_source,
    restore_controller,
    restore_tensors,
    restore_values,
    state_tensors,
    state_values,
    write_resumed_state,
)
from slime.backends.megatron_utils.checkpoint.writing import DiskFull
from slime.backends.megatron_utils.data import Packing
from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights
from slime.backends.megatron_utils.layers.value_head import is_value_model
from slime.backends.megatron_utils.loss import compute_advantages_and_returns
from slime.backends.megatron_utils.model.model_weights import named_tensors
from slime.backends.megatron_utils.model.setup import TrainState, setup_model_and_optimizer
from slime.backends.megatron_utils.optimizer.optimizer_state import reset_optimizer_states
from slime.backends.megatron_utils.passes.forward_passes import add_log_probs
from slime.backends.megatron_utils.passes.routing_replay import take_engine_routing
from slime.backends.megatron_utils.passes.train_step import train_one_step
from slime.backends.megatron_utils.sleep import fall_asleep, wake_up
from slime.backends.megatron_utils.update_weight import WeightSyncError, connected_weight_updater, over_files_instead
from slime.backends.megatron_utils.update_weight.hf_weight_iterator import finish_param_gather
from slime.config.args import Args
from slime.config.megatron.arguments import model_shape
from slime.observability.profiler import Profiler, recorder_of
from slime.observability.timer import Timer, timer
from slime.training.ci_checks import CiChecks
from slime.training.micro_batches import Columns, MicroBatches, to_host, to_tensors
from slime.training.passes import REFERENCE, TEACHER, keep_version, needs_reference, needs_teacher, passes_over
from slime.training.pruning import prune_after_save
from slime.training.reports import column_means, perf_metrics, save_train_data
from slime.utils import accelerator
from slime.utils.checkpoint_paths import classify_checkpoint, resolve_checkpoint_dir
from slime.utils.data import process_rollout_data
from slime.utils.distributed_utils import init_gloo_group
from slime.utils.misc import hook_args, load_function, needed
from slime.utils.tensor_backper import TensorBackuper
from slime.utils.train_data import RolloutBatch

logger = logging.getLogger(__name__)

MetricRecord = tuple[dict[str, float], str]
HF_PART = "hf"
"""The HF export's directory inside an iteration (--checkpoint-contents hf)."""


class MegatronTrainActor:
    """One rank of the trainer.

    Args:
        args: the run's flags.
        rank: among `world_size` trainer ranks.
        world_size: trainer ranks.
        master_addr: where rank 0 is reached,
        master_port: and its port; on rank 0 the socket that listens there already, or a port that is free.
        local_rank: which of its process's visible devices this rank uses.
    """

    role = "actor"
    state: TrainState

    def __init__(
        self,
        args: Args,
        *,
        rank: int,
        world_size: int,
        master_addr: str,
        master_port: int | socket.socket,
        local_rank: int = 0,
    ) -> None:
        self.args = args
        self._where: dict[str, Any] = {
            "rank": rank,
            "world_size": world_size,
            "master_addr": master_addr,
            "master_port": master_port,
            "local_rank": local_rank,
        }
        self._updater: Any = None
        self._saving: tuple[int, UnfinishedCheckpoint] | None = None
        self.export_problem: str | None = None
        """Why the last save's HF export was not written."""
        self.columns_for_critic: Columns = {}
        """What the critic trains on, of the last rollout; with a critic only."""
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
        initialize.init(self.args, **self._where)
        if self._memory is not None:
            self._memory.start()
        init_gloo_group(timedelta(minutes=self.args.distributed_timeout_minutes))
        if self.args.custom_megatron_init_path:
            load_function(self.args.custom_megatron_init_path)(hook_args(self.args))
        self.state = setup_model_and_optimizer(self.args)
        self._weights = TensorBackuper(self._named_weights)
        if needs_reference(self.args):
            if not load_moved_reference(self.args, self._resumed_dir(), self.state.model):
                self._load(CheckpointSource(needed(self.args.ref_load), self.args.ref_ckpt_step, False, False))
            self._weights.backup(REFERENCE)
        if needs_teacher(self.args):
            self._load(
                CheckpointSource(needed(self.args.opd_teacher_load), self.args.opd_teacher_ckpt_step, False, False)
            )
            self._weights.backup(TEACHER)
        iteration = self._load(self._initial_source())
        restore_controller(self.args, self._resumed_dir(), self._kl_controller)
        self._checks = CiChecks(self.args, self._weights, role=self.role)
        Timer().start("train_wait")
        return {"start_rollout_id": 0 if iteration is None or self.args.finetune else iteration + 1}

    def parallel_config(self) -> dict[str, int]:
        """Sizes of the parallel layout and this rank's place in it."""
        return {
            "dp_size": parallel_state.get_data_parallel_world_size(),
            "dp_rank": parallel_state.get_data_parallel_rank(),
            "tp_size": parallel_state.get_tensor_model_parallel_world_size(),
            "tp_rank": parallel_state.get_tensor_model_parallel_rank(),
            "cp_size": parallel_state.get_context_parallel_world_size(),
            "cp_rank": parallel_state.get_context_parallel_rank(),
            "pp_size": parallel_state.get_pipeline_model_parallel_world_size(),
            "pp_rank": parallel_state.get_pipeline_model_parallel_rank(),
            "vpp_group": self._micro_batch_group(),
        }

    def _micro_batch_group(self) -> int:
        """Micro-batches that interleaved pipeline stages take at a time; 1 without such stages."""
        args = self.args
        if args.virtual_pipeline_model_parallel_size is None:
            return 1
        return int(args.microbatch_group_size_per_vp_stage or args.pipeline_model_parallel_size)

    def train(self, rollout_id: int, refs: list[Any], columns: Columns | None = None) -> list[MetricRecord]:
        """Train on one rollout.

        Args:
            rollout_id: which.
            refs: one Box of training data per data-parallel rank.
            columns: more columns of this rank's share, made by the other role: the critic's `values`.

        Returns:
            metric records over all ranks, except the times, which are this rank's.
        """
        if Timer().is_running("train_wait"):
            Timer().end("train_wait")
        with timer("train"):
            data = cast(RolloutBatch, self._fetch(refs) | (columns or {}))
            records = self.train_on(rollout_id, data)
        seconds = Timer().log_dict()
        Timer().reset()
        Timer().start("train_wait")
        perf = self._perf(seconds, data)
        return [({**perf, "rollout/step": rollout_id}, "rollout/step"), *records]

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
        if args.loss_type != "sft_loss" and args.compute_advantages_and_returns:
            with self._profiler.record("train_log_probs", rollout_id):
                add_log_probs(args, self.state.model, self._weights, micro_batches)
            compute_advantages_and_returns(args, rollout_data, self._kl_controller.coef)
        if args.rollout_data_postprocess_path:
            load_function(args.rollout_data_postprocess_path)(hook_args(args), rollout_id, rollout_data)
        group = parallel_state.get_data_parallel_group()  # context-parallel ranks have the same columns
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
        if args.ref_update_interval and (rollout_id + 1) % args.ref_update_interval == 0:
            with timer("ref_model_update"):
                self._weights.backup(REFERENCE)
        return records

    def _pack(self, rollout_data: RolloutBatch) -> MicroBatches:
        """A share of plain lists as tensors, in its micro-batches."""
        with timer("data_preprocess"):
            to_tensors(rollout_data, accelerator.current_device())
            if self.args.use_rollout_routing_replay and not is_value_model(self.args):
                take_engine_routing(self.state.model, rollout_data, num_experts=needed(self.args.num_moe_experts))
            layout = self.parallel_config()
            packing = Packing(
                multiple=layout["tp_size"] * self.args.data_pad_size_multiplier,
                cp_rank=layout["cp_rank"],
                cp_size=layout["cp_size"],
                num_predictions=self.args.mtp_num_layers or 0 if self.args.enable_mtp_training else 0,
                count_multiple=layout["vpp_group"],
            )
            return MicroBatches(rollout_data, packing)

    def _update(self, rollout_id: int, micro_batches: MicroBatches, *, prefix: str = "train/") -> list[MetricRecord]:
        """Do every train step of a rollout; returns a record of each, its metrics' names behind `prefix`."""
        args = self.args
        records: list[MetricRecord] = []
        if args.reset_optimizer_states:
            reset_optimizer_states(self.state.optimizer)
        with timer(f"{self.role}_train"):
            first_step = rollout_id * args.ppo_epochs * micro_batches.num_steps
            for position, (batches, step_id) in enumerate(self._steps(rollout_id, micro_batches)):
                metrics = train_one_step(args, self.state, batches, rollout_id=rollout_id, step_id=step_id)
                self._checks.step(rollout_id, position, metrics)
                named = {f"{prefix}{name}": value for name, value in metrics.items()}
                records.append(({**named, "train/step": first_step + position}, "train/step"))
            # --overlap-param-gather leaves the last update for the next forward pass, which may be of swapped weights
            for chunk in self.state.model:
                finish_param_gather(chunk)
        return records

    def _steps(self, rollout_id: int, micro_batches: MicroBatches) -> Iterator[tuple[MicroBatches, int]]:
        """The train steps of all passes over a rollout."""
        layout, group = self.parallel_config(), parallel_state.get_data_parallel_group_gloo()
        for batches in passes_over(self.args, micro_batches, rollout_id, layout=layout, dp_group=group):
            for step_id in range(batches.num_steps):
                yield batches, step_id

    def save_model(self, rollout_id: int) -> None:
        """Write the checkpoint of a rollout to --save and its HF export to --save-hf; then delete what is too old.

        With --async-save the checkpoint is only begun; `finish_save` has to be called before the next.
        """
        args, model = self.args, self.state.model
        if args.save:
            unfinished = begin_checkpoint(
                args.save,
                rollout_id,
                model=model,
                optimizer=self.state.optimizer,
                scheduler=self.state.scheduler,
                contents=args.checkpoint_contents,
                model_shape=model_shape(args),
                write_more=lambda directory: self._write_more(directory, rollout_id),
                in_background=args.async_save,
            )
            if args.async_save:
                self._saving = (rollout_id, unfinished)
            else:
                unfinished.finish()
        self.export_problem = None
        if args.save_hf:
            self._export(Path(args.save_hf.format(rollout_id=rollout_id)))
        if self._saving is None:
            self._prune(rollout_id)

    def state_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors that the next step depends on, live (`training_state`)."""
        moves_reference = bool(self.args.ref_update_interval) and REFERENCE in self._weights.tags
        return state_tensors(self.state, self._weights, moves_reference=moves_reference)

    def state_values(self) -> dict[str, Any]:
        """Everything else that it depends on."""
        return state_values(self.state, self._kl_controller)

    def restore_state(self, pieces: Iterable[Mapping[str, Any]], values: Mapping[str, Any]) -> None:
        """Go on with the state of a rank in the same place of the same layout.

        Args:
            pieces: name -> the bytes of a tensor of `state_tensors`.
            values: of `state_values`.
        """
        restore_tensors(self.state_tensors(), pieces)
        restore_values(self.state, self._kl_controller, values)

    def save_is_written(self) -> bool:
        """Whether `finish_save` has nothing to wait for on this rank."""
        return self._saving is None or self._saving[1].is_written

    def finish_save(self) -> None:
        """Complete the checkpoint that was begun, if one was (every rank calls it)."""
        if self._saving is not None:
            (rollout_id, unfinished), self._saving = self._saving, None
            unfinished.finish()
            self._prune(rollout_id)

    def _export(self, path: Path) -> None:
        """Write an HF export; a run goes on without one that does not fit on its disk."""
        try:
            save_hf(self.args, self.state.model, path)
        except DiskFull as error:
            self.export_problem = str(error)

    def _prune(self, rollout_id: int) -> None:
        args = self.args
        if dist.get_rank() == 0 and (args.keep_checkpoints is not None or args.save_retain_interval is not None):
            prune_after_save(args, rollout_id)

    def _write_more(self, directory: Path, rollout_id: int) -> None:
        """Add to an unfinished iteration what is no weight and no optimizer state of the policy."""
        args, model = self.args, self.state.model
        if dist.get_rank() == 0:
            note_state_of_data_source(directory, needed(args.save), rollout_id)
        write_resumed_state(args, directory, model=model, weights=self._weights, controller=self._kl_controller)
        if "hf" in args.checkpoint_contents:
            save_hf(args, model, directory / HF_PART)

    def connect_rollout_engines(self, engines: list[Any], engine_sizes: list[int], weight_version: int = 0) -> None:
        """Tell the weight updater which engines to keep in step, how many devices each has, and which version of the
        weights an earlier trainer of this run has sent to them."""
        self._updater = connected_weight_updater(
            self.args,
            self.state.model,
            engines,
            engine_sizes=engine_sizes,
            colocated=self.args.colocate,
            weight_version=weight_version,
            updater=self._updater,
        )

    def update_weights(self) -> dict[str, float]:
        """Send the weights to the engines, and keep a copy of them with --keep-old-actor; returns metrics."""
        if self._updater is None:
            raise RuntimeError("update_weights was called before connect_rollout_engines")
        try:
            metrics = self._updater.update()
        except WeightSyncError as error:
            self._updater = over_files_instead(self._updater, error)
            metrics = self._updater.update()
        if self.args.keep_old_actor:
            keep_version(self.args, self._weights, self._updater.weight_version)
        return metrics

    def sleep(self) -> None:
        """Leave the GPU; nothing but `wake_up` and `shutdown` may be called until it is back."""
        fall_asleep(self.state.model, deadline_s=self.args.distributed_timeout_minutes * 60.0)

    def wake_up(self) -> None:
        """Undo `sleep`."""
        wake_up(self.state.model)

    def shutdown(self) -> None:
        """Leave the process groups."""
        if self._memory is not None:
            self._memory.finish()
        initialize.shutdown()

    # ---- weights

    def _named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for i, chunk in enumerate(self.state.model):
            for name, tensor in named_tensors(chunk):
                yield f"{i}.{name}", tensor.data

    def _initial_source(self) -> CheckpointSource:
        args = self.args
        with_optimizer = not args.no_load_optim and not args.use_stateless_adam
        return CheckpointSource(args.load, args.ckpt_step, with_optimizer, not args.no_load_rng)

    def _resumed_dir(self) -> Path | None:
        """The iteration that this run goes on from, None where it begins."""
        args = self.args
        if args.finetune or classify_checkpoint(args.load) != "megatron":
            return None
        directory, iteration = resolve_checkpoint_dir(args.load, args.ckpt_step)
        return None if iteration is None else directory

    def _load(self, source: CheckpointSource) -> int | None:
        """Load weights, and what else `source` says; returns the Megatron checkpoint's iteration."""
        state, iteration = self.state, None
        if classify_checkpoint(source.path) == "megatron":
            iteration = load_checkpoint(
                source, model=state.model, optimizer=state.optimizer, scheduler=state.scheduler
            )
        else:
            load_hf_weights(self.args, state.model, source.path)
            state.optimizer.reload_model_params()  # its fp32 copies are still those of the initial weights
        logger.info("loaded %s (iteration %s)", source.path, iteration)
        return iteration
