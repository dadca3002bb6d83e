"""Errors of hooks are also the TypeError, ValueError or AssertionError that the public interface names."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest

from slime.rollout.hooks.errors import HookError, blame_hook
from slime.rollout.hooks.sample_errors import SampleError, blame, check_completed, check_reward, check_sample
from slime.utils.errors import UsageError
from slime.utils.types import Sample

ARGS = SimpleNamespace(
    vocab_size=100,
    debug_rollout_only=False,
    custom_convert_samples_to_train_data_path=None,
    custom_reward_post_process_path=None,
    reward_key=None,
)


def test_a_usage_error_is_a_value_error():
    with pytest.raises(ValueError, match="^one\ntwo$"):
        raise UsageError(["one", "two"])
    assert pickle.loads(pickle.dumps(UsageError(["one", "two"]))).messages == ["one", "two"]


@pytest.mark.parametrize("kind", [TypeError, ValueError, AssertionError, KeyError])
def test_what_a_hook_raises_keeps_its_kind(kind):
    for base, blaming in ((SampleError, blame("my hook", Sample())), (HookError, blame_hook("my hook"))):
        with pytest.raises(base, match="my hook failed .*|my hook failed: ") as caught, blaming:
            raise kind("no")
        if kind is not KeyError:
            assert isinstance(caught.value, kind)
        assert isinstance(caught.value, RuntimeError)


def test_what_a_hook_returns_of_a_wrong_type_is_a_type_error_too():
    with pytest.raises(SampleError) as of_generate:
        check_completed(ARGS, "my generate", Sample(), 7)
    with pytest.raises(SampleError) as of_reward:
        check_reward(ARGS, "my reward", Sample(), "good")
    for caught in (of_generate, of_reward):
        assert isinstance(caught.value, TypeError) and not isinstance(caught.value, ValueError)


def test_a_loss_mask_of_another_length_is_an_assertion_error_and_a_value_error():
    sample = Sample(tokens=[1, 2, 3], response_length=2, loss_mask=[1], rollout_log_probs=[0.0, 0.0])
    sample.status = Sample.Status.COMPLETED
    with pytest.raises(SampleError, match="loss_mask") as caught:
        check_sample(ARGS, "my generate", sample)
    assert isinstance(caught.value, AssertionError) and isinstance(caught.value, ValueError)


def test_errors_of_a_kind_survive_being_sent_between_processes():
    for returned in (7, []):  # a wrong type, a wrong value
        with pytest.raises(SampleError) as caught:
            check_completed(ARGS, "my generate", Sample(), returned)
        error = caught.value
        error.is_final = True
        copy = pickle.loads(pickle.dumps(error))
        assert type(copy) is type(error) and str(copy) == str(error) and copy.is_final
