"""LoRA adapters of either backend: how A is drawn, PEFT's files, and the base under a checkpoint of adapters."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from slime.checkpoints.paths import classify_checkpoint, plan_in
from slime.config.args import Args
from slime.config.megatron.lora_plan import LoraPlan, base_of
from slime.utils.distributed_utils import gathered
from slime.utils.errors import UsageError
from slime.weights.adapters import PEFT_COPY

ADAPTER_DIR = "adapter"
"""The PEFT directory in a checkpoint."""
_BASE_TOLERANCE = 1e-9
"""Relative; sums in fp64 that differ only in the order of their terms agree to 1e-13."""


class AdapterSource(Protocol):
    """The adapters of a trainer that is not Megatron's."""

    def adapter_tensors(self) -> dict[str, torch.Tensor]:
        """As the function of that name."""


def draw_a(rank: int, columns: int, *, seed: str, is_gaussian: bool) -> torch.Tensor:
    """An A [rank, columns] as PEFT draws it, the same for the same seed."""
    generator, whole = torch.Generator().manual_seed(zlib.crc32(seed.encode())), torch.empty(rank, columns)
    if is_gaussian:
        return whole.normal_(0, 1 / rank, generator=generator)
    return whole.uniform_(-1, 1, generator=generator).div_(math.sqrt(columns))


# ---- the base under them


def refuse_adapters_alone(directory: Path, *, has_adapters: bool) -> bool:
    """Whether a checkpoint holds adapters, without what is under them.

    Raises:
        UsageError: it does, and the model has none.
    """
    saved = plan_in(directory)
    if saved is not None and not has_adapters:
        rank = saved["rank"]
        raise UsageError(
            f"{directory} holds LoRA adapters alone (rank {rank}); merged models are written by --save-hf."
        )
    return saved is not None


def compare_base(ours: float, saved: float, source: Path) -> None:
    """Refuse adapters that were trained over another base than the one that was loaded.

    Args:
        ours: sum of the absolute values of all frozen weights. saved: the checkpoint's. source: it, for the error.

    Raises:
        UsageError: they differ.
    """
    if abs(ours - saved) > _BASE_TOLERANCE * abs(saved):
        raise UsageError(
            f"{source} holds adapters of another base than the one that was loaded (sum of absolute weights "
            f"{saved:.12g}, here {ours:.12g}); give the base of that run as --ref-load "
            "(or as --hf-checkpoint, if it had no --ref-load)."
        )


# ---- PEFT


def write_adapter(tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any], directory: Path) -> None:
    """Make a PEFT directory of tensors on the host and their adapter_config.json."""
    directory.mkdir()
    save_file(dict(tensors), directory / "adapter_model.safetensors", metadata={"format": "pt"})
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def take_adapter(adapters: Iterable[tuple[Sequence[str], Any]], directory: str | Path) -> None:
    """Give adapters the values of a PEFT directory; all ranks call it.

    Args:
        adapters: (PEFT's name of each projection, what has `take`) of the adapters of this rank.
        directory: of PEFT.

    Raises:
        UsageError: a tensor is missing, left over, or of another shape.
    """
    file = Path(directory) / "adapter_model.safetensors"
    try:
        tensors = {name: tensor for name, tensor in load_file(file).items() if not name.endswith(PEFT_COPY)}
    except (OSError, SafetensorError) as error:
        raise UsageError(f"--lora-adapter-path: {file} cannot be read ({error}).") from error
    used: set[str] = set()
    for names, adapter in adapters:
        for number, name in enumerate(names):
            halves = {half: f"{name}.{half}.weight" for half in ("lora_A", "lora_B")}
            if missing := [key for key in halves.values() if key not in tensors]:
                raise UsageError(f"--lora-adapter-path: {file} has no {missing[0]}; it is of another model.")
            adapter.take(number, *(tensors[key] for key in halves.values()), source=f"{file}: {name}")
            used.update(halves.values())
    left = sorted(set(tensors) - set().union(*gathered(used)))
    if left:
        raise UsageError(f"--lora-adapter-path: {file} has {left[0]}, which these --lora-* flags do not train.")


def peft_config(args: Args) -> dict[str, Any]:
    """The adapter_config.json of the run's adapters; engines know no rank-stabilised scale, so alpha has it."""
    plan, base = LoraPlan.of(args), base_of(args)
    assert plan is not None, "without --lora-rank there are no adapters"
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base if classify_checkpoint(base) != "megatron" else str(args.hf_checkpoint),
        "r": plan.rank,
        "lora_alpha": plan.scale * plan.rank,
        "target_modules": plan.target_modules,
        "exclude_modules": None if plan.has_experts or not args.num_moe_experts else r".*\.mlp\.experts\..*",
        "lora_dropout": plan.dropout,
        "init_lora_weights": True if plan.init == "default" else plan.init,
        "bias": "none",
        "inference_mode": True,
    }
