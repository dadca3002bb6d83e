"""--custom-config-path: keys that are flags are read as flags, the others reach hooks."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.config.custom_config import (
    FileValues,
    FlagReader,
    apply_extra,
    apply_known,
    custom_config_values,
    read_flag,
)
from slime.config.parse import build_parser
from slime.utils.errors import UsageError
from tests.unit.yaml_mutations import edited

Read = Callable[[str], FileValues]


@functools.cache
def options() -> dict[str, argparse.Action]:
    return build_parser().options()


def explain_nothing(name: str) -> str | None:
    return None


@pytest.fixture
def read(tmp_path: Path) -> Read:
    def read_text(text: str) -> FileValues:
        path = tmp_path / "conf.yaml"
        path.write_text(text)
        return custom_config_values(str(path), options(), explain_unknown=explain_nothing)

    return read_text


def value_of(key: str, value: Any) -> dict[str, Any]:
    found = FlagReader(options()).find(key)
    assert found is not None
    return read_flag(found, value)


@pytest.mark.parametrize(
    ("text", "attribute", "value"),
    [
        ("lr: 1e-6", "lr", 1e-6),
        ("lr: 1", "lr", 1.0),
        ("lr: '0.5'", "lr", 0.5),
        ("kl-loss-type: k2", "kl_loss_type", "k2"),
        ("--n-samples-per-prompt: 4", "n_samples_per_prompt", 4),
        ("rm_type: 7", "rm_type", "7"),
        ("colocate: true", "colocate", True),
        ("colocate: false", "colocate", False),
        ("rewards_normalization: false", "rewards_normalization", False),
        ("disable-rewards-normalization: true", "rewards_normalization", False),
        ("disable-rewards-normalization: false", "rewards_normalization", True),
        ("offload_train: false", "offload_train", False),
        ("no-offload-train: true", "offload_train", False),
        ("rollout_stop: [a, b]", "rollout_stop", ["a", "b"]),
        ("rollout_stop: a", "rollout_stop", ["a"]),
        ("rollout_stop_token_ids: [1, 2]", "rollout_stop_token_ids", [1, 2]),
        (
            "apply_chat_template_kwargs: {enable_thinking: false}",
            "apply_chat_template_kwargs",
            {"enable_thinking": False},
        ),
        ("apply_chat_template_kwargs: '{\"x\": 1}'", "apply_chat_template_kwargs", {"x": 1}),
        ("eps_clip_high: null", "eps_clip_high", None),
        ("num_layers: 4", "num_layers", 4),
        ("rollout_sample_hook_path: [a.b, c.d]", "rollout_sample_hook_path", ["a.b", "c.d"]),
    ],
)
def test_a_known_key_is_read_as_its_flag_would_be(read, text, attribute, value):
    values = read(text)
    assert (values.known, values.extra, values.problems) == ({attribute: value}, {}, [])
    assert type(values.known[attribute]) is type(value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("lr: high", "lr: invalid float value: 'high'"),
        ("n_samples_per_prompt: 1.5", "n_samples_per_prompt: invalid int value: '1.5'"),
        ("n_samples_per_prompt: [1]", "it takes one value, not a list"),
        ("n_samples_per_prompt: true", "it takes no true or false"),
        ("n_samples_per_prompt: null", "null is no value for it; leave the key out"),
        ("kl_loss_type: k9", "kl_loss_type: invalid choice: 'k9' .choose from 'k1', 'k2', 'k3'"),
        ("colocate: 1", "colocate: 1 is not true or false"),
        ("rollout_stop: []", "it takes at least one value"),
        ("rollout_stop: {a: b}", "it takes one value, not a mapping"),
        ("rollout_stop_token_ids: [a]", "invalid int value: 'a'"),
        ("apply_chat_template_kwargs: [1]", "is no JSON object"),
        ("eval_datasets: []", "eval_datasets: is set by slime: use --eval-config"),
        ("rank: 0", "rank: is set by slime: each process gets its own"),
        ("custom_config_path: x", "custom_config_path: is set by slime"),
        ("my-own key: 1", "cannot be an attribute of args"),
        ("__class__: 1", "cannot be an attribute of args"),
        ("freeze: 1", "freeze: cannot be an attribute of args"),
        ("lr: 1\nlearning-rate: 2\nlr: 3", "the key 'lr' is there twice"),
        ("lr: 1\n--lr: 3", "--lr: --lr is set already in --custom-config-path .*:1; keep one"),
        ("sglang_mem_fraction_statik: 0.5", "no flag; did you mean sglang_mem_fraction_static"),
    ],
)
def test_a_key_that_cannot_be_used_is_named_with_its_line(read, text, reason):
    number = text.count("\n") + 1
    with pytest.raises(UsageError, match=rf"conf.yaml:{number}: .*{reason}"):
        raise UsageError(read(text).problems)


def test_a_key_that_is_no_flag_is_for_hooks_just_as_it_stands(read):
    values = read("my_threshold: 0.5\nmy-table: {a: [1, null]}\n")
    assert values.extra == {"my_threshold": 0.5, "my_table": {"a": [1, None]}}
    assert (values.known, values.problems, values.warnings) == ({}, [], [])


def test_a_key_much_like_a_flag_is_warned_about(read):
    values = read("x: 1\nrollout_temprature: 0.5\n")
    assert values.extra == {"x": 1, "rollout_temprature": 0.5}
    (warning,) = values.warnings
    assert "conf.yaml:2: rollout_temprature: is no flag" in warning and "did you mean rollout_temperature?" in warning


def test_an_empty_file_sets_nothing_and_a_list_is_refused(read):
    assert read("# nothing\n") == FileValues()
    with pytest.raises(UsageError, match="conf.yaml:1: must be a mapping"):
        read("[1]")


def test_the_file_goes_before_the_command_line_and_says_so(read):
    args, explicit = argparse.Namespace(lr=1e-5, kl_coef=0.1, load="x", seed=1), {"lr", "kl_coef", "load"}
    values = read("lr: 1e-6\nkl_coef: 0.1\nload: null\nseed: 2\n")
    lr, load = sorted(apply_known(args, explicit, values))
    assert vars(args) == {"lr": 1e-6, "kl_coef": 0.1, "load": None, "seed": 2}
    assert explicit == {"lr", "kl_coef", "seed"}
    assert lr.endswith("conf.yaml:1: lr 1e-06 replaces 1e-05 of the command line.")
    assert load.endswith('conf.yaml:3: load null replaces "x" of the command line.')


def test_a_derived_attribute_cannot_be_set(read):
    args = argparse.Namespace(world_sise=8)
    (sentence,) = apply_extra(args, read("mine: 1\nworld_sise: 9\n"))
    assert sentence.endswith("conf.yaml:2: world_sise: is derived from other flags and cannot be set.")
    assert vars(args) == {"world_sise": 8, "mine": 1}


def test_every_flag_accepts_its_own_default():
    reader = FlagReader(options())
    for attribute in reader.names():
        found = reader.find(attribute)
        assert found is not None, attribute
        default = found.action.default
        if isinstance(default, bool | int | float | str) and found.action.nargs in (None, 0):
            assert read_flag(found, default).get(attribute, default) == default, attribute


def test_sglangs_older_names_set_what_their_successors_set():
    assert value_of("sglang-nsa-decode-backend", "fa3") == {"sglang_dsa_decode_backend": "fa3"}


VALID = "lr: 1e-6\ncolocate: true\nrollout_stop: [a, b]\nmy_own: {a: 1}\nsglang_mem_fraction_static: 0.5\n"
PIECES = st.sampled_from([*"{}[]:,-&*!|'\"#\n 0", "null", "true", "1e999", "{}", "num_layers: ", "load: ", "--"])


@settings(max_examples=100, deadline=None)
@given(text=edited(VALID, PIECES))
def test_a_mutated_file_is_read_or_refused_in_words(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "mutated_custom.yaml"
    path.write_text(text)
    with contextlib.suppress(UsageError):
        values = custom_config_values(str(path), options(), explain_unknown=explain_nothing)
        assert all(isinstance(text, str) for text in values.problems)


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(sorted(FlagReader(options()).names())),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
        max_leaves=4,
    ),
)
def test_any_value_of_any_flag_is_read_or_refused_in_words(tmp_path_factory, attribute, value):
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_text(json.dumps({attribute: value}))
    with contextlib.suppress(UsageError):
        custom_config_values(str(path), options(), explain_unknown=explain_nothing)
