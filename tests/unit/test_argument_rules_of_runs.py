"""Rules of the interface (batches, length of a run, model parts, weights on disk), through whole command lines.

A sentence is looked for in the kind that it belongs to.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from slime.config.parse import accept
from slime.config.problems import Problems
from slime.config.rules.batch import check_schedule_length
from tests.unit.argument_lines import Check, check, command_line, has

__all__ = ["check", "command_line"]  # fixtures


# ---- batches and the length of the run


def test_v19_steps_give_the_global_batch_size(check: Check) -> None:
    # 4 prompts x 2 responses = 8 samples
    assert check().args.global_batch_size == 8
    assert check("--num-steps-per-rollout 2").args.global_batch_size == 8 // 2
    assert check("--num-steps-per-rollout 2 --global-batch-size 4").problems == Problems()
    has(
        check("--num-steps-per-rollout 2 --global-batch-size 8").problems.wrong,
        "make 4 a step, but --global-batch-size is 8",
    )


def test_samples_that_fill_no_step_are_dropped_only_where_asked(check: Check) -> None:
    uneven = "--global-batch-size 3"  # of 4 x 2 = 8 samples
    has(check(uneven).problems.wrong, "= 8 samples do not divide into steps of --global-batch-size 3")
    assert check(f"{uneven} --drop-last-rollouts").problems == Problems()
    has(check("--global-batch-size 9 --drop-last-rollouts").problems.wrong, "= 8 samples")
    has(check("--num-steps-per-rollout 3").problems.wrong, "= 8 samples do not divide into --num-steps-per-rollout 3")
    # 3 steps would be of 8 // 3 = 2 samples, of which 8 make 4
    has(check("--num-steps-per-rollout 3 --drop-last-rollouts").problems.wrong, "make 2 a step, of which there are 4")


@pytest.mark.parametrize("packing", ["", "--use-dynamic-batch-size --max-tokens-per-gpu 64"])
def test_micro_batches_at_a_time_that_are_too_many_are_lowered(check: Check, packing: str) -> None:
    group = "--microbatch-group-size-per-virtual-pipeline-stage"
    stages = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --num-layers 4"
    # 8 samples for the 2 copies of the model on 4 ranks: 4 each
    line = f"{stages} --actor-num-gpus-per-node 4 {packing} {group}"
    (problem,) = (p for p in check(f"{line} 64").problems.wrong if "--global-batch-size 8" in p)
    assert problem.endswith(f"; the largest {group} that works is 4.")
    assert not any("--global-batch-size" in p for p in check(f"{line} 4").problems.wrong)


def test_other_packing_is_no_remedy_where_it_needs_more_samples_too(check: Check) -> None:
    # 16 data-parallel ranks and 8 samples
    (problem,) = (p for p in check("--actor-num-gpus-per-node 16").problems.wrong if "--global-batch-size 8" in p)
    assert problem.endswith("16 data-parallel ranks x --micro-batch-size 1 = 16; change one of them.")


def test_v20_a_group_of_one_has_no_standard_deviation(check: Check) -> None:
    assert check("--n-samples-per-prompt 1").args.grpo_std_normalization is False
    assert check().args.grpo_std_normalization is True


def test_v21_prompts_asked_for_at_once_make_a_batch(check: Check) -> None:
    assert check().args.over_sampling_batch_size == 4
    assert check("--over-sampling-batch-size 5").args.over_sampling_batch_size == 5
    has(check("--over-sampling-batch-size 3").problems.wrong, "3 must be at least --rollout-batch-size 4")


def test_v22_the_length_of_a_run_is_given(check: Check, caplog: pytest.LogCaptureFixture) -> None:
    has(check(without="--num-rollout").problems.wrong, "--num-rollout or --num-epoch is required")
    both = check("--num-epoch 7")
    accept(both)
    assert both.args.num_rollout == 3, "--num-rollout wins"
    assert "--num-epoch 7 has no effect: --num-rollout 3 says how long to train" in caplog.text
    own_data = check("--num-epoch 1 --disable-rollout-global-dataset", without="--num-rollout --prompt-data")
    has(own_data.problems.wrong, "--num-epoch 1 needs prompts to count")
    has(check("--start-rollout-id 3").problems.wrong, "--start-rollout-id 3 leaves nothing to do")


def test_v22_epochs_become_rollouts_where_every_row_is_used(check: Check) -> None:
    epochs = "--num-epoch 3 --rollout-batch-size 2"
    Path("five.jsonl").write_text('{"input": "a", "label": "b"}\n' * 5)
    args = check(f"{epochs} --prompt-data five.jsonl", without="--num-rollout").args
    assert args.num_rollout == 3 * (5 // 2)
    filtered = check(f"{epochs} --prompt-data five.jsonl --rollout-max-prompt-len 9", without="--num-rollout")
    assert filtered.args.num_rollout is None, "a tokenizer has to say which prompts are too long"
    assert filtered.problems == Problems()
    cut = f"{epochs} --prompt-data five.jsonl --rollout-max-prompt-len 9 --prompt-truncation left"
    assert check(cut, without="--num-rollout").args.num_rollout == 6
    absent = check(f"{epochs} --prompt-data absent.jsonl", without="--num-rollout")
    assert absent.args.num_rollout is None and absent.problems.wrong == []
    few = check("--num-epoch 3", without="--num-rollout")
    assert few.args.num_rollout == 3 and few.problems.all() == []
    has(few.warnings(), "data.jsonl has 2 rows, fewer than --rollout-batch-size 4: a rollout takes prompts several")


@pytest.mark.parametrize(
    "schedule",
    [
        "--lr-decay-style cosine",
        "--lr-warmup-fraction 0.1",
        "--weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 0.1",
    ],
)
def test_a_schedule_over_the_whole_run_knows_its_length(check: Check, schedule: str) -> None:
    epochs = f"--num-epoch 3 --rollout-batch-size 2 {schedule}"
    assert check(epochs, without="--num-rollout").problems == Problems()
    # Here the data source counts the prompts that are not too long, before the trainers start.
    counted_later = check(f"{epochs} --rollout-max-prompt-len 9", without="--num-rollout")
    assert counted_later.args.num_rollout is None and counted_later.problems == Problems()
    (unknown,) = check_schedule_length(counted_later.args)
    assert unknown.startswith(" ".join(schedule.split()[:2]) + " needs the number of train steps")
    assert "the data source has no length; give --num-rollout" in unknown
    assert list(check_schedule_length(counted_later.args.replace(num_rollout=6))) == []
    has_decay = list(check_schedule_length(counted_later.args.replace(lr_decay_iters=5)))
    assert bool(has_decay) == schedule.startswith("--weight-decay")  # which rises over the whole run


# ---- model parts, lengths, frozen parameters, weights on disk


def test_v23_multi_token_prediction_and_routing_replay(check: Check) -> None:
    has(check("--enable-mtp-training").problems.wrong, "--enable-mtp-training has no effect without --mtp-num-layers")
    (alone,) = check("--enable-mtp-training --mtp-num-layers 1").problems.wrong
    assert alone.startswith("--mtp-num-layers 1: the HF config (model_type qwen3) has 0 layers that predict further")
    replayed = check("--use-rollout-routing-replay")
    assert replayed.args.use_routing_replay is True and check().args.use_routing_replay is False
    has(replayed.problems.wrong, "--use-rollout-routing-replay needs --num-experts")


def test_v25_a_context_limit_leaves_room_for_a_response(check: Check) -> None:
    args = check("--rollout-max-context-len 10").args
    assert (args.rollout_max_prompt_len, args.eval_max_context_len) == (9, 10)
    evaluated = "--rollout-max-context-len 10 --eval-interval 1 --eval-prompt-data data.jsonl --eval-max-context-len 7"
    assert check(evaluated).args.eval_max_context_len == 7
    has(
        check("--rollout-max-context-len 10 --rollout-max-prompt-len 10").problems.wrong,
        "--rollout-max-prompt-len 10 leaves no room for a response in --rollout-max-context-len 10",
    )
    assert check("--rollout-max-context-len 10 --rollout-max-prompt-len 9").problems == Problems()


def test_v26_parameters_are_trained_by_name_or_frozen_by_name(check: Check) -> None:
    has(
        check("--only-train-params-name-list a --freeze-params-name-list b").problems.wrong,
        "--only-train-params-name-list and --freeze-params-name-list exclude each other",
    )
    assert check("--freeze-params-name-list b").problems.wrong == []


DISK = "--rollout-num-gpus 1 --update-weight-transport disk --update-weight-disk-dir sync"


def test_v27_weights_on_disk_have_a_directory(check: Check) -> None:
    has(
        check("--update-weight-transport disk").problems.wrong,
        "--update-weight-transport disk needs --update-weight-disk-dir",
    )
    assert check(f"{DISK} --update-weight-disk-keep-files", without="--colocate").problems == Problems()


def test_v27_deltas_are_files_beside_a_local_copy(check: Check) -> None:
    delta = "--update-weight-mode delta"
    has(check(delta).problems.wrong, f"{delta} needs --update-weight-transport disk, not nccl")
    has(check(delta).problems.wrong, f"{delta} does not go with --colocate")
    has(check(delta).problems.wrong, f"{delta} needs --update-weight-local-checkpoint-dir")
    right = f"{DISK} {delta} --update-weight-local-checkpoint-dir local --update-weight-delta-encoding overwrite"
    assert check(right, without="--colocate").problems == Problems()


def test_v27_the_copy_on_a_host_is_kept_by_engines_of_the_run(check: Check) -> None:
    external = f"{DISK} --update-weight-local-checkpoint-dir local --rollout-external-engine-addrs 127.0.0.1:1"
    wrong = check(external, without="--colocate").problems.wrong
    has(wrong, "--update-weight-local-checkpoint-dir local does not go with --rollout-external-engine-addrs")


def test_v27_a_checksum_whose_package_is_missing_is_refused(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    delta = f"{DISK} --update-weight-mode delta --update-weight-local-checkpoint-dir local"
    find_spec, found = importlib.util.find_spec, [None, object()]
    look = lambda name, *of: found.pop(0) if name == "blake3" else find_spec(name, *of)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", look)
    blake3 = f"{delta} --update-weight-delta-checksum blake3"
    has(check(blake3, without="--colocate").problems.wrong, "--update-weight-delta-checksum blake3 needs the package")
    assert check(blake3, without="--colocate").problems == Problems()


def test_old_weights_are_of_one_version(check: Check) -> None:
    keep = "--keep-old-actor"
    assert check(keep).problems == Problems()
    has(check(f"{keep} --partial-rollout").problems.wrong, "needs --mask-offpolicy-in-partial-rollout")
    assert check(f"{keep} --partial-rollout --mask-offpolicy-in-partial-rollout").problems == Problems()
    in_flight = check(f"{keep} --update-weights-in-flight", without="--colocate").problems.wrong
    has(in_flight, f"{keep} does not go with --update-weights-in-flight")
    path = "slime.rollout.fully_async_rollout.generate_rollout_fully_async --rollout-num-gpus 1"
    for more in ("", " --no-update-weights-in-flight"):
        found = check(f"{keep} --rollout-function-path {path}{more}", without="--colocate").problems.wrong
        assert len(found) == 1
        has(found, f"{keep} does not go with --rollout-function-path slime.rollout.fully_async_rollout")
    has(check(f"{keep} --use-rollout-logprobs").problems.wrong, f"{keep} has no effect with --use-rollout-logprobs")


def test_copies_of_trainers_in_memory_need_trainers_that_stay_and_a_place_for_the_data_source(check: Check) -> None:
    copies = "--peer-checkpoint-interval 2"
    has(check(copies).problems.wrong, "--peer-checkpoint-interval has no effect without --max-restarts")
    has(check(f"{copies} --max-restarts 1").problems.wrong, "--peer-checkpoint-interval needs --save")
    assert check(f"{copies} --max-restarts 1 --save saved").problems == Problems()
    released = check(f"{copies} --max-restarts 1 --save saved --release-train").problems.wrong
    has(released, "--peer-checkpoint-interval does not go with --release-train")


def test_v27_released_trainers_have_everything_on_disk(check: Check) -> None:
    wrong = check("--release-train --advantage-estimator ppo --keep-old-actor").problems.wrong
    has(wrong, "--release-train does not go with a critic (--advantage-estimator ppo)")
    has(wrong, "--release-train does not go with --keep-old-actor")
    has(wrong, "--release-train needs --save")
    has(wrong, "--release-train needs --update-weight-transport disk and --update-weight-mode full, not nccl and full")
    line = "--release-train --save out --update-weight-transport disk --update-weight-disk-dir sync"
    right = check(line)
    assert right.problems == Problems() and right.args.save_interval == 1
    has(check(f"{line} --save-interval 2").problems.wrong, "--release-train needs --save-interval 1, not 2")
    contents = check(f"{line} --checkpoint-contents model").problems.wrong
    has(contents, "--release-train needs --checkpoint-contents with optimizer and rng")
    assert check("--save out").args.save_interval is None
