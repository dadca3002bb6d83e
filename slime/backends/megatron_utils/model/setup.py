"""The trained model of one rank: Megatron's GPT in its data-parallel wrapper, with optimizer and schedule.

It builds and connects; it loads no weights and runs nothing.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import get_model_config

from slime.backends.megatron_utils.layers.fp8_linears import compute_in_fp8, train_in_fp8
from slime.backends.megatron_utils.layers.lora import attach_adapters
from slime.backends.megatron_utils.layers.mtp import PredictionClip, mark_predictions
from slime.backends.megatron_utils.layers.rounded_linear import round_weights_to_int4
from slime.backends.megatron_utils.layers.value_head import HEAD, is_value_model, replace_output_layer
from slime.backends.megatron_utils.model.model_weights import (
    EMBEDDING,
    is_tied_copy,
    iter_weights,
    keep_expert_biases_in_fp32,
    named_tensors,
)
from slime.backends.megatron_utils.model_provider import build_stage, config_kwargs, unwrap, virtual_stages_here
from slime.backends.megatron_utils.optimizer import held_by, keep_no_moments, make_moments, make_optimizer
from slime.config.args import Args
from slime.config.megatron.precision.fp8_forward_plan import Fp8Choice
from slime.config.megatron.precision.fp8_training_plan import Fp8Training
from slime.config.megatron.precision.int4_plan import Int4Training
from slime.config.rules.batch import check_schedule_length, check_warmup
from slime.utils import accelerator
from slime.utils.dp_schedule import decay_steps, total_train_steps, warmup_steps
from slime.utils.errors import nearest, refuse

logger = logging.getLogger(__name__)

NOTHING = "(?!)"
"""A regular expression that matches no name."""


class _Float16Model(Float16Module):
    """Megatron's wrapper of 16-bit models, which leaves the logits as they are.

    An fp32 copy has no more digits and costs twice the memory, and its gradient again; our losses compute in fp32 a
    few rows at a time.
    """

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """What the model returns."""
        return super().forward(*inputs, fp32_output=False, **kwargs)


@dataclass
class TrainState:
    """What a train step changes."""

    model: list[DistributedDataParallel]
    """Model chunks of this rank; several with interleaved pipeline stages."""
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler


def setup_model_and_optimizer(args: Args) -> TrainState:
    """Build model, optimizer and schedule; `initialize.init` has run on every rank before."""
    stages = virtual_stages_here(args)
    bare = [build_model(args, stage) for stage in stages]
    # A fresh value head is 0: frozen, the critic would say 0 of everything, whatever it learns elsewhere.
    head = rf"^{HEAD}\." if is_value_model(args) else NOTHING
    lists = {"only": args.only_train_params_name_list, "frozen": args.freeze_params_name_list}
    freeze_parameters(bare, **lists, always_trained=head)
    compute_in_fp8(bare, Fp8Choice.of(args))
    train_in_fp8(bare, Fp8Training.of(args))
    if not is_value_model(args):  # no engine runs it
        round_weights_to_int4(bare, Int4Training.of(args))
    attach_adapters(args, bare)
    if args.enable_mtp_training:
        mark_predictions([unwrap(module) for module in bare])
    ddp_config = gradient_buckets(args, bare[0])
    # Chunks behind the first reduce their gradients in one piece: other chunks compute meanwhile.
    model = [
        DistributedDataParallel(get_model_config(module), ddp_config, module, disable_bucketing=bool(stage))
        for module, stage in zip(bare, stages, strict=True)
    ]
    optimizer = _make_optimizer(args, model)
    if isinstance(optimizer, ChainedOptimizer):
        # Experts have an optimizer of their own. Where they alone are trained, the other one is empty on every rank,
        # and Megatron (0.16.1) cannot save it.
        parts = optimizer.chained_optimizers
        optimizer.chained_optimizers = [part for part in parts if not part.is_stub_optimizer]
    if args.enable_mtp_training:
        PredictionClip(optimizer)
    if args.use_stateless_adam:
        keep_no_moments(optimizer)
    connect(model, optimizer)
    return TrainState(model, optimizer, make_scheduler(args, optimizer))


def _make_optimizer(args: Args, model: list[DistributedDataParallel]) -> MegatronOptimizer:
    held = held_by(args)
    ours = {
        "optimizer_cpu_offload": False,
        "use_precision_aware_optimizer": False,
        "main_grads_dtype": torch.float32,
        "exp_avg_dtype": torch.float32,
    }
    config = OptimizerConfig(**config_kwargs(OptimizerConfig, args) | ours)
    if held is not None:
        return make_optimizer(config, model, held)
    accelerator.reserve_segment(_master_sizes(model))
    optimizer = get_megatron_optimizer(config, model)
    if not args.use_stateless_adam:
        make_moments(optimizer)  # the first step would put them between gradients and activations: holes, in a sleep
    return optimizer


def _master_sizes(model: list[DistributedDataParallel]) -> Iterator[int]:
    """Bytes of the fp32 copies that Megatron's optimizer makes of 16-bit parameters, each rank's share of them."""
    for chunk in model:
        for buffer in chunk.buffers + chunk.expert_parallel_buffers:
            if buffer.param_dtype != torch.float32:
                yield 4 * buffer.numel // buffer.data_parallel_world_size


def make_scheduler(args: Args, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """Return Megatron's scheduler of learning rate and weight decay, at its first step.

    Megatron counts its schedule in samples; so does this, so that its checkpoints stay readable. The scheduler also
    switches weight decay off for norms and biases (each step it writes `weight_decay * wd_mult` into the optimizer's
    groups): without it, Megatron's optimizer would decay them too.

    The flags of this command decide; a loaded checkpoint gives only the position, unless
    --use-checkpoint-opt-param-scheduler is set. So a run may be resumed to go further than it was first asked to.

    Raises:
        UsageError: a decay whose length is unknown, or into which the warm-up does not fit.
    """
    # A command line is refused for the same before anything starts, its actor's flags and a critic's entry.
    refuse([*check_schedule_length(args), *check_warmup(args)])
    total, decay, warmup = total_train_steps(args), decay_steps(args), warmup_steps(args)
    # Megatron asserts that a warm-up is shorter than the decay, also where nothing decays
    decay = max(decay or 1, int(warmup) + 1)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=args.lr_warmup_init,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=warmup * args.global_batch_size,
        lr_decay_steps=decay * args.global_batch_size,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.start_weight_decay,
        end_wd=args.end_weight_decay,
        wd_incr_steps=(total or 1) * args.global_batch_size,
        wd_incr_style=args.weight_decay_incr_style,
        use_checkpoint_opt_param_scheduler=args.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=not args.use_checkpoint_opt_param_scheduler,
        wsd_decay_steps=(args.lr_wsd_decay_iters or 0) * args.global_batch_size,
        lr_wsd_decay_style=args.lr_wsd_decay_style,
    )


def build_model(args: Args, vp_stage: int | None = None) -> torch.nn.Module:
    """This rank's part of the model, on its device, in the precision of the flags.

    Args:
        args: the flags.
        vp_stage: which of this rank's interleaved pipeline stages; None where it has one stage.
    """
    model = build_stage(args, vp_stage)
    if is_value_model(args):
        replace_output_layer(model)
    model = model.to(accelerator.current_device())
    if args.bf16 or args.fp16:
        model = _Float16Model(get_model_config(model), model)
        keep_expert_biases_in_fp32(model)
    return model


def gradient_buckets(args: Args, first: torch.nn.Module) -> DistributedDataParallelConfig:
    """Megatron's config of the data-parallel wrapper, one for all chunks of a rank: its optimizer insists on that.

    Args:
        args: the flags.
        first: the chunk whose gradients --ddp-num-buckets divides; those behind it have one bucket.
    """
    fields = config_kwargs(DistributedDataParallelConfig, args)
    if args.ddp_num_buckets is not None:
        # Megatron closes a bucket when it is full, with whole parameters: there may be fewer.
        fields["bucket_size"] = -(-sum(p.numel() for p in first.parameters()) // args.ddp_num_buckets)
    return DistributedDataParallelConfig(**fields)


def connect(model: list[DistributedDataParallel], optimizer: MegatronOptimizer) -> None:
    """Tell Megatron's schedules how to scale the loss, end the gradients' reduction and gather parameters."""
    config = get_model_config(model[0])
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    ddp_config = model[0].ddp_config
    if ddp_config.overlap_grad_reduce:
        of_chunks = [chunk.no_sync for chunk in model]
        config.no_sync_func = of_chunks if len(model) > 1 else of_chunks[0]


# ---- which parameters are trained


def freeze_parameters(
    models: Sequence[torch.nn.Module],
    *,
    only: Sequence[str] | None = None,
    frozen: Sequence[str] | None = None,
    always_trained: str = NOTHING,
) -> None:
    """Let only some parameters take gradients (--only-train-params-name-list, --freeze-params-name-list).

    A frozen parameter gets neither a place in Megatron's gradient buffers nor optimizer state; it stays in checkpoints
    and is sent to the engines like any other. Every rank calls this before the model is wrapped for data parallelism.
    Names are those of Megatron's modules in the whole model, whatever the layout: the copy of a tied embedding that
    the last pipeline stage has as its output layer is called as the embedding, so that both are trained or neither is.
    (Megatron sums their gradients in a collective that only stages with a trained copy enter.)

    Args:
        models: this rank's chunks, in Megatron's 16-bit wrapper or bare.
        only: regular expressions (re.search on names) of the parameters that stay trainable if they are, or
        frozen: of those that do not.
        always_trained: regular expression of parameters that stay trainable whatever the lists say.

    Raises:
        UsageError: an expression matches no parameter of any rank, or none is left to train.
    """
    option = "--only-train-params-name-list" if only else "--freeze-params-name-list"
    patterns = only or frozen
    if not patterns:
        return
    named = list(_named_parameters(models))
    can_be_trained = _of_all_ranks([(name, parameter.requires_grad) for name, parameter in named])
    trained = {
        name
        for name, can_be in can_be_trained.items()
        if can_be and (any(re.search(one, name) for one in patterns) == bool(only) or re.search(always_trained, name))
    }
    _check(option, patterns, can_be_trained, any_is_trained=bool(trained))
    kept = [pattern for pattern in frozen or () if _matches_only(pattern, always_trained, can_be_trained)]
    if kept and (not dist.is_initialized() or dist.get_rank() == 0):
        logger.warning(
            "%s %s freezes nothing: what it matches is always trained; leave it out", option, " ".join(kept)
        )
    for name, parameter in named:
        parameter.requires_grad_(name in trained)


def _named_parameters(models: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    for model in models:
        for (_, live), weight in zip(named_tensors(unwrap(model)), iter_weights(model), strict=True):
            if isinstance(live, torch.nn.Parameter):  # a buffer takes no gradient anyway
                yield EMBEDDING if is_tied_copy(model, weight) else weight.name, live


def _of_all_ranks(named: list[tuple[str, bool]]) -> dict[str, bool]:
    """Name -> whether the parameter takes a gradient: indexers, and prediction layers that never run, do not."""
    if not dist.is_initialized():
        return dict(named)
    everywhere: list[list[tuple[str, bool]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, named)
    return dict(sorted(pair for rank in everywhere for pair in rank))


def _check(option: str, patterns: Sequence[str], names: Collection[str], *, any_is_trained: bool) -> None:
    problems = [
        f"{option} {pattern!r} matches no parameter: {_hint(pattern, names)}"
        for pattern in patterns
        if not any(re.search(pattern, name) for name in names)
    ]
    if not problems and not any_is_trained:
        problems.append(f"{option} {' '.join(patterns)} freezes every parameter: nothing is left to train.")
    refuse(problems)


def _matches_only(pattern: str, other: str, names: Iterable[str]) -> bool:
    return all(re.search(other, name) for name in names if re.search(pattern, name))


def _hint(pattern: str, names: Collection[str]) -> str:
    r"""The nearest parts of names; numbers are \d+, so that what is shown can be used."""
    general = sorted({re.sub(r"(?<=\.)\d+(?=\.)", r"\\d+", name) for name in names})
    parts = [name.split(".") for name in general]
    pieces = {".".join(p[i:j]) for p in parts for i in range(len(p)) for j in range(i + 1, len(p) + 1)}
    if near := nearest(pattern, pieces, likeness=0.6):
        return f"did you mean {' or '.join(near)}?"
    return f"there are {', '.join(general)}."
