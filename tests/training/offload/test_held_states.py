"""Activations and optimizer states in host memory change no bit of a training, nor of one that is resumed.

All trainings run one after the other (layout_world); the tests read what they leave behind.
"""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.parallel.layout_world import Case, Job, run_jobs, train
from tests.unit.megatron_fakes import make_args, make_hf_model, run_world

pytestmark = pytest.mark.timeout(900)  # the first test waits for the trainings of all
ALL_MODULES = "attn_norm qkv_linear core_attn attn_proj mlp_norm"
SMALL = "--min-offloaded-tensor-size 2"
HOST = "--optimizer-cpu-offload"
HALF = f"{HOST} --optimizer-offload-fraction 0.5"
BF16 = "--use-precision-aware-optimizer --exp-avg-dtype bf16"
WAYS = {
    "layers": f"--cpu-offloading --cpu-offloading-num-layers 3 {SMALL}",
    "modules": f"--fine-grained-activation-offloading --offload-modules {ALL_MODULES} {SMALL}",
    "half of the optimizer": f"{HALF} --overlap-cpu-optimizer-d2h-h2d --no-pin-cpu-grads --no-pin-cpu-params",
    "optimizer and one layer": f"{HOST} --cpu-offloading --cpu-offloading-num-layers 1 {SMALL}",
    "held on the device": "--use-precision-aware-optimizer",
}
RESUMED = {"from the host": (HOST, HOST), "to the host": ("", HOST), "off the host": (HOST, "")}
ONE_STEP = {"global_batch_size": 12, "recompute_old_log_probs": True}


def states(args: Any) -> tuple[list[bool], list[int], list[dict[str, torch.dtype]]]:
    """Of each weight after a training: whether it is updated in host memory, its size, and the types of its state."""
    from slime.backends.megatron_utils.model import setup

    made: list[Any] = []
    usual = setup.make_optimizer
    setup.make_optimizer = lambda *of: made.append(usual(*of)) or made[0]
    try:
        train(args)
    finally:
        setup.make_optimizer = usual
    (adam,) = [part.optimizer for part in made[0].chained_optimizers]
    params = [param for group in adam.param_groups for param in group["params"]]
    types = [{name: value.dtype for name, value in adam.state[param].items()} for param in params]
    return [adam._host[param] is not None for param in params], [param.numel() for param in params], types


def trainings(hf_path: Path, root: Path) -> list[Job]:
    """Every training that a test reads."""
    plain, saved = Case(), {flags: root / f"saved {number}" for number, flags in enumerate(("", HOST))}
    jobs = [Job("plain", plain.args(hf_path, save=str(saved[""])), train, ((0, 1),))]
    jobs += [Job("saved from the host", Case(HOST).args(hf_path, save=str(saved[HOST])), train)]
    jobs += [Job(name, Case(flags).args(hf_path), train) for name, flags in WAYS.items()]
    for name, (before, after) in RESUMED.items():
        jobs.append(Job(name, Case(after).resumed(hf_path, saved[before]), train, ((1,),)))
    jobs += [Job("one step", Case(changes=ONE_STEP).args(hf_path), train)]
    jobs += [Job("one step, bf16", Case(BF16, changes=ONE_STEP).args(hf_path), train)]
    jobs += [Job("bf16", Case(BF16).args(hf_path), train)]
    return jobs + [Job("states", Case(f"{HALF} {BF16}").args(hf_path), states)]


@pytest.fixture(scope="module")
def hf_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_hf_model(path, num_hidden_layers=4)
    return path


@pytest.fixture(scope="module")
def results(hf_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """job -> what it returned."""
    root = tmp_path_factory.mktemp("results")
    run_jobs(trainings(hf_path, root), root)
    assert not (errors := [path.read_text() for path in root.glob("*.error")]), errors
    return lambda job: torch.load(root / f"{job}.pt", weights_only=False)


def assert_same_bits(found: Any, expected: Any) -> None:
    assert len(expected["steps"]) == 2
    for mine, theirs in zip(found["steps"], expected["steps"], strict=True):
        assert (mine["train/loss"], mine["train/grad_norm"]) == (theirs["train/loss"], theirs["train/grad_norm"])
    for name, weight in expected["weights"].items():
        assert torch.equal(found["weights"][name], weight), name


@pytest.mark.parametrize("way", WAYS)
def test_nothing_that_waits_in_host_memory_changes_a_bit(way: str, results: Any) -> None:
    assert_same_bits(results(way)[0], results("plain")[0])


@pytest.mark.parametrize("way", RESUMED)
def test_a_run_is_resumed_with_its_optimizer_in_host_memory_or_not(way: str, results: Any) -> None:
    assert_same_bits(results(way)[1], results("plain")[1])


def test_a_first_moment_in_bf16_is_rounded_after_every_step(results: Any) -> None:
    exact = results("one step")[0]["weights"]
    for name, weight in results("one step, bf16")[0]["weights"].items():
        assert torch.equal(weight, exact[name]), name
    exact, rounded = (results(name)[0]["weights"] for name in ("plain", "bf16"))
    moved = max(float((rounded[name] - weight).abs().max()) for name, weight in exact.items())
    # the second step of lr 1e-3 takes 8 bits of the first's moment; it cannot be larger than 2 lr (beta 0.9, 0.95)
    assert 0 < moved < 2 * 1e-3 * 2**-7


def test_as_much_of_the_optimizer_as_asked_for_is_in_host_memory(results: Any) -> None:
    are_on_host, sizes, types = results("states")
    on_host = sum(size for size, is_there in zip(sizes, are_on_host, strict=True) if is_there)
    assert 0.5 * sum(sizes) <= on_host < 0.5 * sum(sizes) + max(sizes)
    fp32, bf16 = torch.float32, torch.bfloat16
    assert all(found == {"master_param": fp32, "exp_avg": bf16, "exp_avg_sq": fp32} for found in types)


def count_after_forward(args: Any) -> None:
    """Memory of the first layers goes with the layer behind them, and what stays is not touched."""
    from slime.backends.megatron_utils.layers.activation_offload import ActivationOffload

    saved: list[weakref.ref[torch.Tensor]] = []

    class Layer(torch.nn.Module):
        """Squares its input after a linear map, which autograd needs the input, the weight and the result for."""

        def __init__(self) -> None:
            super().__init__()
            self.part = torch.nn.Linear(8, 8, bias=False)

        def forward(self, hidden_states: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
            linear = self.part(hidden_states)
            saved.append(weakref.ref(linear.untyped_storage()))
            return (linear * linear * angle).relu()

    torch.manual_seed(0)
    layers = [Layer() for _ in range(4)]
    x, angle = torch.rand(6, 8, requires_grad=True), torch.rand(6, 8)

    def gradient() -> torch.Tensor:
        y = x
        for number, layer in enumerate(layers):
            y = layer(y, angle)
            alive = [ref() is not None for ref in saved]
            assert alive == expected[number], (number, alive)
        (grad,) = torch.autograd.grad(y.sum(), x)
        return grad

    expected = [[True] * (number + 1) for number in range(4)]
    usual = gradient()
    saved.clear()
    ActivationOffload(layers, 2, min_size=48)
    expected = [[True], [False, True], [False, False, True], [False, False, True, True]]
    assert torch.equal(gradient(), usual)
    with torch.no_grad():
        assert torch.equal(layers[0](x, angle), (layers[0].part(x).square() * angle).relu())


def test_a_layers_activations_leave_the_device_when_the_next_has_run(hf_path: Path) -> None:
    run_world(1, count_after_forward, make_args(hf_path))
