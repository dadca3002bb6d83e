"""FSDP2 over transformers models as a trainer backend, and the trainers over it.

Process groups, seeds, packs, losses, the learning-rate schedule and the weight sync are those of the Megatron backend,
with context parallelism alone: parameters, gradients and optimizer state are sharded over all ranks.
"""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from slime.backends.fsdp_utils.checkpoint import (
    TrainState,
    begin_checkpoint,
    load_checkpoint,
    load_tensors,
    moments,
    random_states,
    save_weights,
    set_random_states,
    weights,
)
from slime.backends.fsdp_utils.lora import adapters_of
from slime.backends.fsdp_utils.model import build_policy, inputs_of, make_mesh
from slime.backends.fsdp_utils.optimizer import OPTIMIZERS, local
from slime.backends.fsdp_utils.weights import WeightSource, load_hf, named_parameters, trained_parameters
from slime.backends.megatron_utils.actor import MegatronBackend, TrainerOver
from slime.backends.megatron_utils.checkpoint.hf_export import save_hf
from slime.backends.megatron_utils.checkpoint.iterations import UnfinishedCheckpoint
from slime.backends.megatron_utils.layers.lora import save_adapter
from slime.backends.megatron_utils.layers.value_head import is_value_model
from slime.backends.megatron_utils.loss import (
    DeferredLogits,
    ResponseLogits,
    get_log_probs_and_entropy,
    get_values,
    loss_function,
)
from slime.backends.megatron_utils.model.setup import make_scheduler
from slime.backends.megatron_utils.update_weight import connected_weight_updater
from slime.checkpoints.paths import classify_checkpoint, resolve_checkpoint_dir, saved_plan
from slime.config.megatron.arguments import model_shape
from slime.config.megatron.lora_plan import base_of
from slime.training.adapters import ADAPTER_DIR, take_adapter
from slime.training.backend import CheckpointSource, Layout
from slime.training.micro_batches import MicroBatches
from slime.training.reports import reduce_reports
from slime.training.trainer import CriticTrainer
from slime.utils import accelerator
from slime.utils.accelerator import memory_saver
from slime.utils.distributed_utils import barrier
from slime.utils.misc import needed
from slime.utils.train_data import MicroBatch, RolloutBatch
from slime.weights.adapters import PEFT_PREFIX

logger = logging.getLogger(__name__)


