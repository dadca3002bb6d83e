"""--megatron-config-path: the actor's entry is read as flags, the critic's stands by."""

from __future__ import annotations

import argparse
import contextlib
import functools
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.config.args import Args
from slime.config.custom_config import FileValues
from slime.config.parse import build_parser
from slime.config.roles import (
    CRITIC_FORCED,
    NOT_INHERITED,
    Role,
    critic_problems,
    parse_megatron_role_args,
    role_overrides,
    role_values,
)
from slime.utils.errors import UsageError
from tests.unit.yaml_mutations import edited

Read = Callable[[str], dict[Role, FileValues]]


@functools.cache
def options() -> dict[str, argparse.Action]:
    return build_parser().options()


@pytest.fixture
def read(tmp_path: Path) -> Read:
    def read_text(text: str) -> dict[Role, FileValues]:
        path = tmp_path / "roles.yaml"
        path.write_text(text)
        return role_overrides(str(path), options())

    return read_text


VALID = """\
megatron:
  - name: policy
    role: actor
    overrides: {lr: '1e-6', num_layers: 4}
  - name: value
    role: critic
    args:
      lr: 1e-5
"""


def test_each_role_gets_its_values_typed_like_flags(read):
    roles = read(VALID)
    assert roles["actor"].known == {"lr": 1e-6, "num_layers": 4} and roles["critic"].known == {"lr": 1e-5}


NO_CHECKPOINTS = {"load": None, "ckpt_step": None, "save": None, "finetune": True, "checkpoint_contents": ["model"]}


def test_the_critic_starts_from_the_args_without_the_actors_values(read):
    base = Args(lr=1.0, num_layers=2, kl_coef=0.1, use_opd=True, seed=1, **NO_CHECKPOINTS)
    base.custom_advantage_function_path, base.untie_embeddings_and_output_weights = "a.b", False
    values = role_values(base, read(VALID))
    args = base.replace(**values["actor"], megatron_role_values=values).freeze()
    actor, critic = parse_megatron_role_args(args, "actor"), parse_megatron_role_args(args, "critic")
    assert (actor.lr, actor.num_layers, actor.kl_coef, actor.use_opd) == (1e-6, 4, 0.1, True)
    assert (critic.lr, critic.num_layers, critic.seed) == (1e-5, 2, 1)
    assert {name: vars(critic)[name] for name in CRITIC_FORCED} == CRITIC_FORCED


def test_a_role_without_a_file_gets_only_what_the_role_itself_forces():
    values = role_values(Args(lr=1.0), {})
    assert values == {"actor": {}, "critic": NOT_INHERITED | CRITIC_FORCED}


def test_lists_of_trained_parameters_are_the_actors_unless_the_critics_entry_gives_them(read):
    base = Args(freeze_params_name_list=["embedding"], only_train_params_name_list=None, **NO_CHECKPOINTS)
    inherited = role_values(base, {})["critic"]
    assert inherited["freeze_params_name_list"] is inherited["only_train_params_name_list"] is None
    own = role_values(base, read("megatron:\n- {role: critic, overrides: {only_train_params_name_list: [layers]}}"))
    assert own["critic"]["freeze_params_name_list"] is None
    assert own["critic"]["only_train_params_name_list"] == ["layers"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("roles: []", r"roles.yaml:1: roles: unknown key; .*megatron"),
        ("megatron: []", r"roles.yaml:1: megatron: is empty"),
        ("megatron:\n- {role: teacher}", r"roles.yaml:2: megatron\[0\].role: 'teacher' is none of 'actor', 'critic'"),
        ("megatron:\n- {name: actor}", r"roles.yaml:2: megatron\[0\].role: is missing"),
        ("megatron:\n- {role: actor, overides: {}}", r"megatron\[0\].overides: unknown key; did you mean overrides"),
        ("megatron:\n- role: actor\n- role: actor", r"roles.yaml:3: .*two entries for the actor"),
        ("megatron:\n- role: actor\n  overrides: {}\n  args: {}", r"roles.yaml:4: .*is the same as overrides"),
    ],
)
def test_a_file_of_another_form_is_refused(read, text, message):
    with pytest.raises(UsageError, match=message):
        read(text)


def test_a_wrong_argument_is_named_with_its_line_and_the_nearest_names(read):
    text = (
        "megatron:\n"
        "  - role: critic\n"
        "    overrides:\n"
        "      nun_layers: 4\n"
        "      lr: fast\n"
        "      kl_coef: 0.1\n"
        "      use_opd: false\n"
    )
    unknown, typed, forced = read(text)["critic"].problems
    assert "roles.yaml:4: megatron[0].overrides.nun_layers: there is no such attribute; did you mean num_l" in unknown
    assert typed.endswith("roles.yaml:5: megatron[0].overrides.lr: invalid float value: 'fast'.")
    assert forced.endswith("roles.yaml:6: kl_coef: is always 0.0 for the critic; leave it out.")


def test_a_roles_size_is_ignored_with_a_warning(read):
    values = read("megatron:\n- role: actor\n  num_nodes: 2\n  overrides: {num_gpus_per_node: 4, lr: 1}\n")["actor"]
    assert values.known == {"lr": 1.0} and values.problems == []
    first, second = values.warnings
    assert "roles.yaml:3: megatron[0].num_nodes: is ignored: --actor-num-nodes" in first
    assert "roles.yaml:4: megatron[0].overrides.num_gpus_per_node: is ignored" in second


def test_a_critic_needs_an_algorithm_with_a_critic(read):
    roles = read(VALID)
    assert critic_problems(roles, "ppo") == critic_problems({"actor": roles["actor"]}, "grpo") == []
    (sentence,) = critic_problems(roles, "grpo")
    assert "the critic has no effect without --advantage-estimator ppo" in sentence


PIECES = st.sampled_from([*"{}[]:,-&*!|'\"#\n 0", "null", "true", "role: actor", "args: ", "num_nodes: 1", "kl_coef"])


@settings(max_examples=100, deadline=None)
@given(text=edited(VALID, PIECES))
def test_a_mutated_file_is_read_or_refused_in_words(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "mutated_roles.yaml"
    path.write_text(text)
    with contextlib.suppress(UsageError):
        role_overrides(str(path), options())
