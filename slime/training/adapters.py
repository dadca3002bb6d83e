"""LoRA adapters of either backend: how A is drawn, PEFT's files, the base under a checkpoint of adapters, and several
policies over one base in one trainer (`Policies`).

The model has room for one set of adapters, and the optimizer for the state of one. Those of the policies whose turn it
is not lie in host memory, and all that a train step depends on is swapped: adapters, moments, learning rate, schedule
and random states. So a policy is trained as in a run of its own.
"""

from __future__ import annotations

import json
import logging
import math
import statistics
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from slime.checkpoints.paths import classify_checkpoint, plan_in
from slime.config.args import Args
from slime.config.lora_policies import FLAG, LoraPolicy, policies_of
from slime.config.megatron.lora_plan import LoraPlan, base_of
from slime.training.backend import Backend, CheckpointSource
from slime.utils.accelerator.tensor_backper import TensorBackuper
from slime.utils.distributed_utils import gathered
from slime.utils.errors import UsageError
from slime.weights.adapters import PEFT_COPY

logger = logging.getLogger(__name__)
MetricRecord = tuple[dict[str, float], str]

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


# ---- several policies over one base (--lora-policies): whose turn it is in the model


PART = "policies"
"""Directory of an iteration that holds a checkpoint root for each policy."""


class Policies:
    """The policies of a run; every rank calls every method.

    Args:
        args: the run's flags.
        backend: has built the model and loaded the base.
    """

    def __init__(self, args: Args, backend: Backend) -> None:
        self._policies = policies_of(args)
        self._backend = backend
        self._states = TensorBackuper(backend.state_tensors)
        self._weights = TensorBackuper(backend.named_weights)
        self._values: dict[str, dict[str, Any]] = {}
        self._live: LoraPolicy | None = None

    def begin(self, directory: Path | None, start: CheckpointSource, iteration: int | None) -> None:
        """Begin every policy, or go on with it.

        Args:
            directory: the iteration that the run goes on from; None where it begins.
            start: what of it to load.
            iteration: its number.

        Raises:
            UsageError: it was written by a run of one policy.
        """
        if directory is not None and not (directory / PART).is_dir():
            raise UsageError(
                f"--load {start.path} was written by a run without {FLAG}; begin anew with another --save and --load, "
                "or leave the flag out."
            )
        for policy in self._policies:
            self._backend.be_policy(policy, anew=True)
            root = None if directory is None else directory / PART / policy.name
            if root is not None and root.is_dir():
                source = replace(start, path=str(root), step=iteration, is_start=False, over_base=True)
                self._backend.load(source)
                self._backend.be_policy(policy, anew=False)
            elif root is not None:
                logger.warning("%s: %s has no policy %s, which begins anew", FLAG, directory, policy.name)
            self._live = policy
            self._keep()
        self._take_turn(self._policies[0])

    def turns(self) -> Iterator[LoraPolicy]:
        """Let the model hold each policy in turn, then the first again; what is trained in its turn is kept."""
        for policy in self._policies:
            self._take_turn(policy)
            yield policy
        self._take_turn(self._policies[0])

    def adapters(self) -> Iterator[LoraPolicy]:
        """Let the model hold the weights of each policy in turn, to be read."""
        self._keep()
        try:
            for policy in self._policies:
                self._show(policy)
                yield policy
        finally:  # also after a failure between two: what is kept next must be the first's own
            self._show(self._policies[0])

    def _show(self, policy: LoraPolicy) -> None:
        self._weights.restore(policy.name)
        self._backend.be_policy(policy, anew=False)

    def _take_turn(self, policy: LoraPolicy) -> None:
        if policy is self._live:
            return
        self._keep()
        self._states.restore(policy.name)
        self._backend.be_policy(policy, anew=False)
        self._backend.restore_values(self._values[policy.name])
        self._live = policy

    def _keep(self) -> None:
        assert self._live is not None, "`begin` comes first"
        self._states.backup(self._live.name)
        self._weights.backup(self._live.name)
        self._values[self._live.name] = self._backend.state_values()


def named_after(policy: LoraPolicy, records: Sequence[MetricRecord]) -> list[MetricRecord]:
    """Metric records of a policy's turn under names that say whose they are.

    >>> named_after(LoraPolicy(name="math"), [({"train/loss": 0.5, "train/step": 3}, "train/step")])
    [({'policy/math/train/loss': 0.5, 'train/step': 3}, 'train/step')]
    """
    return [
        ({name if name == step else f"policy/{policy.name}/{name}": value for name, value in metrics.items()}, step)
        for metrics, step in records
    ]


def over_policies(per_policy: Sequence[Sequence[MetricRecord]]) -> list[MetricRecord]:
    """Means over all policies, under the names of a run of one: of what every policy has.

    >>> over_policies([[({"train/loss": 1.0, "train/step": 3}, "train/step")], [({"train/loss": 2.0}, "train/step")]])
    [({'train/loss': 1.5}, 'train/step')]
    """
    found = []
    for of_all in zip(*per_policy, strict=True):
        common = [name for name in of_all[0][0] if all(name in metrics for metrics, _ in of_all)]
        means = {name: statistics.fmean(metrics[name] for metrics, _ in of_all) for name in common}
        found.append((means, of_all[0][1]))
    return found
