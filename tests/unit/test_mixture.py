"""Prompts of several files are drawn by weight, go on after a resume, and are graded and sampled each in its way."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from slime.algorithms.estimators import overlong_penalties
from slime.config.prompt_sources import params_of, prompt_sources
from slime.config.rules import generation as generation_rules
from slime.observability.rollout_metrics import compute_metrics_from_samples
from slime.plan.layout import lengths_of
from slime.rollout import data_source
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.rm_hub import RM_TYPES, rm_needs_label
from slime.rollout.sample_hooks import set_current_rollout_id
from slime.rollout.sampling import generation
from slime.utils.errors import UsageError
from tests.unit.argument_lines import check, command_line
from tests.unit.plan_fakes import plan_args
from tests.unit.rollout_fakes import LetterTokenizer, rollout_args

__all__ = ["check", "command_line"]
YAML = """
defaults: {label_key: label}
datasets:
  many: {path: %(many)s, weight: 3, rm_type: math, max_response_len: 7, stop: "."}
  few:
    path: %(few)s
    weight: 1
    custom_rm_path: tests.unit.rollout_fakes:reward_response_length
    metadata_overrides: {level: 2}
"""


@pytest.fixture
def make(tmp_path, monkeypatch):
    monkeypatch.setattr(data_source, "load_tokenizer", lambda name, **kw: LetterTokenizer())
    for name, letters in (("many", "abcdefgh"), ("few", "xyz")):
        rows = "".join(json.dumps({"input": letter, "label": letter.upper()}) + "\n" for letter in letters)
        (tmp_path / f"{name}.jsonl").write_text(rows)

    def build(text=YAML, **changes):
        (tmp_path / "mix.yaml").write_text(text % {name: tmp_path / f"{name}.jsonl" for name in ("many", "few")})
        args = rollout_args(prompt_data=str(tmp_path / "mix.yaml"), n_samples_per_prompt=1, **changes)
        return RolloutDataSourceWithBuffer(args)

    set_current_rollout_id(0)
    return build


def drawn(source, number):
    return [group[0].prompt for group in source.get_samples(number)]


def test_any_stretch_of_a_run_has_the_shares_of_the_weights(make):
    prompts = drawn(make(), 400)
    few = [prompt in "xyz" for prompt in prompts]
    for begin in range(0, 400, 7):
        for end in range(begin, 400, 13):
            assert abs(sum(few[begin:end]) - (end - begin) / 4) <= 1
    # Each file goes through its own epochs: 300 prompts of 8 rows, 100 of 3.
    assert Counter(prompts)["a"] == 38 and Counter(prompts)["h"] == 37
    assert [prompt for prompt in prompts if prompt in "xyz"][:7] == list("xyzxyzx")


def test_each_file_grades_samples_and_limits_its_own_samples(make, monkeypatch):
    source = make()
    samples = [group[0] for group in source.get_samples(4)]
    of = {sample.metadata["source_name"]: sample for sample in samples}
    assert of["many"].metadata["rm_type"] == "math" and of["many"].custom_rm_path is None
    assert of["few"].custom_rm_path == "tests.unit.rollout_fakes:reward_response_length"
    assert of["few"].metadata == {"level": 2, "source_name": "few"} and of["few"].label in "XYZ"
    monkeypatch.setattr(generation, "load_tokenizer", lambda name, **kw: LetterTokenizer())
    state = generation.GenerateState(source.args)
    params = params_of(state.args, state.sampling_params, [of["many"]])
    assert (params["max_new_tokens"], params["stop"]) == (7, ["."])
    assert params_of(state.args, state.sampling_params, [of["few"]]) == state.sampling_params


@pytest.mark.parametrize("shuffles", [False, True])
def test_a_resumed_run_draws_the_very_next_prompts(make, tmp_path, shuffles):
    whole, first = make(rollout_shuffle=shuffles), make(rollout_shuffle=shuffles, save=str(tmp_path / "ckpt"))
    expected = drawn(whole, 60)
    assert drawn(first, 23) == expected[:23]
    first.save(4)
    resumed = make(rollout_shuffle=shuffles, load=str(tmp_path / "ckpt"))
    resumed.load(4)
    assert drawn(resumed, 37) == expected[23:]


def test_a_data_set_that_is_new_begins_at_its_first_prompt_with_a_warning(make, tmp_path, caplog):
    first = make(save=str(tmp_path / "ckpt"))
    drawn(first, 8)  # 6 of many, 2 of few
    first.save(0)
    renamed = make(YAML.replace("  few:", "  other:"), load=str(tmp_path / "ckpt"))
    renamed.load(0)
    prompts = drawn(renamed, 8)
    assert "other begin at their first prompt, few are not drawn any more" in caplog.text
    assert [prompt for prompt in prompts if prompt in "xyz"][:2] == ["x", "y"]
    assert next(prompt for prompt in prompts if prompt not in "xyz") == "g"


def test_a_run_of_one_file_goes_on_at_its_place_in_a_mixture(make, tmp_path, caplog):
    mixed = make(save=str(tmp_path / "ckpt"))
    drawn(mixed, 8)  # 6 of many, 2 of few
    mixed.save(0)
    for file, expected in (("few", "zxy"), ("many", "gha")):
        one = RolloutDataSourceWithBuffer(
            rollout_args(
                prompt_data=str(tmp_path / f"{file}.jsonl"), n_samples_per_prompt=1, load=str(tmp_path / "ckpt")
            )
        )
        one.load(0)
        assert drawn(one, 3) == list(expected)
    (tmp_path / "other.jsonl").write_text((tmp_path / "few.jsonl").read_text())
    caplog.clear()
    other = rollout_args(
        prompt_data=str(tmp_path / "other.jsonl"), n_samples_per_prompt=1, load=str(tmp_path / "ckpt")
    )
    new = RolloutDataSourceWithBuffer(other)
    new.load(0)
    assert drawn(new, 2) == ["x", "y"] and "begins at its first prompt" in caplog.text


def test_a_penalty_for_length_grows_before_the_limit_of_the_data_set(make):
    source = make(overlong_buffer_len=4)
    samples = [group[0] for group in source.get_samples(4)]
    for sample in samples:
        sample.response_length = 5
    # many ends at 7, and 5 is 2 of 4 tokens into the buffer; few ends where the run does, at 20
    expected = [-0.5 if sample.metadata["source_name"] == "many" else 0 for sample in samples]
    assert expected.count(-0.5) == 3 and overlong_penalties(source.args, samples) == expected


def test_a_plan_counts_the_longest_of_all_data_sets(make, tmp_path):
    text = YAML.replace("weight: 1", "weight: 1\n    max_response_len: 900").replace(
        "weight: 3", "weight: 3, max_prompt_len: 30"
    )
    args = make(text).args
    planned = plan_args(prompt_data=args.prompt_data, rollout_max_prompt_len=50, rollout_max_response_len=400)
    lengths = lengths_of(planned, None)
    assert (lengths.max_prompt, lengths.max_response) == (50, 900)


@pytest.mark.parametrize(
    ("entry", "flags", "told"),
    [
        (
            "max_response_len: 8",
            "--rollout-max-response-len 20 --overlong-buffer-len 9",
            "its max_response_len, 8; lower",
        ),
        (
            "min_new_tokens: 30",
            "--rollout-max-response-len 20",
            "its min_new_tokens, 30, is more than its max_response_len, 20",
        ),
        ("max_prompt_len: 32", "--rollout-max-context-len 32", "max_prompt_len 32 leaves no room for a response"),
        ("weight: 2", "--rollout-buffer-url http://host:8889", "--rollout-buffer-url reads one file"),
        ("multimodal_keys: {image: images}", "", "builds a model that sees images with --multimodal-keys alone"),
    ],
)
def test_limits_and_images_that_do_not_fit_the_run_are_refused(check, tmp_path, entry, flags, told):
    (tmp_path / "mix.yaml").write_text(f"datasets:\n  one:\n    path: data.jsonl\n    {entry}\n")
    problems = check(f"--prompt-data mix.yaml {flags}").problems.all()
    assert any(told in problem and "--prompt-data" in problem for problem in problems), problems


@pytest.mark.parametrize(
    ("entry", "flags"),
    [
        ("max_prompt_len: 32", "--prompt-truncation left"),
        ("max_response_len: 32", "--overlong-buffer-len 4"),
        ("custom_generate_function_path: slime.rollout.multi_turn.generate", "--max-turns 3"),
        (
            "custom_rm_path: slime.rollout.on_policy_distillation.reward_func",
            "--use-opd --opd-type sglang --rm-url http://host:1",
        ),
        ("custom_generate_function_path: slime.rollout.multi_turn.generate", "--agent-gateway-port 7000"),
    ],
)
def test_what_a_data_set_gives_is_enough_for_flags_that_need_it(check, tmp_path, entry, flags):
    (tmp_path / "mix.yaml").write_text(f"datasets:\n  one:\n    path: data.jsonl\n    {entry}\n")
    problems = check(f"--prompt-data mix.yaml {flags}").problems.all()
    assert not any("has no effect" in problem or "nothing sets" in problem for problem in problems), problems


def test_a_schedule_moves_the_weights_in_a_straight_line(make):
    source = make(YAML.replace("weight: 1", "weight: {0: 0, 10: 3}"))
    assert not set(drawn(source, 50)) & set("xyz")
    set_current_rollout_id(5)  # 1.5 beside 3: a third
    assert sum(prompt in "xyz" for prompt in drawn(source, 300)) == pytest.approx(100, abs=1)
    set_current_rollout_id(1000)  # 3 beside 3
    assert sum(prompt in "xyz" for prompt in drawn(source, 300)) == pytest.approx(150, abs=1)


def test_a_system_prompt_stands_before_messages_without_one(make):
    source = make(YAML.replace("weight: 1", "weight: 1\n    system_prompt: Be brief."), apply_chat_template=False)
    few = next(group[0] for group in source.get_samples(4) if group[0].metadata["source_name"] == "few")
    assert few.prompt == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "x"}]


def test_metrics_tell_the_data_sets_apart(make):
    source = make()
    samples = [group[0] for group in source.get_samples(8)]
    for number, sample in enumerate(samples):
        sample.group_index, sample.reward = number // 2, float(sample.metadata["source_name"] == "few")
        sample.response_length = 4
    assert not any("source/" in name for name in compute_metrics_from_samples(rollout_args(), samples))
    metrics = compute_metrics_from_samples(source.args, samples)
    assert metrics["source/few/share"] == 0.25 and metrics["source/many/share"] == 0.75
    assert metrics["source/few/reward"] == 1 and metrics["source/many/reward"] == 0
    assert metrics["source/many/response_len"] == 4 and metrics["source/many/zero_std_fraction"] == 1


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("weight: 3", "weight: 0"), "a weight must be more than 0, not 0; leave the data set out"),
        (("weight: 3", "weight: .inf"), "a weight is at most 1e+12"),
        (("weight: 3", "weight: .nan"), "a weight is at most 1e+12"),
        (("weight: 3", "weight: {0: 1, 5: .nan}"), "a weight is at most 1e+12"),
        (("weight: 3", "weight: heavy"), "a weight is a number, or a mapping from rollout ids to numbers"),
        (("weight: 3", "weight: {5: 1}"), "begins at rollout 0"),
        (("weight: 3", "weight: {0: -1, 5: 1}"), "the weights of a schedule are 0 or more"),
        (("rm_type", "rm_typ"), "unknown key"),
        (("max_response_len", "temperature"), "temperature"),
        (("path: %(many)s, ", ""), "path: is missing"),
        (("stop: ", "is_named: "), "unknown key"),
    ],
)
def test_a_wrong_entry_is_named_with_its_line(make, change, sentence):
    assert change[0] in YAML
    with pytest.raises(UsageError, match=r"--prompt-data .*mix.yaml:\d+: datasets.many") as error:
        make(YAML.replace(*change, 1))
    assert sentence in str(error.value)


def test_weights_that_are_all_zero_at_a_time_are_refused(make):
    text = YAML.replace("weight: 3", "weight: {0: 1, 9: 0}").replace("weight: 1\n", "weight: {0: 0, 9: 0, 10: 1}\n")
    with pytest.raises(UsageError, match="at rollout 9 the weights of all data sets are 0"):
        make(text)


def test_files_without_a_yaml_are_drawn_equally_and_named_after_themselves(tmp_path):
    args = rollout_args(prompt_data=["a/one.jsonl", "two.parquet@[0:8]"])
    assert [(one.name, one.path, one.weight) for one in args.prompt_sources] == [
        ("one", "a/one.jsonl", 1.0),
        ("two", "two.parquet@[0:8]", 1.0),
    ]
    args.prompt_data = ["a/one.jsonl", "b/one.jsonl"]
    with pytest.raises(UsageError, match="b/one.jsonl: another file is called one, too"):
        prompt_sources(args)
    args.prompt_data = ["a.yaml", "b.jsonl"]
    with pytest.raises(UsageError, match="give it alone"):
        prompt_sources(args)


@pytest.mark.parametrize("loss", ["sft_loss", "policy_loss"])
def test_what_generation_alone_reads_has_no_effect_on_demonstrations(make, loss):
    args = make(loss_type=loss, label_key="label").args
    wrong = generation_rules.check_rewards(args, known=RM_TYPES, needs_label=rm_needs_label, fields="")
    idle = [str(one) for one in wrong if "--loss-type sft_loss" in str(one)]
    assert len(idle) == (2 if loss == "sft_loss" else 0)
    if idle:
        assert (
            "data set many: rm_type, max_response_len, stop" in idle[0] and "data set few: custom_rm_path" in idle[1]
        )
