"""A flag without an effect is named in one warning, numbers are in range, and what is absent is no contradiction."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import pytest

from slime.config.parse import FLAG_CLASSES, CommandLine, accept
from slime.config.problems import Problems
from slime.config.rules import files
from slime.config.rules.effect import POINTLESS
from tests.unit.argument_lines import NO_OFFLOAD, Check, check, command_line, has

__all__ = ["check", "command_line"]  # fixtures


# ---- every given flag has an effect

NO_EFFECT = {
    "--tis-clip 3": "--tis-clip has no effect without --use-tis.",
    "--opsm-delta 1": "--opsm-delta has no effect without --use-opsm.",
    "--opd-kl-coef 2": "--opd-kl-coef has no effect without --use-opd.",
    "--opd-teacher-ckpt-step 1": "--opd-teacher-ckpt-step has no effect without --opd-teacher-load.",
    "--kl-target 1": "--kl-target has no effect without --kl-ctrl adaptive.",
    "--gamma 0.9": "no effect without --advantage-estimator reinforce_plus_plus or --advantage-estimator ppo or",
    "--value-clip 0.1": "--value-clip has no effect without --advantage-estimator ppo.",
    "--pf-ppo-weight-pow 3": "--pf-ppo-weight-pow has no effect without --pf-ppo-reweight pow.",
    "--lora-alpha 1": "--lora-alpha has no effect without --lora-rank.",
    "--update-weight-disk-keep-files": "keep-files has no effect without --update-weight-transport disk.",
    "--update-weight-delta-checksum blake3": "has no effect without --update-weight-mode delta.",
    "--rollout-health-check-interval 3": "has no effect without --use-fault-tolerance.",
    "--mask-offpolicy-in-partial-rollout": "has no effect without --partial-rollout.",
    "--memory-snapshot-num-steps 1": "has no effect without --record-memory-history.",
    "--ci-save-grad-norm x": "--ci-save-grad-norm has no effect without --ci-test.",
    "--code-sandbox-concurrency 2": "has no effect without --code-sandbox-url.",
    "--rollout-task-type code": "--rollout-task-type has no effect without --rollout-buffer-url.",
    "--eval-reward-key x": "--eval-reward-key has no effect without --eval-prompt-data or --eval-config.",
    "--load-forge-rollout-data x/{rollout_id}": "without --rollout-function-path slime.rollout.forge_load",
    "--loss-type sft_loss --entropy-coef 0.1": "--entropy-coef has no effect with --loss-type sft_loss;",
    "--disable-compute-advantages-and-returns --loss-type sft_loss --kl-coef 0.1": "--kl-coef has no effect with --l",
    "--disable-rollout-global-dataset": "--prompt-data has no effect with --disable-rollout-global-dataset;",
    "--loss-mask-type qwen3": "--loss-mask-type qwen3 has no effect with the default rollout",
}


@pytest.mark.parametrize("changes", NO_EFFECT)
def test_a_flag_that_would_do_nothing_is_refused_with_strict_flags(check: Check, changes: str) -> None:
    has(check(changes).problems.wrong, NO_EFFECT[changes])
    strict = check(changes, without="--strict-flags").problems
    has(strict.no_effect, NO_EFFECT[changes])
    assert not any(" no effect" in sentence for sentence in strict.all())


def test_flags_without_effect_are_named_in_one_warning(check: Check, caplog: pytest.LogCaptureFixture) -> None:
    given = check("--tis-clip 3 --kl-loss-coef 0.1 --linear-key-head-dim 8", without="--strict-flags")
    accept(given)
    expected = (
        "3 flags have no effect here (--strict-flags refuses them): --kl-loss-coef without --use-kl-loss; --tis-clip "
        "without --use-tis; --linear-key-head-dim without --experimental-attention-variant gated_delta_net."
    )
    warnings = [record.getMessage() for record in caplog.records if "no effect here" in record.getMessage()]
    assert warnings == [expected] and given.warnings().count(expected) == 1
    (one,) = check("--tis-clip 3", without="--strict-flags").warnings()
    assert one == "1 flag has no effect here (--strict-flags refuses them): --tis-clip without --use-tis."
    assert check(without="--strict-flags").warnings() == []


def test_a_warning_hides_no_error(check: Check) -> None:
    problems = check("--use-tiss --tis-clip 3 --eval-temperature -1", without="--strict-flags").problems
    has(problems.wrong, "unknown flag --use-tiss: did you mean --use-tis?")
    has(problems.wrong, "--eval-temperature -1.0 must be at least 0.")
    assert problems.no_effect == ["--eval-temperature has no effect without --eval-prompt-data or --eval-config."]


@pytest.mark.parametrize(
    ("changes", "attribute", "value"),
    [
        ("--sequence-parallel", "sequence_parallel", False),
        ("--eval-interval 2", "eval_interval", None),
        ("--loss-type sft_loss --advantage-estimator ppo", "use_critic", False),
        ("--use-dynamic-batch-size --max-tokens-per-gpu 64 --micro-batch-size 4", "micro_batch_size", 1),
        ("--recompute-num-layers 1", "recompute_num_layers", None),
        ("--main-grads-dtype bf16 --accelerator cuda --dry-run", "grad_reduce_in_fp32", True),
        ("--sharp-enabled-group dp", "sharp_enabled_group", None),
    ],
)
def test_what_has_no_effect_is_as_if_it_was_not_given(
    check: Check, changes: str, attribute: str, value: object
) -> None:
    given = check(changes, without="--strict-flags")
    assert given.problems.no_effect and vars(given.args)[attribute] == value


def test_a_critics_entry_warns_like_the_actors_flags(check: Check, tmp_path: Path) -> None:
    entry = "megatron: [{role: critic, overrides: {recompute_modules: [mlp], lr: 1e-5}}]"
    (tmp_path / "roles.yaml").write_text(entry)
    given = check("--advantage-estimator ppo --megatron-config-path roles.yaml", without="--strict-flags")
    has(given.problems.no_effect, "the critic's entry: --recompute-modules has no effect without")
    assert given.problems.all() == []
    assert given.args.megatron_role_values["critic"]["recompute_modules"] is None


def test_offload_and_one_of_its_parts_contradict_each_other(check: Check) -> None:
    has(check("--offload --no-offload-train").problems.wrong, "--offload-train and --offload, which is short for both")


def test_a_coefficient_of_zero_asks_for_nothing(check: Check) -> None:
    assert check("--kl-loss-coef 0 --kl-coef 0.00 --entropy-coef 0").problems == Problems()


def test_the_prompt_file_of_a_generator_that_reads_it_itself_has_an_effect(check: Check) -> None:
    buffer = "--rollout-function-path slime_plugins.rollout_buffer.rollout_buffer_example.generate_rollout"
    accept(check(f"--disable-rollout-global-dataset --rollout-buffer-url http://b {buffer}"))


def test_what_a_flag_needs_exists(command_line: CommandLine) -> None:
    attributes = {action.dest for action in command_line.parser.options().values()}
    for field in (field for flags_class in FLAG_CLASSES for field in dataclasses.fields(flags_class)):
        for need in field.metadata["needs"]:
            assert need.replace(".", "=").partition("=")[0] in attributes, (field.name, need)
    assert {name for row in POINTLESS for name in row.names.split()} <= attributes


def test_engine_flags_of_a_train_only_run_are_named_once(check: Check, caplog: pytest.LogCaptureFixture) -> None:
    sft = (
        "--debug-train-only --loss-type sft_loss --rollout-function-path slime.rollout.sft_rollout.generate_rollout "
        "--sglang-mem-fraction-static 0.7 --router-policy random --rollout-num-gpus 2"
    )
    accept(check(sft, without="--colocate --rm-type --label-key"))
    sentence = "these flags have no effect: --rollout-num-gpus --router-policy --sglang-mem-fraction-static."
    assert [record.levelno for record in caplog.records if sentence in record.getMessage()] == [logging.WARNING]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ("--num-steps-per-rollout 0", "--num-steps-per-rollout 0 must be at least 1"),
        ("--prefill-num-servers 0", "--prefill-num-servers 0 must be at least 1"),
        ("--prefill-num-servers 1 --rollout-num-gpus-per-engine 0", "-gpus-per-engine 0 must be at least 1"),
        ("--eps-clip nan", "--eps-clip nan is no finite number"),
        ("--lr inf", "--lr inf is no finite number"),
        ("--advantage-estimator ppo --lambd 1.5", "--lambd 1.5 must be at most 1"),
        (
            "--use-stateless-adam",
            "--use-stateless-adam keeps no optimizer state: it needs --optimizer adam",
        ),
        ("--kl-ctrl adaptive --kl-coef 0.1 --ref-load hf", "--kl-ctrl adaptive needs --kl-target and --kl-horizon"),
        ("--kl-ctrl adaptive --kl-coef 0.1 --kl-target 0 --kl-horizon 9", "--kl-target 0.0 must be > 0"),
        ("--loss-agg-mode seq-mean-token-sum-norm", "-norm needs --rollout-max-response-len"),
        ("--rollout-max-response-len 4 --overlong-buffer-len 5", "--overlong-buffer-len 5 is longer than"),
    ],
)
def test_numbers_and_parameters_are_in_range(check: Check, changes: str, sentence: str) -> None:
    has(check(changes).problems.wrong, sentence)


def test_a_checkpoint_holds_no_optimizer_where_it_is_left_out(check: Check) -> None:
    assert check("--save out").args.checkpoint_contents == ["model", "optimizer", "rng"]
    assert check("--save out --no-save-optim").args.checkpoint_contents == ["model", "rng"]
    assert check("--save out --checkpoint-contents model").args.no_save_optim is True


def test_either_name_and_a_target_turn_the_profiler_on(check: Check) -> None:
    for changes in ("--profile", "--use-pytorch-profiler", "--profile-target train_actor"):
        assert check(changes).args.use_pytorch_profiler is True
    assert check().args.use_pytorch_profiler is False


@pytest.mark.parametrize("estimator", ["grpo", "gspo", "cispo", "rloo", "remax", "opo"])
def test_a_kl_in_the_rewards_is_refused_where_no_reward_takes_it(check: Check, estimator: str) -> None:
    wrong = check(f"--advantage-estimator {estimator} --kl-coef 0.1 --ref-load hf").problems.wrong
    has(wrong, f"--kl-coef 0.1 has no effect with --advantage-estimator {estimator}, which does not take")


def test_token_mean_and_the_per_token_loss_are_one_thing(check: Check) -> None:
    for changes in ("--calculate-per-token-loss", "--loss-agg-mode token-mean"):
        args = check(changes).args
        assert (args.calculate_per_token_loss, args.loss_agg_mode) == (True, "token-mean")
    assert check("--calculate-per-token-loss --loss-agg-mode token-mean").problems == Problems()


@pytest.mark.parametrize("mode", ["seq-mean-token-mean", "seq-mean-token-sum"])
def test_a_per_token_loss_contradicts_any_other_aggregation(check: Check, mode: str) -> None:
    (wrong,) = check(f"--calculate-per-token-loss --loss-agg-mode {mode}").problems.wrong
    assert wrong.startswith("--calculate-per-token-loss is --loss-agg-mode token-mean and contradicts --loss-agg-mode")


def test_some_rollout_is_left_to_the_actor(check: Check) -> None:
    ppo = "--advantage-estimator ppo --num-rollout 4 --num-critic-only-steps"
    has(
        check(f"{ppo} 4").problems.wrong,
        "--num-critic-only-steps 4 leaves none of the 4 rollouts of the run to the actor",
    )
    assert check(f"{ppo} 3").problems == Problems()


def test_what_an_adam_without_moments_cannot_do_is_a_warning(check: Check) -> None:
    stateless = "--use-stateless-adam --no-save-optim --save ckpt"
    given = check(f"{stateless} --reset-optimizer-states --adam-beta1 0.8 --adam-beta2 0.9")
    assert given.problems == Problems()
    has(given.warnings(), "--use-stateless-adam keeps no moments, so these flags have no effect: --reset-optimizer-")
    has(given.warnings(), "--reset-optimizer-states --adam-beta1 --adam-beta2.")
    assert not any("keeps no moments" in warning for warning in check(stateless).warnings())


def test_opsm_without_anything_that_is_old_is_a_warning(check: Check) -> None:
    has(check("--use-opsm").warnings(), "--use-opsm has no effect with one train step per rollout")
    for changes in ("--ppo-epochs 2", "--num-steps-per-rollout 2", "--use-rollout-logprobs"):
        assert not any("--use-opsm" in warning for warning in check(f"--use-opsm {changes}").warnings())


def test_an_evaluation_set_that_compares_has_a_label(check: Check) -> None:
    wrong = check("--eval-interval 1 --eval-prompt-data a data.jsonl", without="--label-key").problems.wrong
    has(wrong, "evaluation data set a: rm_type math compares with a label: name its field with --eval-label-key")


def test_unreadable_things_are_no_contradictions(check: Check) -> None:
    for changes in ("--prompt-data absent.jsonl", "--hf-checkpoint absent", "--custom-rm-path hooks.py:absent"):
        problems = check(changes).problems
        assert problems.environment and not any("absent" in sentence for sentence in problems.wrong), problems


def test_a_data_file_is_read_again_only_when_it_changed(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []
    original = files.check_data_file
    monkeypatch.setattr(files, "check_data_file", lambda path, **keys: reads.append(path) or original(path, **keys))
    assert check().problems == check().problems == Problems()
    assert reads == ["data.jsonl"]
    Path("data.jsonl").write_text('{"input": "a", "label": "b"}\nbroken\n')
    has(check().problems.environment, "data.jsonl:2: not valid JSON")
    assert len(reads) == 2


def test_checking_needs_no_gpu_for_a_layout_of_gpus(check: Check) -> None:
    problems = check(f"--accelerator cuda --dry-run --actor-num-gpus-per-node 8 {NO_OFFLOAD}").problems
    assert problems.environment == []


@pytest.mark.parametrize("name", ["a" * 300, "/a" * 3000, "x" * 300 + ".jsonl", "a" * 300 + ".py:f"])
def test_names_that_are_no_paths_are_refused(check: Check, name: str) -> None:
    for flag in ("--hf-checkpoint", "--prompt-data", "--ref-load", "--load", "--save", "--custom-rm-path"):
        problems = check(f"{flag} {name}").problems
        assert problems.environment or flag == "--load", flag


def test_what_is_without_effect_keeps_what_other_code_reads(check: Check) -> None:
    """The estimator names the loss, too; by FLOPs alone nothing is balanced; a user's data source reads any flag."""
    kept = check("--disable-compute-advantages-and-returns --advantage-estimator gspo", without="--strict-flags").args
    assert kept.advantage_estimator == "gspo"
    assert check("--balance-by-flops", without="--strict-flags").args.balance_data is False
    own = check(
        "--disable-rollout-global-dataset --data-source-path mine.Source --prompt-data x", without="--strict-flags"
    ).args
    assert own.prompt_data == "x"
