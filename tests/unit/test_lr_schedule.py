"""Learning rate and weight decay as Megatron makes them, from our flags."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from slime.backends.megatron_utils.model.setup import make_scheduler
from slime.config.rules.batch import check_warmup
from slime.utils.errors import UsageError


def make_args(**changes):
    values = {
        "debug_rollout_only": False,
        "end_weight_decay": 0.1,
        "global_batch_size": 8,
        "lr": 1.0,
        "lr_decay_iters": None,
        "lr_decay_style": "constant",
        "lr_warmup_fraction": None,
        "lr_warmup_init": 0.0,
        "lr_warmup_iters": 0,
        "lr_wsd_decay_iters": None,
        "lr_wsd_decay_style": "exponential",
        "min_lr": 0.0,
        "n_samples_per_prompt": 2,
        "num_epoch": 3,
        "num_rollout": 5,
        "ppo_epochs": 1,
        "rollout_batch_size": 8,
        "start_weight_decay": 0.1,
        "use_checkpoint_opt_param_scheduler": False,
        "weight_decay_incr_style": "constant",
    }
    return SimpleNamespace(**(values | changes))


def rates(num_steps, **changes):
    """The rate of each of the first steps; a rollout of 16 samples is two steps of 8."""
    optimizer = SimpleNamespace(param_groups=[{"wd_mult": 1.0}, {"wd_mult": 0.0}])
    scheduler = make_scheduler(make_args(**changes), optimizer)
    found = []
    for _ in range(num_steps):
        found.append(optimizer.param_groups[0]["lr"])
        scheduler.step(increment=8)
    return found


def test_constant_stays_and_norms_are_not_decayed():
    assert rates(12) == [1.0] * 12
    optimizer = SimpleNamespace(param_groups=[{"wd_mult": 1.0}, {"wd_mult": 0.0}])
    make_scheduler(make_args(), optimizer)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


def test_warm_up_is_linear_and_starts_at_its_initial_rate():
    assert rates(6, lr_warmup_iters=4, lr_warmup_init=0.2) == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    assert rates(3, lr_warmup_fraction=0.2) == pytest.approx([0.0, 0.5, 1.0])


def test_warmup_stable_decay_is_constant_until_its_last_steps():
    wsd = rates(11, lr_decay_style="WSD", lr_wsd_decay_iters=4, lr_wsd_decay_style="linear")
    # 10 steps in all, of which the last 4 fall by a quarter each
    assert wsd == pytest.approx([1.0] * 7 + [0.75, 0.5, 0.25, 0.0])


def test_the_inverse_square_root_starts_from_the_warm_up():
    found = rates(5, lr_decay_style="inverse-square-root", lr_warmup_iters=1, lr_decay_iters=10)
    assert found == pytest.approx([0.0, 1.0, 1 / math.sqrt(2), 1 / math.sqrt(3), 0.5])


def test_linear_and_cosine_end_at_the_minimum_after_the_whole_run():
    linear = rates(12, lr_decay_style="linear", min_lr=0.1)
    assert linear == pytest.approx([0.1 + 0.9 * (1 - step / 10) for step in range(11)] + [0.1])
    cosine = rates(11, lr_decay_style="cosine")
    assert cosine == pytest.approx([(1 + math.cos(math.pi * step / 10)) / 2 for step in range(11)], abs=1e-9)
    assert rates(5, lr_decay_style="linear", lr_decay_iters=4) == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0])


def test_a_decay_without_a_known_end_is_refused():
    with pytest.raises(UsageError, match="give --num-rollout or --lr-decay-iters"):
        rates(1, num_rollout=None, lr_decay_style="cosine")
    assert rates(2, num_rollout=None) == [1.0, 1.0]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"lr_warmup_iters": 10}, "--lr-warmup-iters 10 must be less than the 10 train steps of the run"),
        ({"lr_warmup_iters": 8, "lr_decay_iters": 4}, "8 must be less than the 4 train steps of --lr-decay-iters"),
        (
            {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 11},
            "--lr-wsd-decay-iters 11 and a warm-up of 0 train",
        ),
        (
            {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 6, "lr_warmup_fraction": 0.5},
            "6 and a warm-up of 5 train steps are more than the 10 train steps of the run",
        ),
    ],
)
def test_a_warm_up_or_final_decay_that_the_decay_has_no_room_for_is_refused(changes, problem):
    with pytest.raises(UsageError, match=problem):
        rates(1, **{"lr_decay_style": "cosine"} | changes)


def test_a_share_of_the_run_that_fills_it_with_the_final_decay_is_no_more_than_the_run():
    # 0.56 * 50 is 28.000000000000004, and 28 + 22 = 50
    fits = {"lr_decay_style": "WSD", "lr_warmup_fraction": 0.56, "lr_wsd_decay_iters": 22, "lr_decay_iters": 50}
    assert rates(1, **fits) == [0.0]
    assert list(check_warmup(make_args(lr_decay_style="cosine", lr_warmup_iters=99, debug_rollout_only=True))) == []


def test_a_constant_rate_may_warm_up_for_longer_than_the_run():
    # a run of 10 steps whose warm-up would take 20: it ends halfway
    assert rates(11, lr_warmup_iters=20) == pytest.approx([step / 20 for step in range(11)])


def test_weight_decay_rises_over_the_whole_run_however_long_the_rate_decays():
    optimizer = SimpleNamespace(param_groups=[{"wd_mult": 1.0}])
    rising = {"start_weight_decay": 0.0, "end_weight_decay": 0.1, "weight_decay_incr_style": "linear"}
    scheduler = make_scheduler(make_args(lr_decay_style="linear", lr_decay_iters=4, **rising), optimizer)
    found = []
    for _ in range(11):
        found.append(optimizer.param_groups[0]["weight_decay"])
        scheduler.step(increment=8)
    assert found == pytest.approx([0.1 * step / 10 for step in range(11)])
    with pytest.raises(UsageError, match="--weight-decay-incr-style linear needs the number .* give --num-rollout."):
        make_scheduler(make_args(num_rollout=None, lr_decay_iters=4, **rising), optimizer)


def test_a_resumed_run_may_be_longer_than_planned():
    optimizer = SimpleNamespace(param_groups=[{"wd_mult": 1.0}])
    first = make_scheduler(make_args(lr_decay_style="linear"), optimizer)
    first.step(increment=8 * 10)
    second = make_scheduler(make_args(lr_decay_style="linear", num_rollout=10), optimizer)
    second.load_state_dict(first.state_dict())
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.5)


def test_evaluation_only_has_no_steps_and_still_builds():
    assert rates(1, num_rollout=0) == [1.0]
