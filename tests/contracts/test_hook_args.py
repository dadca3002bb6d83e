"""Hooks may assign to the `args` that they get: the hooks of one process share a copy, the parsed flags stay."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from slime.algorithms.policy import correction_of
from slime.backends.megatron_utils.loss import compute_advantages_and_returns
from slime.config.args import Args, publish_runtime
from slime.utils.misc import hook_args
from tests.contracts.rollout_world import World, rollout

Paths = Callable[[str], str]


def noting(recorded: Callable, name: str) -> Callable:
    """The hook, after it has noted its name in `args.seen`."""

    def hook(*given, **keywords):
        args = next(value for value in given if isinstance(value, Args))
        args.seen = [*getattr(args, "seen", []), name]
        return recorded(*given, **keywords)

    hook.__wrapped__ = recorded  # slime reads the signature
    return hook


def test_a_rollouts_hooks_assign_to_args_and_later_ones_see_it(world: World, monkeypatch: pytest.MonkeyPatch):
    import user_package.hooks as hooks

    flags = {
        "custom_generate_function_path": "generate",
        "custom_rm_path": "reward",
        "dynamic_sampling_filter_path": "keep_even",
        "rollout_sample_filter_path": "remove_first",
        "rollout_all_samples_process_path": "see_all",
        "custom_rollout_log_function_path": "log",
        "custom_reward_post_process_path": "double_rewards",
    }
    for name in flags.values():
        monkeypatch.setattr(hooks, name, noting(getattr(hooks, name), name))
    manager = world.manager("b", n_samples_per_prompt=1, rollout_batch_size=1, over_sampling_batch_size=1)
    changes = {flag: f"user_package.hooks:{name}" for flag, name in flags.items()}
    manager.args = Args(**{**vars(manager.args), **changes, "rollout_sample_hook_path": []}).freeze()
    manager.load_user_code()
    rollout(manager, 0)
    assert hook_args(manager.args).seen == list(flags.values())
    assert not hasattr(manager.args, "seen") and manager.args.is_frozen


def test_hooks_of_the_trainer_share_a_copy_too(monkeypatch: pytest.MonkeyPatch):
    module = ModuleType("assigning_hooks")

    def set_scale(args, rollout_data):
        args.scale = 3.0
        rollout_data["advantages"] = rollout_data["returns"] = [torch.ones(2)]

    def scaled(args, pg_loss, loss_masks, **rest):
        return pg_loss * args.scale, loss_masks, {}

    module.set_scale, module.scaled = set_scale, scaled  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "assigning_hooks", module)
    args = Args(
        custom_advantage_function_path="assigning_hooks.set_scale",
        custom_tis_function_path="assigning_hooks.scaled",
        use_rollout_logprobs=False,
        use_opd=False,
        normalize_advantages=False,
        kl_coef=0.0,
        kl_loss_type="k1",
        gamma=1.0,
        lambd=1.0,
        use_tis=True,
        advantage_estimator="grpo",
    ).freeze()
    data = {"log_probs": [torch.zeros(2)], "loss_masks": [torch.ones(2)], "rewards": [1.0]}
    data |= {"response_lengths": [2], "total_lengths": [3], "rollout_log_probs": [torch.zeros(2)]}
    compute_advantages_and_returns(args, data, 0.0)
    loss, _, _ = correction_of(args)(data, torch.ones(2), data["log_probs"])
    assert loss.tolist() == [3.0, 3.0]
    with pytest.raises(AttributeError, match="cannot be set"):
        args.scale = 4.0


def test_each_process_has_a_copy_of_its_own():
    args = Args(lr=1.0).freeze()
    elsewhere = pickle.loads(pickle.dumps(args))  # as Ray sends it to an actor
    for other in (elsewhere, copy.deepcopy(args), args.replace(lr=1.0)):
        hook_args(args).lr = 2.0
        assert hook_args(other).lr == other.lr == args.lr == 1.0
    assert hook_args(hook_args(args)).lr == 2.0, "functions of slime that a hook calls with its args pass them on"


def test_values_that_exist_only_once_the_engines_run_reach_the_hooks():
    args = Args(sglang_router_ip=None, sglang_router_port=None, sglang_model_routers=None).freeze()
    publish_runtime(args, sglang_router_ip="1.2.3.4", sglang_router_port=5, sglang_model_routers={})
    assert hook_args(args).sglang_router_ip == "1.2.3.4"
