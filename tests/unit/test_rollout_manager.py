"""RolloutManager.generate and eval without Ray, engines or a data file: a scripted rollout function gives the samples.

`ray.put` is replaced by the identity, so that a Box holds the share itself.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime.checkpoints.rollout_files import load_dump
from slime.observability import logging_utils
from slime.observability.rollout_records import RolloutRecords
from slime.observability.rollout_records.recorder import SampleRecorder
from slime.ray.rollout import manager as manager_module
from slime.ray.rollout import shares
from slime.ray.rollout.manager import CONCURRENCY_GROUPS, RolloutManager, _draws_prompts
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime.rollout.hooks.sample_errors import SampleError
from slime.rollout.sampling.weight_versions import SyncSchedule, WeightClock
from slime.utils.errors import UsageError
from slime.utils.processing_utils import load_tokenizer
from slime.utils.train_data import PER_TOKEN, FlatColumn, restore_columns
from slime.utils.types import Sample
from tests.integration.launch import make_model

seen: dict[str, Any] = {}


def make_samples() -> list[list[Sample]]:
    """Two groups of two; rewards 0 and 1 in each, so that normalised rewards are -1/sqrt(2) and 1/sqrt(2)."""
    return [
        [
            Sample(
                group_index=group,
                index=2 * group + i,
                tokens=[1, 2, 3 + i],
                response_length=1,
                reward=float(i),
                status=Sample.Status.COMPLETED,
            )
            for i in range(2)
        ]
        for group in range(2)
    ]


def log_nothing(rollout_id, args, samples, extra, rollout_time):
    seen["log"] = (rollout_id, len(samples), extra)
    return True


def log_no_evaluation(rollout_id, args, data, extra):
    seen["eval log"] = (rollout_id, sorted(data), extra)
    return True


def halve_rewards(args, samples):
    return [sample.reward for sample in samples], [sample.reward / 2 for sample in samples]


def convert_with_a_column(args, samples):
    return {
        "tokens": [sample.tokens for sample in samples],
        "response_lengths": [1] * len(samples),
        "rewards": [5.0] * len(samples),
        "raw_reward": [5.0] * len(samples),
        "truncated": [0] * len(samples),
        "sample_indices": [sample.index for sample in samples],
        "rollout_ids": list(range(len(samples))),
        "loss_masks": [[1]] * len(samples),
        "mine": [sample.index * 10 for sample in samples],
    }


@pytest.fixture
def manager(monkeypatch, tmp_path) -> RolloutManager:
    """A manager as it is after `start`, except that nothing runs."""
    seen.clear()
    monkeypatch.setattr(manager_module.ray, "put", lambda value: value)
    monkeypatch.setattr(shares, "load_function", lambda path: globals()[path])
    monkeypatch.setattr(manager_module, "load_function", lambda path: globals()[path])
    monkeypatch.setattr("slime.rollout.train_data.load_function", lambda path: globals()[path])
    logging_utils.init_tracking(SimpleNamespace(), primary=False)
    logging_utils.take_pending()
    bare = RolloutManager.__new__(RolloutManager)
    bare.args = SimpleNamespace(
        rollout_data_transport="object-store",
        global_batch_size=4,
        use_dynamic_batch_size=False,
        micro_batch_size=2,
        max_tokens_per_gpu=None,
        balance_data=False,
        balance_by_flops=False,
        drop_last_rollouts=False,
        save_debug_rollout_data=None,
        load_debug_rollout_data=None,
        load_debug_rollout_data_subsample=None,
        debug_rollout_only=False,
        vocab_size=None,
        use_rollout_routing_replay=False,
        dump_details=None,
        custom_convert_samples_to_train_data_path=None,
        custom_reward_post_process_path=None,
        custom_rollout_log_function_path=None,
        custom_eval_rollout_log_function_path=None,
        advantage_estimator="grpo",
        pf_ppo_reweight=None,
        rollout_seed=42,
        rewards_normalization=True,
        grpo_std_normalization=True,
        reward_key=None,
        eval_reward_key=None,
        log_passrate=False,
        eval_datasets=[],
        log_multi_turn=False,
        log_reward_category=None,
        log_correct_samples=False,
        log_eval_samples=0,
        max_weight_staleness=None,
        rollout_function_path="mine",
        overlong_buffer_len=None,
        rollout_num_gpus=1,
        n_samples_per_prompt=2,
        n_samples_per_eval_prompt=1,
        wandb_always_use_train_step=False,
        output_dir=str(tmp_path),
        keep_rollouts="all",
        rollout_record_fraction=1.0,
    )
    bare.recorder = SampleRecorder(bare.args)
    bare.data_source = bare._generated = bare.replacements = bare._router_watch = None
    bare._parallel_config = {"dp_size": 2, "cp_size": 1}
    bare.rollout_function = lambda args, rollout_id, data_source, evaluation: RolloutFnTrainOutput(
        make_samples(), {"rollout/mine": 3.0}
    )
    bare.eval_function = lambda args, rollout_id, data_source, evaluation: RolloutFnEvalOutput(
        {"digits": {"rewards": [1.0, 0.0], "truncated": [False, True], "samples": make_samples()[0]}},
        {"eval/mine": 4.0},
    )
    return bare


def whole(manager: RolloutManager, rollout_id: int) -> tuple[list[Any], list[Any]]:
    """A rollout from its samples to the trainer's shares and the metrics, as the driver asks for it."""
    manager.generate(rollout_id)
    return manager.train_data()


