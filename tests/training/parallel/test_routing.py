"""Routers: choices that are replayed, losses that balance the load, and biases that move with it."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from tests.integration.trainer_world import NUM_SAMPLES, make_train_data, train, trainer_args
from tests.unit.megatron_fakes import make_args, make_hf_model, run_world

TWO_STEPS = {"global_batch_size": 6, "lr": 0.05, "max_tokens_per_gpu": 60}
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("qwen3-moe") / "hf"
    make_hf_model(path, "qwen3_moe")
    return path


def share_of_one_rank(args: Any, data: dict[str, Any]) -> dict[str, Any]:
    from slime.ray.rollout.shares import split_train_data

    (share,) = split_train_data(args, data, {"dp_size": 1, "cp_size": 1})
    return dict(share)


def check_replay(actor: Any, _: Any, engine_column: Any) -> None:
    from slime.backends.megatron_utils.layers.routing import ReplayRouter, routers_of
    from slime.backends.megatron_utils.model_provider import unwrap
    from slime.backends.megatron_utils.passes.routing_replay import COLUMN, recorded_routing

    trained: dict[int, list[torch.Tensor]] = {}
    forward = ReplayRouter.forward

    def spy(router: Any, *args: Any) -> Any:
        weights, chosen = forward(router, *args)
        if router.training:
            trained.setdefault(router.place, []).append(chosen)
        return weights, chosen

    data = make_train_data()
    if engine_column is not None:
        data["rollout_routed_experts"] = engine_column
    share = share_of_one_rank(actor.args, data)
    micro_batches = share["micro_batch_indices"]
    with mock.patch.object(ReplayRouter, "forward", spy):
        actor.train_on(0, share)
    calls_of_each = len(trained[0]) // len(micro_batches)  # 2 where layers are recomputed
    assert calls_of_each == (2 if actor.args.recompute_granularity else 1)
    for place, calls in trained.items():
        for number, samples in enumerate(micro_batches):
            expected = torch.cat([share[COLUMN][i][:, place] for i in samples]).long()
            for chosen in calls[number * calls_of_each : (number + 1) * calls_of_each]:
                rows = chosen[: len(expected)]
                assert torch.equal(rows, torch.zeros_like(rows).scatter(1, expected, True))
    # The weights have moved so far that the routers themselves would choose otherwise.
    again: dict[str, Any] = {}
    batches = actor._pack(share_of_one_rank(actor.args, data))
    batches.rollout_data.pop(COLUMN, None)
    from slime.backends.megatron_utils.passes.forward import compute_log_probs

    with recorded_routing(actor.state.model, batches, again):
        compute_log_probs(actor.args, actor.state.model, batches)
    assert any(not torch.equal(a, b) for a, b in zip(again[COLUMN], share[COLUMN], strict=True))
    assert len(routers_of(unwrap(actor.state.model[0]))) == 2


@pytest.mark.parametrize(("flags", "frozen"), [("", None), (RECOMPUTE, None), (RECOMPUTE, ["embedding"])])
def test_training_replays_the_choices_of_the_old_log_probs_although_the_weights_have_moved(hf, flags, frozen):
    more = {"freeze_params_name_list": frozen, **TWO_STEPS}
    args = trainer_args(hf, flags, use_routing_replay=True, log_probs_max_tokens_per_gpu=90, **more)
    train(args, check_replay, None, num_rollouts=0)


def test_training_replays_what_the_engine_chose(hf):
    rng = np.random.default_rng(0)
    lengths = [len(tokens) for tokens in make_train_data()["tokens"]]
    column = [rng.permuted(np.tile(np.arange(8), (n - 1, 2, 1)), axis=2)[..., :2].astype(np.int32) for n in lengths]
    args = trainer_args(hf, use_routing_replay=True, use_rollout_routing_replay=True, **TWO_STEPS)
    train(args, check_replay, column, num_rollouts=0)


def check_no_routing_is_kept(actor: Any, _: Any) -> None:
    from slime.backends.megatron_utils.layers.routing import routers_of
    from slime.backends.megatron_utils.model_provider import unwrap

    assert [len(router._to_recompute) for router in routers_of(unwrap(actor.state.model[0]))] == [0, 0]


@pytest.mark.parametrize("flags", [RECOMPUTE, "--recompute-granularity selective --recompute-modules moe"])
@pytest.mark.parametrize(
    "lists", [{"freeze_params_name_list": ["embedding"]}, {"only_train_params_name_list": ["output_layer"]}]
)
def test_routers_keep_nothing_for_layers_that_no_gradient_reaches(hf, flags, lists):
    train(trainer_args(hf, flags, **lists, **TWO_STEPS), check_no_routing_is_kept)


def test_engine_choices_of_the_wrong_shape_or_of_nothing_are_refused(monkeypatch):
    from slime.backends.megatron_utils.cp_utils import prepare_routed_experts_for_routing_replay as prepare

    # The cut for context parallelism asks Megatron which rank this is; one rank has all rows.
    monkeypatch.setattr("slime.backends.megatron_utils.cp_utils.slice_with_cp", lambda rows, _: rows)
    good = np.tile(np.array([[0, 0], [3, 1]]), (4, 1, 1))  # layer 0 is dense
    found = prepare(good, 5, num_layers=2, layers=[1], topk=2)
    assert found.tolist() == [[[3, 1]]] * 4 + [[[0, 1]]]
    with pytest.raises(ValueError, match=r"of 6 tokens has the shape \(4, 2, 2\), not \(5, 2, 2\)"):
        prepare(good, 6, num_layers=2, layers=[1], topk=2)
    with pytest.raises(ValueError, match="nothing but zeros"):
        prepare(good, 5, num_layers=2, layers=[0, 1], topk=2)


def test_the_engines_choices_travel_to_the_trainer_and_none_may_be_missing():
    from slime.rollout.train_data import _routed_experts
    from slime.utils.types import Sample

    theirs = np.full((4, 3, 2), 5, np.int32)  # positions, layers, experts of a token
    assert _routed_experts(Sample(rollout_routed_experts=[1]), [1], theirs) == [1]
    with pytest.raises(ValueError, match="sample 7 has no rollout_routed_experts"):
        _routed_experts(Sample(index=7), [1], theirs)
    untrained = _routed_experts(Sample(tokens=[1, 2, 3]), [0], theirs)
    assert untrained.tolist() == [[[0, 1]] * 3] * 2 and untrained.dtype == np.int32


def save_metrics(actor: Any, records: list[Any], path: Any) -> None:
    from tests.training.parallel.layout_world import hf_tensors

    steps = [record for record, axis in records if axis == "train/step"]
    torch.save((steps, hf_tensors(actor.args, actor.state.model)), path)


def save_first_steps(actor: Any, records: list[Any], path: Any) -> None:
    if torch.distributed.get_rank() == 0:
        torch.save([record for record, axis in records if axis == "train/step"], path)


@pytest.mark.parametrize("per_token", [False, True])
def test_the_load_balancing_loss_adds_its_gradient_to_the_routers_and_is_reported(hf, tmp_path, per_token):
    """At these sizes the policy's gradient of the routers is small: a large coefficient must dominate them."""
    results = {}
    balanced = {"moe_aux_loss_coeff": 10.0, "moe_z_loss_coeff": 1.0}
    for name, changes in {"without": {}, "with": balanced}.items():
        args = trainer_args(hf, calculate_per_token_loss=per_token, lr=1e-3, clip_grad=0.0, **changes)
        train(args, save_metrics, tmp_path / name)
        results[name] = torch.load(tmp_path / name)
    (plain, plain_tensors), (steps, tensors) = results["without"], results["with"]
    assert "train/load_balancing_loss" not in plain[0]
    assert steps[0]["train/load_balancing_loss"] >= 1.0  # 1 is perfect balance
    assert steps[0]["train/z_loss"] > 0
    assert steps[0]["train/loss"] == pytest.approx(plain[0]["train/loss"], rel=1e-6)
    assert steps[0]["train/grad_norm"] > 1.5 * plain[0]["train/grad_norm"]
    assert not torch.allclose(
        tensors["model.layers.0.mlp.gate.weight"], plain_tensors["model.layers.0.mlp.gate.weight"]
    )


