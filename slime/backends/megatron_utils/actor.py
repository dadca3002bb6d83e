"""Megatron as a trainer backend, and the trainers over it: plain classes, which slime.ray wraps in Ray actors."""

from __future__ import annotations

import gc
import logging
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state

from slime.backends.megatron_utils import initialize
from slime.backends.megatron_utils.checkpoint.hf_export import save_hf
from slime.backends.megatron_utils.checkpoint.iterations import (
    UnfinishedCheckpoint,
    begin_checkpoint,
    load_checkpoint,
    load_weights,
    random_states,
    save_weights,
    set_random_states,
)
from slime.backends.megatron_utils.data import Packing
from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights
from slime.backends.megatron_utils.layers.lora import be_policy, load_adapter, save_adapter
from slime.backends.megatron_utils.layers.value_head import is_of_head, is_value_model
from slime.backends.megatron_utils.model.model_weights import is_of_adapter, named_tensors
from slime.backends.megatron_utils.model.setup import TrainState, setup_model_and_optimizer
from slime.backends.megatron_utils.optimizer import make_moments, parts_of, reset_optimizer_states, torch_optimizers
from slime.backends.megatron_utils.passes.forward import compute_log_probs, compute_values, train_one_step
from slime.backends.megatron_utils.passes.routing_replay import free_routing, recorded_routing, take_engine_routing
from slime.backends.megatron_utils.update_weight import WeightSyncError, connected_weight_updater, over_files_instead
from slime.backends.megatron_utils.update_weight.hf_weight_iterator import finish_param_gather
from slime.checkpoints.paths import classify_checkpoint, saved_plan
from slime.config.args import Args
from slime.config.lora_policies import LoraPolicy, policies_of
from slime.config.megatron.arguments import model_shape
from slime.config.megatron.lora_plan import base_of, served_plan
from slime.training.adapters import ADAPTER_DIR
from slime.training.backend import Backend, CheckpointSource, Layout
from slime.training.micro_batches import MicroBatches, to_tensors
from slime.training.trainer import CriticTrainer, Trainer
from slime.utils import accelerator
from slime.utils.accelerator import memory_saver
from slime.utils.accelerator.reloadable_process_group import destroy_process_groups, reload_process_groups
from slime.utils.distributed_utils import barrier
from slime.utils.misc import hook_args, load_function, needed
from slime.utils.train_data import RolloutBatch
from slime.weights.names import read_config

logger = logging.getLogger(__name__)
KEEP_WORLD = "SLIME_DESTROY_WORLD_PROCESS_GROUP"


