"""Activations and optimizer states in host memory change no bit of a training, nor of one that is resumed."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.trainer_world import (
    parameters,
    resumed_from,
    train,
    train_and_save,
    train_once_more,
    trainer_args,
)
from tests.unit.megatron_fakes import make_args, make_hf_model, run_world

FLAGS = "--adam-eps 1e-5 --weight-decay 0.1"
TRAINING = {"lr": 1e-2, "clip_grad": 0.05, "global_batch_size": 6, "max_tokens_per_gpu": 60}
ALL_MODULES = "attn_norm qkv_linear core_attn attn_proj mlp_norm"
SMALL = "--min-offloaded-tensor-size 2"
HOST = "--optimizer-cpu-offload"
HALF = (
    f"{HOST} --optimizer-offload-fraction 0.5 --overlap-cpu-optimizer-d2h-h2d --no-pin-cpu-grads --no-pin-cpu-params"
)
WAYS = {
    "layers": f"--cpu-offloading --cpu-offloading-num-layers 3 {SMALL}",
    "modules": f"--fine-grained-activation-offloading --offload-modules {ALL_MODULES} {SMALL}",
    "half of the optimizer": HALF,
    "optimizer and one layer": f"{HOST} --cpu-offloading --cpu-offloading-num-layers 1 {SMALL}",
    "held on the device": "--use-precision-aware-optimizer",
}


@pytest.fixture(scope="module")
def hf_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_hf_model(path, num_hidden_layers=4)
    return path


def args_of(hf_path: Path, flags: str, **changes: Any) -> Any:
    return trainer_args(hf_path, f"{FLAGS} {flags}", **(TRAINING | changes))


def save(actor: Any, records: list[Any], out: Path) -> None:
    torch.save(([(r, key) for r, key in records if key == "train/step"], parameters(actor)), out)


def run(hf_path: Path, flags: str, out: Path, **changes: Any) -> Any:
    train(args_of(hf_path, flags, **changes), save, out)
    return torch.load(out)


@pytest.fixture(scope="module")
def plain(hf_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run(hf_path, "", tmp_path_factory.mktemp("plain") / "out")


def assert_same_bits(found: Any, expected: Any) -> None:
    (steps, weights), (expected_steps, expected_weights) = found, expected
    losses = [[step["train/loss"], step["train/grad_norm"]] for step, key in expected_steps if key == "train/step"]
    assert len(losses) == 2
    assert [[s["train/loss"], s["train/grad_norm"]] for s, key in steps if key == "train/step"] == losses
    for name, weight in expected_weights.items():
        assert torch.equal(weights[name], weight), name


@pytest.mark.parametrize("way", WAYS)
def test_nothing_that_waits_in_host_memory_changes_a_bit(way: str, hf_path: Path, plain: Any, tmp_path: Path) -> None:
    assert_same_bits(run(hf_path, WAYS[way], tmp_path / "out"), plain)


@pytest.mark.parametrize(("before", "after"), [(HOST, HOST), ("", HOST), (HOST, "")])
def test_a_run_is_resumed_with_its_optimizer_in_host_memory_or_not(
    before: str, after: str, hf_path: Path, tmp_path: Path
) -> None:
    root, expected, found = tmp_path / "saved", tmp_path / "expected", tmp_path / "found"
    train(args_of(hf_path, before, save=str(root)), train_and_save, expected)
    train(args_of(hf_path, after, **resumed_from(str(root))), train_once_more, found, num_rollouts=0)
    assert_same_bits(torch.load(found), torch.load(expected))


def test_a_first_moment_in_bf16_is_rounded_at_every_step(hf_path: Path, plain: Any, tmp_path: Path) -> None:
    flags = "--use-precision-aware-optimizer --exp-avg-dtype bf16"
    _, weights = run(hf_path, flags, tmp_path / "out", global_batch_size=12)
    _, exact = run(hf_path, "", tmp_path / "exact", global_batch_size=12)
    for name, weight in exact.items():  # of one step the moment is rounded after its use
        assert torch.equal(weights[name], weight), name
    _, weights = run(hf_path, flags, tmp_path / "out")
    moved = [(weights[name] - weight).abs().max() for name, weight in plain[1].items()]
    assert 0 < max(moved) < 2 * 1e-2 * 2**-7  # two steps of lr 1e-2, with 8 bits of the moment


def count_after_forward(args: Any) -> None:
    """Memory of the first layers goes with the layer behind them, and what stays is not touched."""
    from slime.backends.megatron_utils.model.activation_offload import ActivationOffload

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


def check_states(actor: Any, records: list[Any], share: float, dtype: torch.dtype) -> None:
    adam = actor.state.optimizer.chained_optimizers[0].optimizer
    sizes = {param: param.numel() for group in adam.param_groups for param in group["params"]}
    on_host = sum(size for param, size in sizes.items() if adam._host[param] is not None)
    largest = max(sizes.values())
    assert share * sum(sizes.values()) <= on_host < share * sum(sizes.values()) + largest
    for state in adam.state.values():
        assert {name: value.dtype for name, value in state.items()} == {
            "master_param": torch.float32,
            "exp_avg": dtype,
            "exp_avg_sq": torch.float32,
        }


def test_as_much_of_the_optimizer_as_asked_for_is_in_host_memory(hf_path: Path) -> None:
    half = f"{HOST} --optimizer-offload-fraction 0.5 --use-precision-aware-optimizer --exp-avg-dtype bf16"
    train(args_of(hf_path, half), check_states, 0.5, torch.bfloat16)
    train(args_of(hf_path, "--use-precision-aware-optimizer"), check_states, 0, torch.float32)
