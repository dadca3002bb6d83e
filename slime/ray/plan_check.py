"""Whether a run fits into this machine, by the plan that `--dry-run` shows; and what a plan asks the machine for.

Called by every run before anything starts, so it imports nothing heavy; slime.plan does the arithmetic.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from pathlib import Path

from slime.config.args import Args
from slime.plan import EngineKind, Facts, make_plan
from slime.plan.devices import DEFAULT_GPU, DEVICES, Device, cpu_device, device_of_gpu
from slime.plan.fit import misfits
from slime.plan.layout import EngineGroup, slot_layout
from slime.utils.accelerator import cuda_is_available
from slime.utils.errors import UsageError
from slime.utils.host_memory import host_memory
from slime.weights.formats import WeightFormat, format_of_checkpoint

logger = logging.getLogger(__name__)

PLACEHOLDER = "placeholder"


def is_for_this_machine(args: Args) -> bool:
    """Whether a plan is for the memory that the run will find: not where its device is assumed or named, nor where
    the slots of a run without GPUs may be on other machines than this one."""
    if args.accelerator == "cpu":
        return not os.environ.get("RAY_ADDRESS")
    return args.plan_device is None and cuda_is_available()


def check_plan(args: Args) -> None:
    """Refuse a run that takes far more memory than this machine has; warn of one that may not fit.

    The prompt file is read only where the run does not fit with the prompts that are assumed without it.

    Raises:
        UsageError: it does not fit, by more than the plan may be wrong, and there is no --ignore-plan.
    """
    facts = Facts(
        device=find_device(args.accelerator, args.plan_device),
        engines=engine_kinds(args),
        weight_format=find_format(args.hf_checkpoint),
    )
    plan = make_plan(args, facts)
    if not plan.does_fit:
        from slime.plan.rows import read_rows_of  # with a tokenizer

        plan = make_plan(args, dataclasses.replace(facts, data=read_rows_of(args)[0]))
    found = misfits(plan.fit)
    is_certain = is_for_this_machine(args)
    if found.refused and is_certain and not args.ignore_plan:
        raise UsageError(found.refused)
    assumed = "" if is_certain else f" (planned for {plan.device.name}, which is assumed)"
    for sentence in [*found.refused, *found.doubtful]:
        logger.warning("%s%s", sentence, assumed)


def find_device(accelerator: str, given: str | None = None) -> Device:
    """The device of --plan-device, of this machine, or the default one where there is no GPU."""
    if accelerator == "cpu":
        return cpu_device(host_memory())
    if given or not cuda_is_available():
        return DEVICES[given or DEFAULT_GPU]
    import torch

    properties = torch.cuda.get_device_properties(0)
    return device_of_gpu(properties.name, properties.total_memory)


def find_format(hf_checkpoint: str | None) -> WeightFormat | None:
    """How --hf-checkpoint is quantised; None where that is refused, or where it cannot be read, which is said then."""
    try:
        return format_of_checkpoint(hf_checkpoint)
    except (UsageError, OSError, ValueError):
        return None


def engine_kinds(args: Args) -> list[EngineKind]:
    """Engines of the command line, with the ServerArgs values that slime and the user choose."""
    from slime.backends.sglang_utils.server_args import device_defaults

    layout, models = slot_layout(args), args.engine_models
    is_one = len(models) == 1 and len(models[0].groups) == 1
    found, slot = [], 0
    for model in models:
        defaults = device_defaults(args.accelerator, Path(model.model_path or ""))
        for group in model.groups:
            if slot == layout.num_engine_slots and (gap := layout.reward_offset - layout.engine_offset - slot) > 0:
                found.append(EngineKind(EngineGroup(PLACEHOLDER, gap, 1)))  # the trainer's slots, before the reward's
            slot += group.num_gpus
            kind = PLACEHOLDER if group.worker_type == PLACEHOLDER else f"{model.name} {group.worker_type}"
            found.append(
                EngineKind(
                    EngineGroup("" if is_one else kind, group.num_gpus, group.num_gpus_per_engine),
                    defaults | dict(group.settings),
                    serves_policy=model.model_path == args.hf_checkpoint,
                )
            )
    return found