class MegatronBackend(Backend):
    """One rank of Megatron.

    Args:
        args: the run's flags.
        where: of `initialize.init`.
    """

    state: TrainState

    def __init__(self, args: Args, where: Mapping[str, Any]) -> None:
        self.args = self._adapter_args = args
        self.updater: Any = None
        self._where = where

    # ---- beginning and end

    def join_ranks(self) -> None:
        initialize.init(self.args, **self._where)

    def build(self) -> None:
        if self.args.custom_megatron_init_path:
            load_function(self.args.custom_megatron_init_path)(hook_args(self.args))
        self.state = setup_model_and_optimizer(self.args)

    def layout(self) -> Layout:
        args = self.args
        stage_group = 1  # micro-batches that interleaved pipeline stages take at a time
        if args.virtual_pipeline_model_parallel_size is not None:
            stage_group = int(args.microbatch_group_size_per_vp_stage or args.pipeline_model_parallel_size)
        sizes = {
            "dp_size": parallel_state.get_data_parallel_world_size(),
            "dp_rank": parallel_state.get_data_parallel_rank(),
            "tp_size": parallel_state.get_tensor_model_parallel_world_size(),
            "tp_rank": parallel_state.get_tensor_model_parallel_rank(),
            "cp_size": parallel_state.get_context_parallel_world_size(),
            "cp_rank": parallel_state.get_context_parallel_rank(),
            "pp_size": parallel_state.get_pipeline_model_parallel_world_size(),
            "pp_rank": parallel_state.get_pipeline_model_parallel_rank(),
            "vpp_group": stage_group,
        }
        group = parallel_state.get_data_parallel_group()
        coupled = group if args.expert_model_parallel_size > 1 else None
        return Layout(sizes, group, parallel_state.get_data_parallel_group_gloo(), coupled)

    def sleep(self) -> None:
        # A rank asleep holds its CUDA context alone. Gradients are dropped: each step begins by zeroing them.
        barrier("its part before the trainer leaves the GPU", self.args.distributed_timeout_minutes * 60.0)
        accelerator.synchronize()
        destroy_process_groups(default_too=os.environ.get(KEEP_WORLD, "1") != "0")
        for chunk in self.state.model:
            chunk.offload_grad_buffers(synchronize=False, empty_cache=False)
        gc.collect()  # a tensor in a cycle of Python objects would be copied to the host
        accelerator.empty_cache()
        memory_saver.pause()  # all that torch has allocated moves to pinned host memory

    def wake_up(self) -> None:
        memory_saver.resume()
        reload_process_groups()
        for chunk in self.state.model:
            chunk.restore_grad_buffers(synchronize=False)
        accelerator.synchronize()

    def shutdown(self) -> None:
        initialize.shutdown()

    # ---- weights

    def load(self, source: CheckpointSource) -> int | None:
        args, state, iteration = self.args, self.state, None
        has_adapters = args.lora_rank is not None and saved_plan(source.path, source.step) is not None
        if has_adapters and not source.over_base:
            self.load(CheckpointSource(base_of(args), args.ref_ckpt_step, False, False))
        if classify_checkpoint(source.path) == "megatron":
            iteration = load_checkpoint(
                source, model=state.model, optimizer=state.optimizer, scheduler=state.scheduler
            )
        else:
            load_hf_weights(args, state.model, source.path)
        if source.is_start and args.lora_adapter_path is not None and not has_adapters:
            load_adapter(state.model, args.lora_adapter_path)
            state.optimizer.reload_model_params()
        elif classify_checkpoint(source.path) != "megatron":
            state.optimizer.reload_model_params()  # its fp32 copies are still those of the initial weights
        logger.info("loaded %s (iteration %s)", source.path, iteration)
        return iteration

    def be_policy(self, policy: LoraPolicy, *, anew: bool) -> None:
        args, state = policy.of(self.args), self.state
        self._adapter_args = args
        be_policy(args, state.model, draws_for=policy.name if anew else None)
        if anew:
            state.optimizer.reload_model_params()
            make_moments(state.optimizer)
            reset_optimizer_states(state.optimizer)
            state.scheduler.num_steps = 0
        for group in (group for one in torch_optimizers(state.optimizer) for group in one.param_groups):
            group |= {"max_lr": args.lr, "min_lr": min(args.min_lr, args.lr)}
        state.scheduler.step(increment=0)

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        is_whole, is_critic = self.args.lora_rank is None, is_value_model(self.args)
        for i, chunk in enumerate(self.state.model):
            for name, tensor in named_tensors(chunk):
                # the base under adapters never changes; a critic's head is trained beside them
                if is_whole or is_of_adapter(name) or (is_critic and is_of_head(name)):
                    yield f"{i}.{name}", tensor.data

    def save_weights(self, directory: Path) -> None:
        save_weights(directory, self.state.model)

    def load_weights(self, directory: Path) -> None:
        load_weights(directory, self.state.model)

    def export_hf(self, path: Path) -> None:
        save_hf(self.args, self.state.model, path)

    # ---- training

    def micro_batches(self, data: RolloutBatch) -> MicroBatches:
        args = self.args
        if args.use_rollout_routing_replay and not is_value_model(args):
            take_engine_routing(self.state.model, data, num_experts=needed(args.num_moe_experts))
        sizes, merge_size = self.layout().sizes, 0
        if "image_spans" in data:
            merge_size = read_config(args.hf_checkpoint).get("vision_config", {}).get("spatial_merge_size", 2)
        packing = Packing(
            multiple=sizes["tp_size"] * args.data_pad_size_multiplier,
            cp_rank=sizes["cp_rank"],
            cp_size=sizes["cp_size"],
            num_predictions=args.mtp_num_layers or 0 if args.enable_mtp_training else 0,
            count_multiple=sizes["vpp_group"],
            merge_size=merge_size,
        )
        return MicroBatches(data, packing)

    def forward(self, micro_batches: MicroBatches, names: Sequence[str], *, prefix: str = "") -> RolloutBatch:
        args, model = self.args, self.state.model
        if "values" in names:
            return compute_values(args, model, micro_batches)
        columns: RolloutBatch = {}
        routing: AbstractContextManager[None] = nullcontext()
        if prefix:
            routing = free_routing()
        elif args.use_routing_replay and not args.use_rollout_routing_replay:
            routing = recorded_routing(model, micro_batches, columns)
        with routing:
            with_entropy = "entropy" in names
            columns.update(
                compute_log_probs(args, model, micro_batches, store_prefix=prefix, with_entropy=with_entropy)
            )
        return columns

    @contextmanager
    def updates(self) -> Iterator[None]:
        if self.args.reset_optimizer_states:
            reset_optimizer_states(self.state.optimizer)
        yield
        # --overlap-param-gather leaves the last update for the next forward pass, which may be of swapped weights
        for chunk in self.state.model:
            finish_param_gather(chunk)

    def update(self, micro_batches: MicroBatches, *, rollout_id: int, step_id: int) -> dict[str, float]:
        return train_one_step(self.args, self.state, micro_batches, rollout_id=rollout_id, step_id=step_id)

    # ---- engines

    def connect_engines(self, engines: list[Any], engine_sizes: list[int], weight_version: int) -> None:
        self.updater = connected_weight_updater(
            self.args,
            self.state.model,
            engines,
            engine_sizes=engine_sizes,
            colocated=self.args.colocate,
            weight_version=weight_version,
            updater=self.updater,
        )

    def sync_weights(self, policies: Callable[[], Iterable[LoraPolicy]] | None = None) -> tuple[int, dict[str, float]]:
        if self.updater is None:
            raise RuntimeError("update_weights was called before connect_rollout_engines")
        if served_plan(self.args) is not None:
            self.updater.policies, self.updater.of_trainer = policies, self.answers
        try:
            metrics = self.updater.update()
        except WeightSyncError as error:
            self.updater = over_files_instead(self.updater, error)
            metrics = self.updater.update()
        return self.updater.weight_version, metrics

    def answers(self, tokens: Sequence[int]) -> tuple[list[float], list[float]]:
        """The log-probs of all tokens but the first, with adapters and without them (collective)."""
        share: Any = {"tokens": [list(tokens)], "response_lengths": [len(tokens) - 1]}
        share |= {"loss_masks": [[1] * (len(tokens) - 1)], "micro_batch_indices": [[0]]}
        data = to_tensors(share | {"num_microbatches": [1], "global_batch_sizes": [1]}, accelerator.current_device())
        batches = self.micro_batches(data).repacked(len(tokens), as_many_over=self.layout().coupled)

        def said() -> list[float]:
            found: Any = self.forward(batches, ("log_probs",), prefix="ref_")
            return found["ref_log_probs"][0].tolist()

        with_adapters = said()
        halves = [(tensor, tensor.clone()) for name, tensor in self.named_weights() if ".lora_B" in name]
        for live, _ in halves:
            live.zero_()
        without = said()
        for live, kept in halves:
            live.copy_(kept)
        return with_adapters, without

    # ---- checkpoints and copies

    def begin_save(
        self, rollout_id: int, *, write_more: Callable[[Path], None], root: Path | None = None
    ) -> UnfinishedCheckpoint:
        args, state = self.args, self.state

        def write_all(directory: Path) -> None:
            write_more(directory)
            is_of_one = root is not None or not policies_of(args)
            if args.lora_rank is not None and is_of_one and not is_value_model(args):
                save_adapter(self._adapter_args, state.model, directory / ADAPTER_DIR)

        return begin_checkpoint(
            root or needed(args.save),
            rollout_id,
            model=state.model,
            optimizer=state.optimizer,
            scheduler=state.scheduler,
            contents=[*args.checkpoint_contents, *(["schedule"] if args.use_stateless_adam else [])],
            model_shape=model_shape(args),
            write_more=write_all,
            in_background=args.async_save,
        )

    def state_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        optimizer = self.state.optimizer
        for chunk in self.state.model:
            finish_param_gather(chunk)
        for name, tensor in self.named_weights():
            yield f"model/{name}", tensor
        make_moments(optimizer)  # before the first step, so that there is something to copy or to restore into
        for number, of_torch in enumerate(torch_optimizers(optimizer)):
            params = [param for group in of_torch.param_groups for param in group["params"]]
            for place, param in enumerate(params):
                yield f"optimizer/{number}/{place}", param.detach()
                for name, value in of_torch.state.get(param, {}).items():
                    if torch.is_tensor(value):
                        yield f"optimizer/{number}/{place}/{name}", value

    def state_values(self) -> dict[str, Any]:
        optimizer = self.state.optimizer
        return {
            "groups": [
                [{name: value for name, value in group.items() if name != "params"} for group in of_torch.param_groups]
                for of_torch in torch_optimizers(optimizer)
            ],
            "scalers": [scaler.state_dict() for scaler in _scalers(optimizer)],
            "schedule": self.state.scheduler.state_dict(),
            "random": random_states(),
        }

    def restore_values(self, values: Mapping[str, Any]) -> None:
        optimizer, scheduler = self.state.optimizer, self.state.scheduler
        for of_torch, groups in zip(torch_optimizers(optimizer), values["groups"], strict=True):
            for group, kept in zip(of_torch.param_groups, groups, strict=True):
                group.update(kept)
        for scaler, kept in zip(_scalers(optimizer), values["scalers"], strict=True):
            scaler.load_state_dict(kept)
        scheduler.num_steps = 0  # Megatron adds the saved position to the present one
        scheduler.load_state_dict(values["schedule"])
        set_random_states(values["random"])


def _scalers(optimizer: Any) -> list[Any]:
    """The loss scales (fp16)."""
    found = [vars(part).get("grad_scaler") for part in parts_of(optimizer)]
    return [scaler for scaler in found if scaler is not None]


class TrainerOver(Trainer):
    """A trainer over Megatron, or over a backend with Megatron's process groups.

    Args:
        args: the run's flags.
        rank: among `world_size` trainer ranks.
        world_size: trainer ranks.
        master_addr: where rank 0 is reached,
        master_port: and its port; on rank 0 the socket that listens there already, or a port that is free.
        local_rank: which of its process's visible devices this rank uses.
    """

    backend: MegatronBackend
    backend_class: type[MegatronBackend] = MegatronBackend

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
        place = {"master_addr": master_addr, "master_port": master_port, "local_rank": local_rank}
        where = {"rank": rank, "world_size": world_size, **place}
        super().__init__(args, self.backend_class(args, where), rank=rank)

    @property
    def state(self) -> TrainState:
        """Megatron's model, optimizer and schedule."""
        return self.backend.state


class MegatronTrainActor(TrainerOver):
    """One rank of the policy's trainer."""


class MegatronCriticActor(TrainerOver, CriticTrainer):
    """One rank of the critic."""