def test_samples_of_rollouts_and_evaluations_are_recorded(manager, tmp_path):
    whole(manager, 3)
    manager.eval(3, 4)
    manager.recorder.finish(60)
    records = RolloutRecords(tmp_path)
    assert records.open(3).table(["index"])["index"].to_pylist() == [0, 1, 2, 3]
    assert records.open(4, evaluation=True).table(["dataset"])["dataset"].to_pylist() == ["digits"] * 2


def test_shares_say_which_samples_are_recorded_where_not_all_are(manager):
    assert not any("recorded_indices" in box.inner for box in whole(manager, 0)[0])
    manager.args.rollout_record_fraction = 0.5
    manager.recorder = SampleRecorder(manager.args)
    recorded = [box.inner["recorded_indices"] for box in whole(manager, 1)[0]]
    assert recorded[0] == recorded[1] and len(recorded[0]) == 2  # one of two groups


def as_lists(share: dict[str, Any]) -> dict[str, Any]:
    """A share as plain values, which can be compared."""
    columns = restore_columns(share)
    return columns | {name: [value.tolist() for value in columns[name]] for name in PER_TOKEN if name in columns}


def test_the_samples_are_there_before_they_are_made_into_training_data(manager):
    manager.args.custom_rollout_log_function_path = "log_nothing"
    manager.generate(7)
    assert not seen and logging_utils.take_pending() == [], "engines may release their memory from here on"
    assert len(manager.train_data()[0]) == 2 and seen["log"][0] == 7
    assert manager.train_data() == ([], []), "each rollout is taken once"


def test_columns_of_one_value_per_token_travel_as_one_array_each(manager):
    share = whole(manager, 7)[0][0].inner
    assert {name for name, column in share.items() if isinstance(column, FlatColumn)} == {"tokens", "loss_masks"}
    assert as_lists(share)["tokens"] == [[1, 2, 3 + position % 2] for position in share["partition"]]


def test_policy_filtration_trains_on_the_extremes_of_each_group(manager, monkeypatch):
    manager.args.pf_ppo_reweight, manager.args.pf_ppo_weight_pow = "pow", 2.0
    weights = []
    monkeypatch.setattr(
        "slime.rollout.train_data.filtration_weights",
        lambda rewards, *_: (weights.append(rewards), [1.0] + [0.0] * (len(rewards) - 1))[1],
    )
    shares = [box.inner for box in whole(manager, 7)[0]]
    drawn = [i for share in shares for i in share["sample_indices"]]
    assert len(weights) == 2 and sorted(drawn) == [0, 0, 2, 2], "two of each group, all the first of it"


