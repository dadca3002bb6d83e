"""Every parallel layout gives the numbers of one process: logits and gradients of the HF model, losses, gradient norms
and updates of two train steps, and the steps that follow from a checkpoint of another layout.

All layouts of a world size run in one world of processes (layout_world); the tests read what these leave behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.parallel.hf_parity import of_hf_model, of_layout
from tests.training.parallel.layout_world import Case, Job, run_jobs, train
from tests.unit.megatron_fakes import make_hf_model

pytestmark = pytest.mark.timeout(1800)  # the first test waits for the layouts of all
TP = "--tensor-model-parallel-size"
PP = "--pipeline-model-parallel-size"
CP = "--context-parallel-size"
VPP = "--num-virtual-stages-per-pipeline-rank"
STATIC = {"use_dynamic_batch_size": False, "micro_batch_size": 1}
DEFERRED = {"recompute_loss_function": True, "log_probs_chunk_size": 5}
BY_WORK = {"balance_by_flops": True, "balance_data": True}
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
ONE = Case()

ALWAYS = {
    "one rank, one sample at a time": Case(changes=STATIC),
    "one rank, recomputed": Case(FULL),
    "TP 2, sequence parallel": Case(f"{TP} 2 --sequence-parallel"),
    "PP 2": Case(f"{PP} 2"),
    "CP 2, passes of other sizes": Case(f"{CP} 2", changes={"log_probs_max_tokens_per_gpu": 20}),
    "PP 2 VPP 2, recomputed": Case(f"{PP} 2 {VPP} 2 {FULL}", changes={"log_probs_max_tokens_per_gpu": 20}),
    "DP 2, by work": Case(dp=2, changes=BY_WORK),
    "TP 2 PP 2, deferred logits": Case(f"{TP} 2 --sequence-parallel {PP} 2", changes=DEFERRED),
    "CP 4": Case(f"{CP} 4"),
    "PP 2 VPP 2 DP 2, overlapped": Case(f"{PP} 2 {VPP} 2 --overlap-grad-reduce --overlap-param-gather", 2),
    "TP 2 CP 2, deferred logits": Case(f"{TP} 2 --sequence-parallel {CP} 2", changes=DEFERRED),
}
SLOW = {
    "one rank, selectively recomputed": Case("--recompute-granularity selective --recompute-modules core_attn"),
    "one rank, blocks recomputed": Case(
        "--recompute-granularity full --recompute-method block --recompute-num-layers 2"
    ),
    "one rank, small packs": Case(changes={"max_tokens_per_gpu": 24}),
    "TP 2": Case(f"{TP} 2"),
    "TP 4, two ranks to a key head": Case(f"{TP} 4 --sequence-parallel"),
    "TP 2, activations distributed": Case(f"{TP} 2 {FULL} --distribute-saved-activations"),
    "PP 2, one sample at a time": Case(f"{PP} 2", changes=STATIC),
    "PP 2, first stage of 1 layer": Case(f"{PP} 2 --decoder-first-pipeline-num-layers 1"),
    "PP 2, as a text": Case(f"{PP} 2 --pipeline-model-parallel-layout Et|t|t|tL"),
    "PP 2 VPP 2, groups of 3": Case(f"{PP} 2 {VPP} 2 --microbatch-group-size-per-virtual-pipeline-stage 3"),
    "PP 2, a layer per virtual stage": Case(f"{PP} 2 --num-layers-per-virtual-pipeline-stage 1"),
    "CP 2, recomputed": Case(f"{CP} 2 {FULL}", changes=DEFERRED),
    "CP 2, by tokens": Case(f"{CP} 2", changes={"calculate_per_token_loss": True}),
    "PP 2, by tokens": Case(f"{PP} 2", changes={"calculate_per_token_loss": True}),
    "DP 2": Case(dp=2),
    "DP 2, balanced": Case(dp=2, changes={"balance_data": True, "max_tokens_per_gpu": 24}),
    "DP 2, overlapped": Case("--overlap-grad-reduce --overlap-param-gather", 2),
    "DP 4": Case(dp=4),
    "PP 4": Case(f"{PP} 4"),
    "PP 2 CP 2": Case(f"{PP} 2 {CP} 2"),
    "PP 2 DP 2": Case(f"{PP} 2", 2),
    "CP 2 DP 2": Case(f"{CP} 2", 2),
    "TP 2 DP 2": Case(f"{TP} 2 --sequence-parallel", 2),
    "PP 2 VPP 2 CP 2": Case(f"{PP} 2 {VPP} 2 {CP} 2"),
    "TP 2 PP 2 VPP 2": Case(f"{TP} 2 --sequence-parallel {PP} 2 {VPP} 2"),
}
LAYOUTS = ALWAYS | SLOW
PARAMETERS = [*ALWAYS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
each_layout = pytest.mark.parametrize("layout", PARAMETERS)
each_embedding = pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.slow)])


class Results:
    """Results of all jobs for one HF model; jobs run when the first of their world size is asked for."""

    def __init__(self, root: Path, layouts: Iterable[str], *, tied: bool) -> None:
        self.root, self.hf_path, self.layouts = root, root / "hf", list(layouts)
        self.start = make_hf_model(self.hf_path, num_hidden_layers=4, tied=tied).state_dict()
        self.parity = of_hf_model(make_hf_model(self.hf_path, num_hidden_layers=4, tied=tied))
        references = {per_token: self._reference(per_token) for per_token in (False, True)}
        self.references = references
        run_jobs(list(references.values()), root)
        by_world: dict[int, list[Job]] = {}
        for name in self.layouts:
            args = LAYOUTS[name].args(self.hf_path, save=str(self.checkpoint(name)))
            start = self.checkpoint(references[args.calculate_per_token_loss].name)
            resumed = LAYOUTS[name].resumed(self.hf_path, start)
            jobs = by_world.setdefault(args.actor_num_gpus_per_node, [])
            jobs += [Job(f"{name} parity", LAYOUTS[name].args(self.hf_path), of_layout)]
            jobs += [Job(name, args, train), Job(f"{name} resumed", resumed, train, ((1,),))]
        for jobs in by_world.values():
            run_jobs(jobs, root)
        saved = [name for name in self.layouts if (root / f"{name}.pt").exists()]
        if saved:
            run_jobs([Job(f"{name} taken over", self._back(name), train, ((1,),)) for name in saved], root)

    def checkpoint(self, name: str) -> Path:
        """Where a job saves."""
        return self.root / f"{name} checkpoint"

    def _reference(self, per_token: bool) -> Job:
        name = f"reference{' by tokens' * per_token}"
        save = str(self.checkpoint(name))
        return Job(name, ONE.args(self.hf_path, calculate_per_token_loss=per_token, save=save), train, ((0, 1),))

    def _back(self, name: str) -> Any:
        changes = {"calculate_per_token_loss": "by tokens" in name}
        return Case(changes=changes).resumed(self.hf_path, self.checkpoint(name))

    def reference(self, layout: str) -> dict[int, Any]:
        """Rollouts 0 and 1 of one rank."""
        return self.of(self.references["by tokens" in layout].name)

    def of(self, job: str) -> Any:
        """What a job returned; fails with what it, or the job that stopped its world, raised."""
        if not (self.root / f"{job}.pt").exists():
            errors = [path.read_text() for path in sorted(self.root.glob("*.error"))]
            pytest.fail(f"{job} did not end:\n" + "\n".join(errors))
        return torch.load(self.root / f"{job}.pt", weights_only=False)


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Results]:
    """Results of the layouts that this session's tests ask for, with tied embeddings or not."""
    selected = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    made: dict[bool, Results] = {}

    def of(tied: bool) -> Results:
        if tied not in made:
            names = {params["layout"] for params in selected if params.get("tied") == tied and "layout" in params}
            names = [name for name in LAYOUTS if name in names]
            made[tied] = Results(tmp_path_factory.mktemp("layouts"), names, tied=tied)
        return made[tied]

    return of


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
    """Each tensor moved as expected, within a thousandth of the way that it went."""
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        moved = (tensor - start[name]).norm()
        assert moved > 0, name
        assert (ours[name] - tensor).norm() <= 1e-3 * moved, name


