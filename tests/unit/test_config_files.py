"""Files that stand for flags, through `parse_args`: --custom-config-path, --megatron-config-path and --eval-config."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime.config.parse import CommandLine, parse_args
from slime.config.roles import parse_megatron_role_args
from slime.utils.errors import UsageError
from tests.unit.argument_lines import base, errors, line

__all__ = ["base"]  # a fixture


def test_files_stand_for_flags_before_anything_is_derived(
    base: dict[str, list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    Path("conf.yaml").write_text("n_samples_per_prompt: 4\nlr: 1e-4\nmy_threshold: 0.5\nprompt_key: text\n")
    Path("data.jsonl").write_text('{"text": "1+1=", "label": "2"}\n' * 4)
    Path("roles.yaml").write_text("megatron: [{role: actor, overrides: {lr: 1e-3, seed: '7'}}]\n")
    args = parse_args(argv=line(base, "--lr 1e-5 --custom-config-path conf.yaml --megatron-config-path roles.yaml"))
    assert args.global_batch_size == args.rollout_batch_size * 4
    assert (args.input_key, args.lr, args.seed, args.my_threshold) == ("text", 1e-3, 7, 0.5)
    assert "conf.yaml:2: lr 0.0001 replaces 1e-05 of the command line." in caplog.text
    assert "roles.yaml:1: lr 0.001 replaces 0.0001 of" in caplog.text
    critic = parse_megatron_role_args(args, "critic")
    assert (critic.lr, critic.seed, critic.untie_embeddings_and_output_weights) == (1e-4, 1234, True)


@pytest.mark.parametrize(
    ("flag", "text", "message"),
    [
        ("custom", "lr: -1", "--lr -1.0 must be at least 0"),
        ("custom", "wandb_team: x", "--wandb-team has no effect without --use-wandb"),
        ("custom", "global_dataset: 1\nworld_size: 3", "conf.yaml:2: world_size: is set by slime"),
        (
            "custom",
            "output_dirs: 1\nsglang_tp_size: 3",
            "--sglang-tp-size is set by slime: use --rollout-num-gpus-per-",
        ),
        ("custom", "eval_datasets2: 1\nrouter_overrides: {}", "conf.yaml:2: router_overrides: "),
        ("custom", "rollout_global_dataset: 1", "conf.yaml:1: rollout_global_dataset: "),
        ("megatron", "megatron: [{role: critic}]", "the critic has no effect without --advantage-estimator ppo"),
        ("megatron", "megatron: [{role: actor, args: {hidden_siz: 1}}]", "did you mean hidden_size"),
        ("megatron", "megatron: [{role: actor, args: {hidden_size: 65}}]", "--hidden-size: the flags say 65"),
    ],
)
def test_what_is_wrong_in_a_file_is_found_like_on_the_command_line(
    base: dict[str, list[str]], flag: str, text: str, message: str
) -> None:
    Path("conf.yaml").write_text(text)
    with pytest.raises(UsageError, match=message):
        parse_args(argv=line(base, f"--{flag}-config-path conf.yaml"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("recompute_granularity: full", "the critic's entry: --recompute-granularity full needs --recompute-method"),
        ("num_layers: 3", "the critic's entry: --num-layers: the flags say 3, the HF config says 2"),
        ("recompute_modules: [mlp]", "the critic's entry: --recompute-modules has no effect without"),
        ("moe_router_topk: 9", "the critic's entry: --moe-router-topk has no effect without --num-experts"),
        (
            "calculate_per_token_loss: true, loss_agg_mode: seq-mean-token-sum",
            "the critic's entry: --calculate-per-token-loss is --loss-agg-mode token-mean and contradicts",
        ),
        ("clip_grad: -1", "the critic's entry: --clip-grad -1.0 must be at least 0"),
        (
            "lr_decay_style: linear, lr_warmup_iters: 9",
            "the critic's entry: --lr-warmup-iters 9 must be less than the 3 train steps of the run",
        ),
        ("num_virtual_stages_per_pipeline_rank: 2", "actor and critic have it in common"),
    ],
)
def test_a_critics_entry_is_checked_like_the_actors_flags(
    base: dict[str, list[str]], overrides: str, message: str
) -> None:
    Path("roles.yaml").write_text(f"megatron: [{{role: critic, overrides: {{{overrides}}}}}]\n")
    (sentence,) = errors(line(base, "--advantage-estimator ppo --megatron-config-path roles.yaml"))
    assert message in sentence


def test_what_only_the_actor_was_given_is_no_contradiction_of_the_critic(base: dict[str, list[str]]) -> None:
    entries = (
        "{role: actor, overrides: {optimizer_cpu_offload: true, optimizer_offload_fraction: 0.5}}",
        "{role: critic, overrides: {lr: 1e-3}}",
    )
    Path("roles.yaml").write_text(f"megatron: [{', '.join(entries)}]\n")
    args = parse_args(argv=line(base, "--advantage-estimator ppo --megatron-config-path roles.yaml"))
    critic = parse_megatron_role_args(args, "critic")
    assert (args.optimizer_cpu_offload, critic.optimizer_cpu_offload, critic.lr) == (True, False, 1e-3)


def test_a_critics_schedule_is_checked_where_only_the_actor_has_an_entry(base: dict[str, list[str]]) -> None:
    Path("roles.yaml").write_text("megatron: [{role: actor, overrides: {lr_decay_style: constant}}]\n")
    flags = "--advantage-estimator ppo --megatron-config-path roles.yaml --lr-decay-style linear --lr-warmup-iters 9"
    (sentence,) = errors(line(base, flags))
    assert "--lr-warmup-iters 9 must be less than" in sentence


@pytest.mark.parametrize(
    ("entry", "of_actor", "of_critic"),
    [
        ("{role: actor, overrides: {weight_decay: 0.5}}", (0.5, 0.5, False), (0.01, 0.01, False)),
        ("{role: critic, overrides: {weight_decay: 0.5}}", (0.01, 0.01, False), (0.5, 0.5, False)),
        ("{role: actor, overrides: {loss_agg_mode: token-mean}}", (0.01, 0.01, True), (0.01, 0.01, False)),
        ("{role: critic, overrides: {loss_agg_mode: token-mean}}", (0.01, 0.01, False), (0.01, 0.01, True)),
    ],
)
def test_what_derives_from_a_roles_values_is_that_roles(
    base: dict[str, list[str]], entry: str, of_actor: tuple[float, ...], of_critic: tuple[float, ...]
) -> None:
    Path("roles.yaml").write_text(f"megatron: [{entry}]\n")
    args = parse_args(argv=line(base, "--advantage-estimator ppo --megatron-config-path roles.yaml"))
    found = [
        (role.start_weight_decay, role.end_weight_decay, role.calculate_per_token_loss)
        for role in (parse_megatron_role_args(args, "actor"), parse_megatron_role_args(args, "critic"))
    ]
    assert found == [of_actor, of_critic]


def test_flags_of_the_actor_may_be_without_effect_beside_the_critics_entry(base: dict[str, list[str]]) -> None:
    entry = (
        "{role: critic, overrides: {recompute_granularity: full, recompute_method: uniform, recompute_num_layers: 1}}"
    )
    Path("roles.yaml").write_text(f"megatron: [{entry}]\n")
    flags = "--recompute-activations --recompute-modules mlp --advantage-estimator ppo"
    args = parse_args(argv=line(base, f"{flags} --megatron-config-path roles.yaml"))
    critic = parse_megatron_role_args(args, "critic")
    assert (args.recompute_granularity, critic.recompute_granularity) == ("selective", "full")


def test_a_critic_keeps_what_has_an_effect_for_it_alone(base: dict[str, list[str]]) -> None:
    """The actor's rate is constant, so a least rate has no effect for it; the critic's rate decays to it."""
    Path("roles.yaml").write_text("megatron: [{role: critic, overrides: {lr_decay_style: cosine}}]\n")
    Path("eval.jsonl").write_text('{"input": "1+1=", "label": "2"}\n')
    Path("eval.yaml").write_text("eval: {datasets: [{name: sums, path: eval.jsonl, rm_type: math}]}\n")
    flags = "--advantage-estimator ppo --lr 1e-5 --min-lr 1e-6 --lr-decay-style constant"
    evaluation = "--eval-config eval.yaml --eval-interval 1"
    more = f"{flags} {evaluation} --megatron-config-path roles.yaml"
    args = parse_args(argv=line(base, more, without="--strict-flags"))
    critic = parse_megatron_role_args(args, "critic")
    assert (critic.lr, critic.min_lr, critic.lr_decay_style) == (1e-5, 1e-6, "cosine")
    assert (args.min_lr, args.eval_prompt_data) == (0.0, ["sums", "eval.jsonl"])


def test_a_file_that_is_not_there_does_not_stop_a_plan(base: dict[str, list[str]]) -> None:
    files = "--custom-config-path a.yaml --megatron-config-path b.yaml --eval-config c.yaml --eval-interval 1"
    problems = CommandLine().check(line(base, files)).problems
    assert problems.wrong == [] and len(problems.environment) == 3
    assert all("there is no such file" in sentence for sentence in problems.environment)


def test_eval_settings_that_change_nothing_warn(base: dict[str, list[str]]) -> None:
    Path("eval.yaml").write_text("datasets: {a: {path: data.jsonl, reward_model: x}}")
    checked = CommandLine().check(line(base, "--eval-config eval.yaml --eval-interval 1"))
    (sentence,) = checked.problems.wrong  # the line is strict
    assert sentence == "--eval-config eval.yaml:1: reward_model has no effect on an evaluation; leave it out."
    assert [dataset.name for dataset in checked.args.eval_datasets] == ["a"]
