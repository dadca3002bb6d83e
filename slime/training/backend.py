"""What a rollout's training needs of a trainer backend: one Protocol, which each backend implements for one rank.

`slime.training.trainer.Trainer` is the only caller. Each rank of the trainer has one `Backend` object in its own
process. Verbs marked *collective* are called by every rank, in the same order; the others concern this rank alone.

| verbs | when |
|---|---|
| `join_ranks`, `build` | once, in this order |
| `layout` | at any time after `join_ranks` |
| `load`, `load_weights` | after `build`: reference, teacher, then the policy |
| `be_policy` | after `load`, and again and again, where the run has several policies |
| `named_weights` | to copy the model's weights, or to put others in their place |
| `micro_batches`, `forward`, `updates`, `update` | for each rollout, in this order |
| `connect_engines`, `sync_weights` | the second after each rollout, or every few |
| `begin_save`, `save_weights`, `export_hf` | when a checkpoint is due |
| `state_tensors`, `state_values`, `restore_values` | for copies of this rank's state in another process's memory |
| `sleep`, `wake_up` | in turn: engines, or another role, use the GPU between them |
| `shutdown` | at the end |

`S` = samples of this rank's share, `R` = response tokens of one sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from slime.config.lora_policies import LoraPolicy
from slime.training.micro_batches import MicroBatches
from slime.utils.train_data import RolloutBatch


@dataclass(frozen=True)
class Layout:
    """The parallel layout, and this rank's place in it."""

    sizes: Mapping[str, int]
    """`dp_size`, `tp_size`, `cp_size`, `pp_size`: ranks along each axis; `dp_rank`, `tp_rank`, `cp_rank`, `pp_rank`:
    this one's; `vpp_group`: micro-batches of a pass are a multiple of it. The ranks of one copy of the model, those of
    one `dp_rank`, get the same share of a rollout."""
    dp_group: dist.ProcessGroup
    """The ranks that have this one's place in each copy of the model, in the order of `dp_rank`, for tensors on the
    device."""
    dp_host_group: dist.ProcessGroup
    """The same ranks, for objects and tensors of the host."""
    coupled: dist.ProcessGroup | None
    """The ranks that take part in each other's forward passes, so that all of them must have equally many
    micro-batches in a pass; None where each copy of the model computes by itself."""


@dataclass(frozen=True)
class CheckpointSource:
    """What to load."""

    path: str
    """Checkpoint root (the directory with the tracker file), or an HF directory."""
    step: int | None = None
    """Iteration; None takes the one that the tracker names."""
    load_optimizer: bool = True
    """Also the optimizer's state and the schedule, where the checkpoint has them."""
    load_rng: bool = True
    """Also the random states, where it has them; only a run with the same parallel layout can use them."""
    is_start: bool = False
    """What training starts from, and not the reference or a teacher."""
    over_base: bool = False
    """Of adapters: the base under them is loaded already."""
    load_schedule: bool = False
    """The schedule alone: of an optimizer that keeps no state."""


class UnfinishedSave(Protocol):
    """A checkpoint of which some files may still be being written; it has no name of its own before `finish`."""

    @property
    def is_written(self) -> bool:
        """Whether all files of this rank are written, so that `finish` returns without waiting."""

    def finish(self) -> Path:
        """Wait until all is written and give the checkpoint its name (collective); returns its directory.

        Raises:
            DiskFull: the disk became full; nothing of it is left, and the checkpoint before is still in force.
        """