def test_a_rollout_becomes_one_share_for_each_rank_with_rewards_normalised_by_group(manager):
    boxes, _ = whole(manager, 7)
    shares = [box.inner for box in boxes]
    assert sorted(i for share in shares for i in share["partition"]) == [0, 1, 2, 3]
    for share in shares:
        for position, reward in zip(share["partition"], share["rewards"], strict=True):
            assert reward == pytest.approx((1 if position % 2 else -1) * 0.5**0.5, abs=1e-5)


def test_a_rollout_function_that_returns_tokens_that_are_too_old_ends_the_run(manager):
    samples = make_samples()
    for sample in (sample for group in samples for sample in group):
        sample.weight_versions = ["2", "3"]
    manager.rollout_function = lambda args, rollout_id, data_source, evaluation: RolloutFnTrainOutput(samples)
    manager.set_sync_schedule(SyncSchedule(0, 9))
    manager.args.max_weight_staleness = 1
    try:
        manager.set_weight_version(3)
        _, records = whole(manager, 2)  # trained at version 3
        assert records[0][0]["rollout/weight_staleness/mean"] == records[0][0]["rollout/weight_staleness/max"] == 1
        with pytest.raises(RuntimeError, match="--max-weight-staleness 1.*mine.*rollout 3.*2 versions"):
            whole(manager, 3)
    finally:
        WeightClock.clear_instances()


def test_a_share_carries_the_version_at_which_the_rollout_was_begun(manager):
    assert all("weight_version" not in box.inner for box in whole(manager, 0)[0]), "no engine has the weights"

    def sync_meanwhile(args, rollout_id, data_source, evaluation):
        manager.set_weight_version(5)
        return RolloutFnTrainOutput(make_samples())

    try:
        manager.set_weight_version(4)
        manager.rollout_function = sync_meanwhile
        assert [box.inner["weight_version"] for box in whole(manager, 7)[0]] == [4, 4]
    finally:
        WeightClock.clear_instances()


def test_the_records_carry_the_rollout_and_what_its_function_reported(manager):
    _, [(metrics, step_key)] = whole(manager, 7)
    assert step_key == "rollout/step" and metrics["rollout/step"] == 7
    assert metrics["rollout/mine"] == 3.0
    assert metrics["rollout/response_len/mean"] == 1
    assert metrics["perf/rollout_time"] >= 0


def test_the_dump_holds_every_sample_under_the_template(manager, tmp_path):
    manager.args.save_debug_rollout_data = str(tmp_path / "dumps" / "{rollout_id}.pt")
    whole(manager, 7)
    manager.eval(7, step=8)
    dump = load_dump(tmp_path / "dumps" / "7.pt")
    assert [Sample.from_dict(sample).index for sample in dump["samples"]] == [0, 1, 2, 3]
    assert len(load_dump(tmp_path / "dumps" / "eval_8.pt")["samples"]) == 2, "named as its step"


def test_a_dump_is_replayed_as_it_was_generated_without_a_rollout_function(manager, tmp_path):
    template = str(tmp_path / "{rollout_id}.pt")
    manager.args.save_debug_rollout_data = template
    live = [as_lists(box.inner) for box in whole(manager, 7)[0]]
    manager.args.save_debug_rollout_data, manager.args.load_debug_rollout_data = None, template
    manager.rollout_function = None
    replayed, [(metrics, _)] = whole(manager, 7)
    assert [as_lists(box.inner) for box in replayed] == live
    assert metrics["rollout/response_len/mean"] == 1 and "rollout/mine" not in metrics
    with pytest.raises(UsageError, match=r"--load-debug-rollout-data: there is no file .*8\.pt; dump it with"):
        whole(manager, 8)


def test_a_dump_whose_samples_cannot_be_trained_on_is_named_and_a_live_one_is_dumped_first(manager, tmp_path):
    manager.args.save_debug_rollout_data = template = str(tmp_path / "{rollout_id}.pt")
    bad = make_samples()
    bad[1][0].tokens[0] = -1
    manager.rollout_function = lambda *args, **kwargs: RolloutFnTrainOutput(bad)
    place = r"returned sample 2 \(prompt 1: ''\), number 2 of the rollout, with -1 as token 0"
    with pytest.raises(SampleError, match=f"--rollout-function-path .*{place}"):
        whole(manager, 7)
    manager.args.load_debug_rollout_data = template
    with pytest.raises(SampleError, match=rf"--load-debug-rollout-data .*7\.pt {place}"):
        whole(manager, 7)


