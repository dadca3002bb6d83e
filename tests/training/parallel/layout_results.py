"""What the tests of layouts compare: the jobs of one tiny HF model under each of its layouts, and the bounds.

Jobs of one world size share a world of processes (layout_world) and leave their results in files.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.training.parallel.hf_parity import of_hf_model, of_layout
from tests.training.parallel.layout_world import Case, Job, run_jobs, train


class Results:
    """Results of all jobs of one model: per layout its parity with HF, two train steps, and changes of the layout.

    Args:
        root: an empty directory.
        layouts: by name; they run here, at once.
        make_model: path -> the HF model, saved there; the same one at each call.
        changes: flags of all layouts, and of the one process that they are compared with.
        only_training: leave out the parity with HF and the changes of the layout.
    """

    def __init__(
        self,
        root: Path,
        layouts: Mapping[str, Case],
        make_model: Callable[[Path], torch.nn.Module],
        *,
        changes: Mapping[str, Any] | None = None,
        only_training: bool = False,
    ) -> None:
        self.root, self.hf_path, self.single = root, root / "hf", Case(changes=changes or {})
        self.layouts = {
            name: replace(case, changes={**case.changes, **self.single.changes}) for name, case in layouts.items()
        }
        model = make_model(self.hf_path)
        self.start = load_file(self.hf_path / "model.safetensors")
        self.parity = {} if only_training else of_hf_model(model, root / "hf gradients")
        self.taken_over: dict[str, str] = {}
        """Layout -> the job that goes on from its checkpoint."""
        kinds = {bool(case.changes.get("calculate_per_token_loss")) for case in layouts.values()}
        self.references = {per_token: self._reference(per_token) for per_token in sorted(kinds)}
        run_jobs(list(self.references.values()), root)
        jobs = []
        for name, case in self.layouts.items():
            jobs += [Job(name, case.args(self.hf_path, save=str(self.checkpoint(name))), train)]
            jobs += [] if only_training else [Job(f"{name} parity", case.args(self.hf_path), of_layout)]
        self._run(jobs)
        if not only_training:
            self._run([job for per_token in self.references for job in self._ring(per_token)])

    def _run(self, jobs: list[Job]) -> None:
        for size in sorted({job.args.actor_num_gpus_per_node for job in jobs}):
            run_jobs([job for job in jobs if job.args.actor_num_gpus_per_node == size], self.root)

    def _ring(self, per_token: bool) -> list[Job]:
        """Each layout goes on from the checkpoint of the one before it, the first and last one are one process."""
        single = replace(self.single, changes={**self.single.changes, "calculate_per_token_loss": per_token})
        start = self.references[per_token].name
        cases = {name: case for name, case in self.layouts.items() if self._is_per_token(name) == per_token}
        jobs = []
        for name, case in [*cases.items(), (start, single)]:
            args = case.resumed(self.hf_path, self.checkpoint(start))
            jobs.append(Job(f"{name} resumed", args, train, ((1,),)))
            self.taken_over[start], start = f"{name} resumed", name
        return jobs

    def _is_per_token(self, layout: str) -> bool:
        return bool(self.layouts[layout].changes.get("calculate_per_token_loss"))

    def checkpoint(self, name: str) -> Path:
        """Where a job saves."""
        return self.root / f"{name} checkpoint"

    def _reference(self, per_token: bool) -> Job:
        name = f"reference{' by tokens' * per_token}"
        save = str(self.checkpoint(name))
        args = self.single.args(self.hf_path, calculate_per_token_loss=per_token, save=save)
        return Job(name, args, train, ((0, 1),))

    def reference(self, layout: str) -> dict[int, Any]:
        """Rollouts 0 and 1 of one rank."""
        found: dict[int, Any] = self.of(self.references[self._is_per_token(layout)].name)
        return found

    def of(self, job: str) -> Any:
        """What a job returned; fails with what it, or the job that stopped its world, raised."""
        if not (self.root / f"{job}.pt").exists():
            errors = [path.read_text() for path in sorted(self.root.glob("*.error"))]
            pytest.fail(f"{job} did not end:\n" + "\n".join(errors))
        return torch.load(self.root / f"{job}.pt", weights_only=False)


def selected_params(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """Parameters of the selected tests of the file whose fixture asks; other files' have the same names."""
    items = [item for item in request.session.items if item.path == request.path]
    return [item.callspec.params for item in items if hasattr(item, "callspec")]


def made_when_asked(
    request: pytest.FixtureRequest,
    root: Path,
    layouts: Mapping[str, Case],
    make_model: Callable[[Path], torch.nn.Module],
    changes: Mapping[str, Any],
) -> Callable[[], Results]:
    """What makes the results, once, of those layouts that this file's tests ask for; arguments as of Results."""
    names = {params.get("layout") for params in selected_params(request)}
    chosen = {name: case for name, case in layouts.items() if name in names}
    return functools.cache(lambda: Results(root, chosen, make_model, changes=changes))


def check_training(found: Results, layout: str) -> None:
    """Two train steps of the layout are those of one process: metrics, columns, updates."""
    ours, expected = found.of(layout)[0], found.reference(layout)[0]
    assert_same_steps(ours, expected)
    assert_same_update(ours["weights"], expected["weights"], found.start)
    assert ours["rollout"].keys() == expected["rollout"].keys()
    for name, value in expected["rollout"].items():
        assert ours["rollout"][name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    for sample, columns in expected["columns"].items():
        for name, values in columns.items():
            torch.testing.assert_close(ours["columns"][sample][name], values, atol=1e-5, rtol=1e-5)


def check_parity(found: Results, layout: str) -> None:
    """Logits and gradients of the layout are the HF model's."""
    ours = found.of(f"{layout} parity")
    for sample, logits in found.parity["logits"].items():
        assert (ours["logits"][sample] - logits).abs().max() <= 1e-5
    seen = {name: gradient for name, gradient in found.parity["gradients"].items() if ".visual." not in name}
    assert ours["gradients"].keys() == seen.keys()
    for name, gradient in seen.items():
        assert (ours["gradients"][name] - gradient).norm() <= 1e-4 * gradient.norm(), name


def check_resharding(found: Results, layout: str) -> None:
    """The layout goes on from another one's checkpoint, and another one from its: all stand in one ring."""
    expected = found.reference(layout)
    for job in (f"{layout} resumed", found.taken_over[layout]):
        ours = found.of(job)[1]
        assert_same_steps(ours, expected[1])
        assert_same_update(ours["weights"], expected[1]["weights"], expected[0]["weights"])


def assert_same_steps(ours: dict[str, Any], expected: dict[str, Any]) -> None:
    """Loss and gradient norm of every train step, and every other metric more loosely."""
    assert len(ours["steps"]) == len(expected["steps"]) == 2
    for mine, theirs in zip(ours["steps"], expected["steps"], strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            is_exact = name in ("train/loss", "train/grad_norm")
            assert mine[name] == pytest.approx(value, rel=1e-5 if is_exact else 1e-3, abs=1e-6), name


def assert_same_update(
    ours: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], start: dict[str, torch.Tensor]
) -> None:
    """Each tensor moved as expected, within a thousandth of the way that it went; indexers are frozen."""
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        moved = (tensor - start[name]).norm()
        assert (moved > 0) == (".indexer." not in name), name
        assert (ours[name] - tensor).norm() <= 1e-3 * moved, name
