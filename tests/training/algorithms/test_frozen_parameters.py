"""--only-train-params-name-list and --freeze-params-name-list: what is not trained stays, costs nothing, is sent."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest import mock

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
from tests.unit.argument_lines import Check, check, command_line, has
from tests.unit.megatron_fakes import make_hf_model, run_world

__all__ = ["check", "command_line"]  # fixtures


def save(actor: Any, records: list[Any], out: Path) -> None:
    from slime.backends.megatron_utils.update_weight.hf_weight_iterator import iter_hf_buckets

    optimizer = actor.state.optimizer
    parts = vars(optimizer).get("chained_optimizers", [optimizer])
    states = [state for part in parts for state in part.optimizer.state.values()]
    sent = {name for bucket in iter_hf_buckets(actor.args, actor.state.model, buffer_size=10**9) for name, _ in bucket}
    torch.save((parameters(actor), sum(state["exp_avg"].numel() for state in states), sent), out)


def run(hf_path: Path, out: Path, **changes: Any) -> tuple[dict[str, torch.Tensor], int, set[str]]:
    train(trainer_args(hf_path, **({"lr": 1e-2} | changes)), save, out, num_rollouts=2)
    return torch.load(out)


@pytest.mark.parametrize(
    ("flag", "patterns", "trained"),
    [
        ("only_train_params_name_list", [r"layers\.1\..*linear_fc", "^output_layer"], r"layers\.1\..*fc|output_layer"),
        ("freeze_params_name_list", ["embedding", "norm"], r"^(?!.*(embedding|norm))"),
    ],
)
def test_what_is_not_trained_keeps_its_bits_and_has_no_optimizer_state(
    hf_path: Path, tmp_path: Path, flag: str, patterns: list[str], trained: str
):
    start, _, _ = run(hf_path, tmp_path / "start", lr=0.0)
    everything, num_moments, sent = run(hf_path, tmp_path / "all")
    assert num_moments == sum(weight.numel() for weight in everything.values())
    weights, num_moments, still_sent = run(hf_path, tmp_path / "some", **{flag: patterns})
    moves = {name for name in start if re.search(trained, name)}
    assert moves and moves < set(start)
    assert {name for name in start if not torch.equal(start[name], weights[name])} == moves
    assert num_moments == sum(start[name].numel() for name in moves)
    assert still_sent == sent, "the engines get all weights"


QKV = "decoder.layers.0.self_attention.linear_qkv.weight"


def test_a_run_with_frozen_parameters_is_resumed_bit_for_bit(hf_path: Path, tmp_path: Path):
    frozen = {"freeze_params_name_list": ["layers.0"], "lr": 1e-2}
    train(trainer_args(hf_path, **frozen, save=str(tmp_path / "ckpt")), train_and_save, tmp_path / "straight")
    resumed = resumed_from(str(tmp_path / "ckpt"))
    train(trainer_args(hf_path, **frozen, **resumed), train_once_more, tmp_path / "resumed", num_rollouts=0)
    straight, again = (torch.load(tmp_path / name) for name in ("straight", "resumed"))
    assert straight[0] == again[0]
    assert all(torch.equal(straight[1][name], again[1][name]) for name in straight[1])
    # where other parameters are trained than before, there is no optimizer state to go on from
    more = {"freeze_params_name_list": ["layers.0.mlp"], "lr": 1e-2}
    train(trainer_args(hf_path, **more, **resumed), train_once_more, tmp_path / "more", num_rollouts=0)
    _, weights = torch.load(tmp_path / "more")
    assert not torch.equal(weights[QKV], straight[1][QKV])


def test_a_run_that_trains_experts_alone_is_saved_and_resumed_bit_for_bit(tmp_path: Path):
    make_hf_model(tmp_path / "hf", "qwen3_moe")
    experts = {"only_train_params_name_list": [r"\.experts\."], "lr": 1e-2}
    saving = trainer_args(tmp_path / "hf", **experts, save=str(tmp_path / "ckpt"))
    train(saving, train_and_save, tmp_path / "straight")
    resuming = trainer_args(tmp_path / "hf", **experts, **resumed_from(str(tmp_path / "ckpt")))
    train(resuming, train_once_more, tmp_path / "resumed", num_rollouts=0)
    (records, weights), (again, resumed) = (torch.load(tmp_path / name) for name in ("straight", "resumed"))
    assert records == again and all(torch.equal(weights[name], resumed[name]) for name in weights)


def check_refusals(args: Any) -> None:
    from slime.backends.megatron_utils.model import setup
    from slime.backends.megatron_utils.model.setup import build_model, freeze_parameters
    from slime.utils.errors import UsageError

    models = [build_model(args)]
    with pytest.raises(UsageError) as refused:
        freeze_parameters(models, only=["linear_fc3", "linear_qkv"])
    assert refused.value.messages == [
        "--only-train-params-name-list 'linear_fc3' matches no parameter: did you mean linear_fc2 or linear_fc1?"
    ]
    with pytest.raises(UsageError, match=r"'zz' matches no parameter: there are decoder\.final_layernorm\.weight, "):
        freeze_parameters(models, frozen=["zz"])
    with pytest.raises(UsageError, match=r"^--freeze-params-name-list weight freezes every parameter: nothing is"):
        freeze_parameters(models, frozen=["weight"])
    assert all(parameter.requires_grad for parameter in models[0].parameters()), "a refusal changes nothing"
    with mock.patch.object(setup.logger, "warning") as warning:
        freeze_parameters(models, frozen=["output_layer", "layers"], always_trained="^output_layer")
    assert models[0].output_layer.weight.requires_grad
    assert warning.call_args.args[1:] == ("--freeze-params-name-list", "output_layer")


def test_names_that_do_not_exist_and_nothing_left_to_train_are_refused(hf_path: Path):
    run_world(1, check_refusals, trainer_args(hf_path))


def test_lists_of_parameters_are_checked_where_they_are_given(check: Check) -> None:
    has(
        check("--freeze-params-name-list layers.( x").problems.wrong,
        "--freeze-params-name-list 'layers.(' is no regular expression: missing ), unterminated subpattern",
    )
    has(check("--only-train-params-name-list").problems.wrong, "needs a regular expression")