def test_the_weight_of_the_balancing_loss_does_not_depend_on_how_losses_are_averaged(hf, tmp_path):
    """One micro-batch, a policy loss of zero: the gradient is the balancing loss's alone, per token or per sample."""
    steps = []
    for per_token in (False, True):
        data = make_train_data()
        data["rewards"] = [0.0] * NUM_SAMPLES
        balanced = {"moe_aux_loss_coeff": 1.0, "moe_z_loss_coeff": 0.1}
        args = trainer_args(hf, calculate_per_token_loss=per_token, clip_grad=0.0, **balanced)
        with mock.patch("tests.integration.trainer_world.make_train_data", lambda data=data: data):
            train(args, save_metrics, tmp_path / "out")
        steps.append(torch.load(tmp_path / "out")[0][0])
    assert steps[0]["train/grad_norm"] > 0.01
    for name in ("train/grad_norm", "train/load_balancing_loss", "train/z_loss"):
        assert steps[1][name] == pytest.approx(steps[0][name], rel=1e-4), name


def test_the_balancing_losses_of_two_ranks_are_means_and_no_sums(hf, tmp_path):
    found = []
    for dp_size in (1, 2):
        args = trainer_args(hf, dp_size=dp_size, moe_aux_loss_coeff=1.0, moe_z_loss_coeff=0.1)
        train(args, save_first_steps, tmp_path / "out", dp_size=dp_size)
        found.append(torch.load(tmp_path / "out")[0])
    for name in ("train/load_balancing_loss", "train/z_loss"):
        # half of the samples are balanced a little differently from all of them
        assert found[1][name] == pytest.approx(found[0][name], rel=0.2), name