@each_embedding
@each_layout
def test_two_train_steps_are_those_of_one_process(results, layout, tied):
    found = results(tied)
    ours, expected = found.of(layout)[0], found.reference(layout)[0]
    assert_same_steps(ours, expected)
    assert_same_update(ours["weights"], expected["weights"], found.start)
    assert ours["rollout"].keys() == expected["rollout"].keys()
    for name, value in expected["rollout"].items():
        assert ours["rollout"][name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
    for sample, columns in expected["columns"].items():
        for name, values in columns.items():
            torch.testing.assert_close(ours["columns"][sample][name], values, atol=1e-5, rtol=1e-5)


@each_embedding
@each_layout
def test_logits_and_gradients_are_those_of_the_hf_model(results, layout, tied):
    found = results(tied)
    ours = found.of(f"{layout} parity")
    for sample, logits in found.parity["logits"].items():
        assert (ours["logits"][sample] - logits).abs().max() <= 1e-5
    assert ours["gradients"].keys() == found.parity["gradients"].keys()
    for name, gradient in found.parity["gradients"].items():
        assert (ours["gradients"][name] - gradient).norm() <= 1e-4 * gradient.norm(), name


@each_embedding
@each_layout
def test_a_checkpoint_of_any_layout_goes_on_in_another(results, layout, tied):
    """From one process to the layout, and from the layout to one process: so also between any two."""
    found = results(tied)
    expected = found.reference(layout)
    for job in (f"{layout} resumed", f"{layout} taken over"):
        ours = found.of(job)[1]
        assert_same_steps(ours, expected[1])
        assert_same_update(ours["weights"], expected[1]["weights"], expected[0]["weights"])
