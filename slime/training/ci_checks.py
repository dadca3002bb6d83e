"""What --ci-test asserts while a run trains: numbers that must hold in every correct run, whatever the data.

| when | what |
|---|---|
| every rollout and train step | every metric is a finite number; log-probs are at most 0 |
| every train step | 0 <= entropy <= ln(vocabulary); mean gap to the engine's log-probs <= the flag's bound |
| first step of each rollout | ppo_kl = 0 and pg_clipfrac = 0: nothing was updated since the old log-probs |
| first rollout, weights equal to the reference's | log_probs = ref_log_probs, kl = 0, kl_loss = 0 |
| every train step, with --ci-load-grad-norm | grad_norm within 1% (or 0.01) of the file's |

--ci-disable-kl-checker leaves rows 3 and 4 out. They are exact where the pass that computes log-probs and the train
step compute the same thing bit by bit, and allow for rounding where they pack tokens or multiply otherwise. It reads
metrics only: which step they are of, its caller says.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch.distributed as dist

from slime.config.args import Args
from slime.training.micro_batches import REFERENCE
from slime.utils.accelerator.tensor_backper import TensorBackuper
from slime.utils.distributed_utils import gathered

GRAD_NORM_TOLERANCE = 0.01
"""Relative and absolute."""
ROUNDING = {"fp32": 1e-5, "16 bit": 1e-2}
"""Of a mean KL, between two passes that do not compute the same thing bit by bit."""
SLACK = 1e-4
"""Of entropy and log-probs at the ends of their ranges."""


class CheckFailed(RuntimeError):
    """A number of the run is not what it has to be."""


class CiChecks:
    """The checks of one trainer rank; without --ci-test it does nothing.

    Args:
        args: `ci_*`, `bf16`, `fp16`, `vocab_size` and what says how old log-probs are made.
        weights: of the model, as it begins to train; every rank compares its part with the reference's.
        role: "actor" or "critic"; part of the file names of gradient norms.
    """

    def __init__(self, args: Args, weights: TensorBackuper, *, role: str = "actor") -> None:
        self._args, self._role = args, role
        self._num_updates = 0
        self._starts_as_reference = args.ci_test and all(gathered(weights.equals(REFERENCE)))

    def rollout(self, rollout_id: int, metrics: Mapping[str, float]) -> None:
        """Check what was computed before the first train step of a rollout.

        Raises:
            CheckFailed: a number is wrong.
        """
        if not self._args.ci_test:
            return
        problems = [*not_finite(metrics), *above_zero(metrics)]
        if self._is_reference:
            problems += differs_from_reference(metrics, bound=self._bound)
        _raise(problems, f"rollout {rollout_id}")

    def step(self, rollout_id: int, step_id: int, metrics: Mapping[str, float]) -> None:
        """Check a train step, and write or compare its gradient norm.

        Args:
            rollout_id: which rollout,
            step_id: and which of its train steps, counted over all passes.
            metrics: of the step, without prefix; the same on every rank. Rank 0 has the files.

        Raises:
            CheckFailed: a number is wrong.
        """
        args = self._args
        if not args.ci_test:
            return
        problems = [*not_finite(metrics), *entropy_out_of_range(metrics, args.vocab_size)]
        gap, most = metrics.get("train_rollout_logprob_abs_diff"), args.ci_train_rollout_logprob_abs_diff_threshold
        if gap is not None and gap > most:
            problems.append(
                f"train_rollout_logprob_abs_diff is {gap:.6g}, above "
                f"--ci-train-rollout-logprob-abs-diff-threshold {most:g}"
            )
        if step_id == 0 and not args.ci_disable_kl_checker:
            problems += self._kl_problems(metrics)
        if dist.get_rank() == 0:
            problems += self._grad_norm(rollout_id, step_id, metrics)
        self._num_updates += 1
        _raise(problems, f"rollout {rollout_id}, train step {step_id}")

    @property
    def _is_reference(self) -> bool:
        return self._starts_as_reference and self._num_updates == 0 and not self._args.ci_disable_kl_checker

    @property
    def _bound(self) -> float:
        """Of a KL that is 0 but for rounding."""
        args = self._args
        has_own_packing = args.use_dynamic_batch_size and args.log_probs_max_tokens_per_gpu != args.max_tokens_per_gpu
        if not (has_own_packing or args.shuffle_mini_batches or args.recompute_loss_function):
            return 1e-8 if args.multi_latent_attention else 0.0
        return ROUNDING["16 bit" if args.bf16 or args.fp16 else "fp32"]

    def _kl_problems(self, metrics: Mapping[str, float]) -> Iterator[str]:
        args, bound = self._args, self._bound
        if not (args.use_rollout_logprobs or args.keep_old_actor):  # else the old log-probs are not this policy's
            yield from not_zero(metrics, "ppo_kl", bound, "nothing was updated since the old log-probs")
            if not bound:
                yield from not_zero(metrics, "pg_clipfrac", bound, "nothing was updated since the old log-probs")
        if self._is_reference:
            yield from not_zero(metrics, "kl_loss", bound, "the weights are still the reference's")

    def _grad_norm(self, rollout_id: int, step_id: int, metrics: Mapping[str, float]) -> Iterator[str]:
        args, names = self._args, {"role": self._role, "rollout_id": rollout_id, "step_id": step_id}
        norm = metrics.get("grad_norm")
        if norm is None:  # a 16-bit gradient that overflowed
            return
        if args.ci_save_grad_norm is not None:
            path = Path(args.ci_save_grad_norm.format(**names))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{norm!r}\n")
        if args.ci_load_grad_norm is not None:
            yield from other_grad_norm(norm, Path(args.ci_load_grad_norm.format(**names)))


def not_finite(metrics: Mapping[str, float]) -> Iterator[str]:
    """A sentence for each metric that is no number."""
    for name, value in metrics.items():
        if not math.isfinite(value):
            yield f"{name} is {value}, which is no finite number"


def above_zero(metrics: Mapping[str, float]) -> Iterator[str]:
    """Means of log-probabilities are at most 0."""
    for name in ("log_probs", "ref_log_probs", "rollout_log_probs", "teacher_log_probs"):
        value = metrics.get(f"rollout/{name}", 0.0)
        if value > SLACK:
            yield f"rollout/{name} is {value:.6g}, above 0: it holds no log-probabilities"


def differs_from_reference(metrics: Mapping[str, float], *, bound: float) -> Iterator[str]:
    """Equal weights give equal log-probs."""
    mine, reference = metrics.get("rollout/log_probs"), metrics.get("rollout/ref_log_probs")
    if mine is not None and reference is not None and abs(mine - reference) > bound:
        yield (
            f"rollout/log_probs is {mine!r} and rollout/ref_log_probs {reference!r}, although the weights are still "
            f"the reference's (bound {bound:g})"
        )
    yield from not_zero(metrics, "rollout/kl", bound, "the weights are still the reference's")


def entropy_out_of_range(metrics: Mapping[str, float], vocab_size: int) -> Iterator[str]:
    """The entropy of a distribution over the vocabulary."""
    entropy, most = metrics.get("entropy_loss", 0.0), math.log(vocab_size)
    if not -SLACK <= entropy <= most + SLACK:
        yield f"entropy_loss is {entropy:.6g}, outside 0 to ln({vocab_size}) = {most:.6g}"


def not_zero(metrics: Mapping[str, float], name: str, bound: float, why: str) -> Iterator[str]:
    """A sentence if a metric that has to be 0 is further from it than `bound`."""
    value = metrics.get(name, 0.0)
    if abs(value) > bound:
        yield f"{name} is {value:.6g} and must be 0 (bound {bound:g}), for {why}"


def other_grad_norm(norm: float, path: Path) -> Iterator[str]:
    """A sentence if the norm is not the one in the file."""
    try:
        expected = float(path.read_text())
    except (OSError, ValueError) as error:
        yield f"--ci-load-grad-norm: {path} holds no gradient norm ({error}); write it with --ci-save-grad-norm"
        return
    if not math.isclose(norm, expected, rel_tol=GRAD_NORM_TOLERANCE, abs_tol=GRAD_NORM_TOLERANCE):
        yield f"grad_norm is {norm:.6g} and {expected:.6g} in {path} (--ci-load-grad-norm, tolerance 1%)"


def _raise(problems: list[str], where: str) -> None:
    if problems:
        raise CheckFailed(f"--ci-test, {where}: {'; '.join(problems)}")