def test_biases_move_against_the_load_of_the_tokens_and_go_to_the_engine(tmp_path):
    model = make_hf_model(tmp_path / "hf", "glm4_moe")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    before = dict(model.named_buffers())[name]
    args = trainer_args(tmp_path / "hf", moe_router_bias_update_rate=0.25)
    train(args, save_metrics, tmp_path / "out")
    moved = torch.load(tmp_path / "out")[1][name] - before
    assert set(moved.abs().tolist()) <= {0.0, 0.25} or torch.allclose(moved.abs(), torch.tensor(0.25), atol=1e-6)
    assert (moved > 0).any() and (moved < 0).any()


def check_padding_counts_nowhere(args: Any) -> None:
    from slime.backends.megatron_utils.layers.routing import Routing, routers_of
    from slime.backends.megatron_utils.model_provider import get_model_provider_func

    model = get_model_provider_func(args)()
    (router,) = routers_of(model)
    rows = torch.randn(6, 1, 32, generator=torch.Generator().manual_seed(0))
    padding = torch.tensor([False, False, False, True, True, True])
    router.told = Routing(padding, torch.tensor(3))
    router(rows)
    assert int(router.local_tokens_per_expert.sum()) == 3 * args.moe_router_topk


def test_padding_is_no_load(tmp_path):
    make_hf_model(tmp_path / "hf", "glm4_moe")
    run_world(1, check_padding_counts_nowhere, make_args(tmp_path / "hf"))


def test_a_rollout_without_the_engines_choices_is_refused_with_a_sentence():
    from slime.backends.megatron_utils.passes.routing_replay import take_engine_routing

    sentence = "--use-rollout-routing-replay: no sample has rollout_routed_experts; its engine must be one"
    with pytest.raises(ValueError, match=sentence):
        take_engine_routing([], {"tokens": []}, num_experts=8)