class FsdpBackend(MegatronBackend):
    """One rank of FSDP2; the process groups are Megatron's."""

    state: TrainState  # type: ignore[assignment]

    # ---- beginning and end

    def build(self) -> None:
        args, mesh = self.args, make_mesh(self.args)
        self._is_whole = mesh.size(mesh.ndim - 1) == 1  # there are no shards but copies of the model
        self._is_last = True
        policy = build_policy(args, mesh)
        # not a tower that sees nothing: torch looks for gradients of what was never gathered, and fails
        groups = [module for module in policy.modules() if isinstance(module, FSDPModule)]
        self._trained_groups = [x for x in groups if any(p.requires_grad for p in x.parameters())]
        optimizer = OPTIMIZERS[args.optimizer](args, trained_parameters(policy))
        self.state = TrainState(policy, optimizer, make_scheduler(args, cast(Any, optimizer)))
        self._source = WeightSource(policy, getattr(torch, args.params_dtype), args.hf_checkpoint)

    def layout(self) -> Layout:
        layout = super().layout()
        return Layout(layout.sizes, layout.dp_group, layout.dp_host_group, coupled=layout.dp_group)

    def sleep(self) -> None:
        # Communicators stay: FSDP2 holds torch's own groups, which `reload_process_groups` could not replace.
        barrier("its part before the trainer leaves the GPU", self.args.distributed_timeout_minutes * 60.0)
        self.state.optimizer.zero_grad()
        named_parameters(self.state.policy)  # sharded: nothing that was gathered is moved
        gc.collect()
        accelerator.empty_cache()
        memory_saver.pause()

    def wake_up(self) -> None:
        memory_saver.resume()
        accelerator.synchronize()

    # ---- weights

    def load(self, source: CheckpointSource) -> int | None:
        args, policy, iteration = self.args, self.state.policy, None
        has_adapters = args.lora_rank is not None and saved_plan(source.path, source.step) is not None
        if has_adapters:
            self.load(CheckpointSource(base_of(args), args.ref_ckpt_step, False, False))
        if classify_checkpoint(source.path) == "megatron":
            for sentence in load_checkpoint(source, self.state):
                if dist.get_rank() == 0:
                    logger.warning("%s", sentence)
            iteration = resolve_checkpoint_dir(source.path, source.step)[1]
        else:
            load_hf(policy, source.path)
        if source.is_start and args.lora_adapter_path is not None and not has_adapters:
            named = adapters_of(policy).items()
            take_adapter((([PEFT_PREFIX + name], adapter) for name, adapter in named), args.lora_adapter_path)
        logger.info("loaded %s", source.path)
        return iteration

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights(self.state.policy).items():
            yield name, local(tensor)

    def save_weights(self, directory: Path) -> None:
        save_weights(directory, self.state.policy)

    def load_weights(self, directory: Path) -> None:
        load_tensors(directory, weights(self.state.policy))

    def export_hf(self, path: Path) -> None:
        save_hf(self.args, self._source, path)

    # ---- training

    @torch.no_grad()
    def forward(self, micro_batches: MicroBatches, names: Sequence[str], *, prefix: str = "") -> RolloutBatch:
        args, policy = self.args, self.state.policy

        def read(batch: MicroBatch, output: Any) -> dict[str, torch.Tensor]:
            output = self._logits(batch, output)
            if "values" in names:
                return {"values": get_values(args, batch, output)}
            log_probs, entropy = get_log_probs_and_entropy(args, batch, output, with_entropy="entropy" in names)
            return {"log_probs": log_probs} | ({} if entropy is None else {"entropy": entropy})

        policy.eval()
        found = []
        for batch in micro_batches.of_step(None):
            columns = policy(inputs_of(batch), lambda output, batch=batch: read(batch, output))
            found.append({name: column.split(batch["response_lengths"]) for name, column in columns.items()})
        policy.train()  # what is gathered may stay so for the train step: whoever asks for weights shards it again
        columns_S = {f"{prefix}{name}": micro_batches.scatter([of_one[name] for of_one in found]) for name in names}
        return cast(RolloutBatch, columns_S)

    @contextmanager
    def updates(self) -> Iterator[None]:
        if self.args.reset_optimizer_states:
            self.state.optimizer.state.clear()
            self.state.optimizer.make_moments()
        yield
        named_parameters(self.state.policy)

    def update(self, micro_batches: MicroBatches, *, rollout_id: int, step_id: int) -> dict[str, float]:
        args, state = self.args, self.state
        global_batch_size = micro_batches.global_batch_sizes[step_id]
        reports = self._gradients(micro_batches, step_id)
        rates = [group["lr"] for group in state.optimizer.param_groups]
        norm = state.optimizer.update(clip_grad=args.clip_grad, skip_nan=args.check_for_nan_in_grad)
        if args.check_for_nan_in_grad and not math.isfinite(norm):
            raise RuntimeError(
                f"the gradient of rollout {rollout_id}, train step {step_id} has the norm {norm}, and weights would "
                "be lost; look at its rewards, log-probs and --lr (--no-check-for-nan-in-loss-and-grad goes on)"
            )
        state.scheduler.step(increment=global_batch_size)
        group = self.layout().dp_group
        metrics = reduce_reports(reports, None if args.calculate_per_token_loss else global_batch_size, group)
        metrics["grad_norm"] = norm
        metrics |= {f"lr-pg_{i}": rate for i, rate in enumerate(rates)}
        return metrics | {"global_batch_size": global_batch_size}

    def _gradients(self, micro_batches: MicroBatches, step_id: int) -> list[dict[str, Any]]:
        """Accumulate the gradients of a train step's micro-batches; FSDP2 averages them over the ranks."""
        args, world = self.args, dist.get_world_size()
        scale = {
            "num_microbatches": micro_batches.num_microbatches[step_id],
            "global_batch_size": micro_batches.global_batch_sizes[step_id],
            "dp_size": world,
        }
        factor = (
            world / max(self._num_tokens(micro_batches, step_id), 1)
            if args.calculate_per_token_loss
            else 1.0 / scale["num_microbatches"]
        )
        reports = []

        def loss_of(batch: MicroBatch, output: Any) -> torch.Tensor:
            loss, _, report = loss_function(args, batch, self._logits(batch, output), **scale)
            reports.append(report)
            return loss * factor

        for number, batch in enumerate(micro_batches.of_step(step_id), 1):
            self._expect(is_last=number == scale["num_microbatches"])
            self.state.policy(inputs_of(batch), lambda output, batch=batch: loss_of(batch, output)).backward()
        return reports

    def _expect(self, *, is_last: bool) -> None:
        """Leave gathered what was to stay so, and gradients where nobody has a part of them, until the last pass."""
        if is_last == self._is_last:
            return
        self._is_last = is_last
        for group in self._trained_groups:
            if self._is_whole or not self.args.fsdp_reshard_after_forward:
                group.set_reshard_after_backward(is_last, recurse=False)
            if self._is_whole:
                group.set_requires_gradient_sync(is_last, recurse=False)

    def _logits(self, batch: MicroBatch, output: Any) -> Any:
        """The model's output as the losses take it: logits of responses unless they are to be made in chunks; all of
        them, [1, T, V], for a loss of the user's own."""
        is_own = self.args.loss_type == "custom_loss"
        if not isinstance(output, DeferredLogits) or (self.args.recompute_loss_function and not is_own):
            return output
        if is_own:
            return output.of_rows()[None]
        return ResponseLogits(output.of_rows(batch["response_rows"]))

    def _num_tokens(self, micro_batches: MicroBatches, step_id: int) -> int:
        """Trained tokens of a train step over all ranks."""
        counts = [batch["full_loss_masks"].sum() for batch in micro_batches.of_step(step_id)]
        total = torch.stack(counts).sum()
        dist.all_reduce(total)  # context-parallel ranks have a part of each sample's
        return int(total)

    # ---- engines

    def connect_engines(self, engines: list[Any], engine_sizes: list[int], weight_version: int) -> None:
        self.updater = connected_weight_updater(
            self.args,
            self._source,
            engines,
            engine_sizes=engine_sizes,
            colocated=self.args.colocate,
            weight_version=weight_version,
            updater=self.updater,
        )

    def answers(self, tokens: Sequence[int]) -> tuple[list[float], list[float]]:
        """Return the log-probs of all tokens but the first, with adapters and without them (collective)."""
        found = super().answers(tokens)
        named_parameters(self.state.policy)  # what is gathered is without adapters, and would stay so
        return found

    # ---- checkpoints and copies

    def begin_save(
        self, rollout_id: int, *, write_more: Callable[[Path], None], root: Path | None = None
    ) -> UnfinishedCheckpoint:
        args = self.args

        def write_all(directory: Path) -> None:
            write_more(directory)
            if args.lora_rank is not None and not is_value_model(args):
                save_adapter(args, self._source, directory / ADAPTER_DIR)

        return begin_checkpoint(
            str(root or needed(args.save)),
            rollout_id,
            self.state,
            contents=args.checkpoint_contents,
            model_shape=model_shape(args) | {"train_backend": "fsdp"},
            write_more=write_all,
        )

    def state_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in (weights(self.state.policy) | moments(self.state)).items():
            yield name, local(tensor)

    def state_values(self) -> dict[str, Any]:
        return {
            "steps": self.state.optimizer.num_steps,
            "schedule": self.state.scheduler.state_dict(),
            "random": random_states(),
        }

    def restore_values(self, values: Mapping[str, Any]) -> None:
        self.state.optimizer.num_steps = values["steps"]
        self.state.scheduler.num_steps = 0  # Megatron's class adds the saved position to the present one
        self.state.scheduler.load_state_dict(values["schedule"])
        set_random_states(values["random"])


class FsdpTrainActor(TrainerOver):
    """One rank of the policy's trainer."""

    backend_class = FsdpBackend


class FsdpCriticActor(TrainerOver, CriticTrainer):
    """One rank of the critic."""

    backend_class = FsdpBackend