def test_a_share_of_a_replayed_rollout_is_half_from_each_end(manager, tmp_path):
    manager.args.save_debug_rollout_data = template = str(tmp_path / "{rollout_id}.pt")
    whole(manager, 7)
    manager.args.load_debug_rollout_data, manager.args.load_debug_rollout_data_subsample = template, 0.5
    manager.args.save_debug_rollout_data, manager.args.global_batch_size = str(tmp_path / "less-{rollout_id}.pt"), 2
    manager.args.micro_batch_size = 1
    whole(manager, 7)
    dump = load_dump(tmp_path / "less-7.pt")
    assert [sample["index"] for sample in dump["samples"]] == [0, 3], "half of four samples"


def test_a_replay_opens_no_data_source_and_keeps_no_place_in_it(manager):
    assert _draws_prompts(SimpleNamespace(load_debug_rollout_data=None, eval_only=False, data_source_path="x"))
    manager.args.load_debug_rollout_data = "dump/{rollout_id}.pt"
    manager.args.data_source_path = "nothing.here"
    assert not _draws_prompts(manager.args)
    assert manager.get_num_rollout_per_epoch() == 0, "so that no epoch ends"
    manager.save(3)
    manager.load(2)


def test_without_trainers_a_rollout_is_dumped_and_logged_and_cut_into_no_shares(manager, tmp_path):
    manager.args.debug_rollout_only, manager.args.global_batch_size = True, 1000  # which four samples do not fill
    manager.args.save_debug_rollout_data = str(tmp_path / "{rollout_id}.pt")
    shares, [(metrics, _)] = whole(manager, 7)
    assert shares == [] and metrics["rollout/mine"] == 3.0
    assert len(load_dump(tmp_path / "7.pt")["samples"]) == 4


def test_the_tokenizer_is_saved_beside_the_dumps(manager, tmp_path):
    args = manager.args
    args.hf_checkpoint, args.dump_details = str(make_model(tmp_path / "model")), str(tmp_path / "details")
    args.trust_remote_code, args.load_debug_rollout_data = False, "dump/{rollout_id}.pt"
    args.rollout_function_path = args.eval_function_path = "log_nothing"  # any name that can be loaded
    manager.load_user_code()
    assert load_tokenizer(tmp_path / "details" / "tokenizer").encode("1+1=") == (
        load_tokenizer(tmp_path / "model").encode("1+1=")
    )
    assert not (tmp_path / "details" / "processor").exists(), "the model has none"


def test_an_evaluation_is_logged_at_the_number_of_rollouts_trained(manager):
    [(metrics, step_key)], shown = manager.eval(7, step=8)
    assert shown == []
    assert (step_key, metrics["eval/step"]) == ("eval/step", 8)
    assert metrics["eval/digits"] == 0.5
    assert metrics["eval/digits-truncated_ratio"] == 0.5
    assert metrics["eval/mine"] == 4.0


def test_the_first_answer_to_the_first_prompts_of_each_set_is_shown_where_asked(manager):
    first, second = make_samples()
    first[0].prompt, first[0].response, first[0].label, second[0].prompt = "1+1=", "2", "2", "2+2="
    sets = {name: {"rewards": [0.0, 1.0, 0.5, 1.0], "samples": first + second} for name in ("a", "b")}
    manager.eval_function = lambda *_, evaluation: RolloutFnEvalOutput(sets)
    manager.args.log_eval_samples = 1
    _, shown = manager.eval(7, step=8)
    answer = {"prompt": "1+1=", "response": "2", "label": "2", "reward": 0.0, "truncated": False}
    assert shown == [{"data_set": "a", **answer}, {"data_set": "b", **answer}]
    manager.args.log_eval_samples = 9
    _, shown = manager.eval(7, step=8)
    assert [(s["data_set"], s["prompt"], s["reward"]) for s in shown[:2]] == [("a", "1+1=", 0.0), ("a", "2+2=", 0.5)]
    assert len(shown) == 2 * 2, "two prompts a set, of which only the first answer is shown"