class Backend(Protocol):
    """One rank of a trainer: model, optimizer, learning-rate schedule, and how they are spread over ranks."""

    # ---- beginning and end

    def join_ranks(self) -> None:
        """Take this rank's device and form the process groups (collective). Random states are seeded."""

    def build(self) -> None:
        """Build model, optimizer and schedule (collective), after hooks of initialisation; no weights are loaded."""

    def layout(self) -> Layout:
        """Return the parallel layout; its groups are valid until the next `sleep`."""

    def sleep(self) -> None:
        """Leave the GPU (collective): only `wake_up` and `shutdown` may follow.

        Raises:
            WaitTimeout: a rank did not come; the message names it.
        """

    def wake_up(self) -> None:
        """Undo `sleep` (collective): weights and optimizer state are, bit by bit, those before it."""

    def shutdown(self) -> None:
        """Leave the process groups; a process that has not joined any may call it, too."""

    # ---- weights

    def load(self, source: CheckpointSource) -> int | None:
        """Load weights, and what else `source` asks for, from a checkpoint or an HF directory (collective).

        The optimizer's own copies of weights are made anew from what was loaded, unless its state is loaded.

        Returns:
            the iteration of the checkpoint; None for an HF directory or a release.

        Raises:
            UsageError: there is no such checkpoint, or it does not fit the model.
        """

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, live tensor) of all that this rank holds of the model, always in the same order.

        Writing to the tensors changes the model and no optimizer state: `TensorBackuper` swaps sets of weights so.
        """

    def save_weights(self, directory: Path) -> None:
        """Write the weights that the model holds to a new directory (collective), without a name or a tracker."""

    def load_weights(self, directory: Path) -> None:
        """Load what `save_weights` wrote, whatever the parallel layout was (collective)."""

    def export_hf(self, path: Path) -> None:
        """Write the weights as an HF directory (collective).

        Raises:
            DiskFull: it does not fit; what was at `path` before is still there.
        """

    def be_policy(self, policy: LoraPolicy, *, anew: bool) -> None:
        """Multiply adapters by this policy's scale, and update them at its rate, from now on (collective).

        Args:
            policy: of --lora-policies.
            anew: give them its first values, too, and the optimizer none of its state.
        """

    # ---- training

    def micro_batches(self, data: RolloutBatch) -> MicroBatches:
        """Pack a share for the model.

        Args:
            data: of tensors (`to_tensors`), with the schedule's columns. A backend may take columns out that are meant
                for its layers (`rollout_routed_experts`) and add others.
        """

    def forward(self, micro_batches: MicroBatches, names: Sequence[str], *, prefix: str = "") -> RolloutBatch:
        """Run the model over a whole share without gradients (collective); the model is as before afterwards.

        Args:
            micro_batches: as of `micro_batches`, perhaps packed anew with more tokens each (`MicroBatches.repacked`).
            names: what to compute: ("log_probs",), ("log_probs", "entropy") or, of a critic, ("values",).
            prefix: says whose weights the model holds: "" the policy's, "ref_" or "teacher_".

        Returns:
            {prefix + name: [S][R] float32}, in the order of the share, the same on every rank of one copy of the
            model; and what a backend wants to find in the rollout when it trains (`routed_experts`). Equal weights and
            equal packing give equal bits, also in the forward pass of `update`.
        """

    def updates(self) -> AbstractContextManager[None]:
        """Enclose all updates of a rollout (collective); then the weights are whole, and may be read or swapped."""

    def update(self, micro_batches: MicroBatches, *, rollout_id: int, step_id: int) -> dict[str, float]:
        """Do one train step (collective): gradients of its micro-batches, then the optimizer and the schedule.

        Args:
            micro_batches: the share, with every column that the loss reads.
            rollout_id: for hooks.
            step_id: which of its train steps.

        Returns:
            metrics over all ranks, the same on each: what the loss reports, `grad_norm` before clipping (absent where
            a 16-bit gradient overflowed and nothing was updated), `lr-pg_<i>` and `global_batch_size`.
        """

    # ---- engines

    def connect_engines(self, engines: list[Any], engine_sizes: list[int], weight_version: int) -> None:
        """Take over the engines that weights are sent to (collective).

        Args:
            engines: handles with the methods of `EngineClient`, in place of those before.
            engine_sizes: ranks of each.
            weight_version: of the last sync of this run; the next one sends the version after it.
        """

    def sync_weights(self, policies: Callable[[], Iterable[LoraPolicy]] | None = None) -> tuple[int, dict[str, float]]:
        """Send the weights to the engines (collective); returns their version and metrics of the sync.

        Args:
            policies: lets the model hold the adapters of each policy in turn; None where there is one.

        Raises:
            WeightSyncError: the engines do not have them, and stay paused.
        """

    # ---- checkpoints and copies

    def begin_save(
        self, rollout_id: int, *, write_more: Callable[[Path], None], root: Path | None = None
    ) -> UnfinishedSave:
        """Write a checkpoint but for its name, or begin to; model and optimizer may change afterwards.

        Collective. What it holds is --checkpoint-contents; with --async-save files go on being written.

        Args:
            rollout_id: the iteration.
            write_more: called with the unfinished directory on every rank, to add files of its own.
            root: where; None is --save.

        Raises:
            DiskFull: it does not fit; nothing of it is left.
        """

    def state_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, live tensor) of all that the next update depends on: weights, the optimizer's state.

        Names and sizes are those of the same rank in another run of this layout; the tensors may be written to.
        """

    def state_values(self) -> dict[str, Any]:
        """Return all else that it depends on, as plain values: steps, schedule, loss scale, random states."""

    def restore_values(self, values: Mapping[str, Any]) -> None:
        """Undo `state_values`, after the tensors have been overwritten."""