def test_log_hooks_that_return_true_replace_the_default_records(manager):
    manager.args.custom_rollout_log_function_path = "log_nothing"
    manager.args.custom_eval_rollout_log_function_path = "log_no_evaluation"
    assert whole(manager, 7)[1] == []
    assert manager.eval(7, step=8) == ([], [])
    assert seen["log"] == (7, 4, {"rollout/mine": 3.0})
    assert seen["eval log"] == (7, ["digits"], {"eval/mine": 4.0})


def test_a_custom_reward_post_process_gives_the_training_rewards(manager):
    manager.args.custom_reward_post_process_path = "halve_rewards"
    boxes, _ = whole(manager, 7)
    for share in (box.inner for box in boxes):
        assert share["rewards"] == [reward / 2 for reward in share["raw_reward"]]


def test_a_custom_converter_replaces_the_columns_and_its_own_travel(manager):
    manager.args.custom_convert_samples_to_train_data_path = "convert_with_a_column"
    boxes, _ = whole(manager, 7)
    for share in (box.inner for box in boxes):
        assert share["mine"] == [10 * i for i in share["partition"]]
        assert set(share["rewards"]) == {5.0}


def test_a_small_data_set_is_at_least_one_rollout_an_epoch(manager):
    manager.args.rollout_batch_size = 4
    for prompts, rollouts in ((3, 1), (4, 1), (11, 2)):
        manager.data_source = range(prompts)
        assert manager.get_num_rollout_per_epoch() == rollouts


class PromptsOfTheUser:
    def __init__(self, args):
        self.args = args

    get_samples = add_samples = save = load = __len__ = lambda self, *values: 0


def test_an_evaluation_alone_reads_no_prompts_unless_by_a_data_source_of_the_user(manager):
    """slime's own source would fail: the fixture's `load_function` does not know it."""
    manager.args.eval_only = True
    manager.args.rollout_function_path = manager.args.eval_function_path = "halve_rewards"
    manager.args.data_source_path = "slime.rollout.data_source.RolloutDataSourceWithBuffer"
    manager.load_user_code()
    assert manager.data_source is None
    assert manager.get_num_rollout_per_epoch() == 1
    manager.args.data_source_path = "PromptsOfTheUser"
    manager.load_user_code()
    assert isinstance(manager.data_source, PromptsOfTheUser)
    manager.args.eval_only, manager.data_source = False, None
    manager.args.data_source_path = "slime.rollout.data_source.RolloutDataSourceWithBuffer"
    with pytest.raises(KeyError):
        manager.load_user_code()


def test_rollouts_and_evaluations_are_made_by_the_functions_of_their_flags(manager):
    manager.args.eval_only = False
    manager.args.rollout_function_path, manager.args.eval_function_path = "halve_rewards", "log_nothing"
    manager.args.data_source_path = "PromptsOfTheUser"
    manager.load_user_code()
    assert (manager.rollout_function, manager.eval_function) == (halve_rewards, log_nothing)


def test_the_watchdogs_question_waits_for_nothing_that_the_manager_does():
    """Ray gives each group of methods a thread of its own; the replacement of an engine takes minutes."""
    groups = {
        name: getattr(method, "__ray_concurrency_group__", None)
        for name, method in inspect.getmembers(RolloutManager, inspect.isfunction)
    }
    assert [name for name, group in groups.items() if group == "state"] == ["engine_state"]
    assert groups["replace_engines"] in CONCURRENCY_GROUPS and CONCURRENCY_GROUPS["state"] == 1


def test_one_file_of_dumps_is_not_overwritten_by_an_evaluation(manager: RolloutManager, tmp_path: Path) -> None:
    manager.args.save_debug_rollout_data = str(tmp_path / "dump.pt")
    samples = [sample for group in make_samples() for sample in group]
    for name in ("0", "eval_0", "1"):
        shares.dump_samples(manager.args, samples, name)
    assert load_dump(tmp_path / "dump.pt")["rollout_id"] == "1"
    assert load_dump(tmp_path / "eval_dump.pt")["rollout_id"] == "eval_0"
