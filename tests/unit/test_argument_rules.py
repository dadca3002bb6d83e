"""The rules V1-V27 of the interface, through whole command lines: what each derives and what each refuses.

The numbers are those of the contract's list; the sentences are looked for in the kind that they belong to.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from slime.utils.arguments import Checked, CommandLine, accept, check_files
from slime.utils.arguments.check_effect import POINTLESS
from slime.utils.arguments.parse import FLAG_CLASSES
from slime.utils.arguments.problems import Problems
from tests.unit.argument_mutations import write_files

BASE = {
    "--accelerator": "cpu",
    "--hf-checkpoint": "hf",
    "--model-args-from-hf": "",
    "--prompt-data": "data.jsonl",
    "--label-key": "label",
    "--rm-type": "math",
    "--rollout-batch-size": "4",
    "--n-samples-per-prompt": "2",
    "--num-rollout": "3",
    "--colocate": "",
}
NO_OFFLOAD = "--no-offload-train --no-offload-rollout"

Check = Callable[..., Checked]


@pytest.fixture(scope="module")
def command_line() -> CommandLine:
    return CommandLine()


@pytest.fixture
def check(command_line: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """Checks the base line with flags changed or added ("--a 1 --b") and others left out."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)
    write_files(tmp_path)

    def checked(changes: str = "", without: str = "") -> Checked:
        flags = {name: value.split() for name, value in BASE.items() if name not in without.split()}
        for part in (" " + changes).split(" --")[1:]:
            name, *values = part.split()
            flags["--" + name] = values
        return command_line.check([word for name, values in flags.items() for word in (name, *values)])

    return checked


def has(sentences: list[str], text: str) -> bool:
    assert any(text in sentence for sentence in sentences), sentences
    return True


# ---- V1 to V7: evaluation sets, sampling, references, teachers, checkpoints, KL


def test_v1_eval_sets_come_from_pairs_or_a_single_path(check: Check) -> None:
    args = check("--eval-interval 1 --eval-prompt-data a data.jsonl b data.jsonl@[0:1]").args
    assert [(d.name, d.path) for d in args.eval_datasets] == [("a", "data.jsonl"), ("b", "data.jsonl@[0:1]")]
    assert args.eval_prompt_data == ["a", "data.jsonl", "b", "data.jsonl@[0:1]"]
    assert check("--eval-interval 1 --eval-prompt-data data.jsonl").args.eval_prompt_data == ["aime", "data.jsonl"]
    assert check("--eval-interval 1 --eval-config eval.yaml").args.eval_prompt_data == ["add", "data.jsonl"]
    assert check().args.eval_prompt_data is None
    has(check("--eval-interval 1 --eval-prompt-data a b c").problems.wrong, "NAME PATH pairs, not 3 values")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ("--rollout-temperature 0", "--rollout-temperature 0.0 must be > 0"),
        ("--rollout-temperature -1", "--rollout-temperature -1.0 must be > 0"),
        ("--rollout-top-p 0", "--rollout-top-p 0.0 must lie in (0, 1]"),
        ("--rollout-top-p 1.1", "--rollout-top-p 1.1 must lie in (0, 1]"),
        ("--rollout-top-k 0", "--rollout-top-k 0 must be -1"),
        ("--rollout-fire-temperature 0", "--rollout-fire-temperature 0.0 must be > 0"),
    ],
)
def test_v2_sampling_parameters_are_in_range(check: Check, changes: str, sentence: str) -> None:
    has(check(changes).problems.wrong, sentence)


def test_v2_the_policy_loss_needs_the_whole_distribution_for_now(check: Check) -> None:
    for changes in ("--rollout-top-p 0.9", "--rollout-top-k 5"):
        problems = check(changes).problems
        assert problems.wrong == []
        has(problems.unsupported, f"{changes} is not supported yet with --loss-type policy_loss (algorithms)")


@pytest.mark.parametrize("asked", ["--kl-coef 0.1", "--use-kl-loss"])
def test_v3_a_kl_needs_a_reference_that_exists(check: Check, asked: str) -> None:
    has(check(asked).problems.wrong, f"{asked} needs --ref-load")
    problems = check(f"{asked} --ref-load absent").problems
    assert problems.wrong == []
    has(problems.environment, "--ref-load absent does not exist")
    assert check(f"{asked} --ref-load hf").problems == Problems()


def test_v4_a_teacher_is_in_one_known_place(check: Check) -> None:
    has(check("--use-opd").problems.wrong, "--use-opd needs --opd-type")
    has(check("--use-opd --opd-type megatron").problems.wrong, "--opd-type megatron needs --opd-teacher-load")
    has(
        check("--use-opd --opd-type sglang --opd-teacher-load hf").problems.wrong,
        "--opd-teacher-load hf has no effect with --opd-type sglang",
    )
    has(check("--opd-teacher-load hf").problems.wrong, "--opd-teacher-load has no effect without --use-opd")
    missing = check("--use-opd --opd-type megatron --opd-teacher-load absent").problems
    has(missing.environment, "--opd-teacher-load absent does not exist")
    right = check("--use-opd --opd-type megatron --opd-teacher-load hf").problems
    assert (right.wrong, right.environment) == ([], [])
    has(right.unsupported, "--use-opd is not supported yet (algorithms)")


def test_v5_only_a_megatron_checkpoint_under_load_is_resumed(check: Check) -> None:
    Path("out/iter_0000004").mkdir(parents=True)
    Path("out/latest_checkpointed_iteration.txt").write_text("4")

    def loads(args: object) -> tuple[object, ...]:
        values = vars(args)
        return tuple(values[n] for n in ("load", "finetune", "no_load_optim", "no_load_rng", "start_rollout_id"))

    assert loads(check("--load out --save out").args) == ("out", False, False, False, None)
    fresh = (True, True, True, 0)
    assert loads(check("--load hf --ref-load out").args) == ("hf", *fresh)
    assert loads(check("--load absent --save absent --ref-load out").args) == ("out", *fresh)
    assert loads(check("--start-rollout-id 2").args) == ("hf", True, True, True, 2)
    assert check("--ref-load out --ref-ckpt-step 4").args.ckpt_step == 4


def test_v6_intervals_have_something_to_do(check: Check) -> None:
    has(check("--eval-interval 1").problems.wrong, "--eval-interval 1 needs --eval-prompt-data or --eval-config")
    has(check("--save-interval 1").problems.wrong, "--save-interval has no effect without --save or --save-hf")
    assert check("--save-interval 1 --save out").problems == Problems()


def test_v7_the_kl_counts_once(check: Check) -> None:
    both = "--kl-coef 0.1 --use-kl-loss --kl-loss-coef 0.2 --ref-load hf"
    has(check(both).problems.wrong, "--kl-coef 0.1 and --kl-loss-coef 0.2 would count the KL twice")
    assert check(both.replace("0.2", "0")).problems == Problems()


# ---- V8 to V13: advantages, mismatch, packing, clipping, dumps


@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_v8_reinforce_plus_plus_whitens(check: Check, estimator: str) -> None:
    line = f"--advantage-estimator {estimator}"
    has(check(line).problems.wrong, f"{line} needs --normalize-advantages")
    assert check(line + " --normalize-advantages").problems.wrong == []


def test_v9_corrections_have_what_they_compare(check: Check) -> None:
    has(check("--use-rollout-logprobs --use-tis").problems.wrong, "--use-rollout-logprobs and --use-tis exclude")
    has(check("--get-mismatch-metrics").problems.wrong, "--get-mismatch-metrics needs --custom-tis-function-path")
    has(check("--use-tis --tis-clip 1 --tis-clip-low 2").problems.wrong, "--tis-clip-low 2.0 is above --tis-clip 1.0")
    assert check("--use-tis --tis-clip 2 --tis-clip-low 0.5").problems.wrong == []


def test_v10_packing_has_a_budget_and_flops_imply_balance(check: Check) -> None:
    has(check("--use-dynamic-batch-size").problems.wrong, "--use-dynamic-batch-size needs --max-tokens-per-gpu")
    has(
        check("--balance-by-flops").problems.wrong, "--balance-by-flops has no effect without --use-dynamic-batch-size"
    )
    packed = "--use-dynamic-batch-size --max-tokens-per-gpu 64"
    assert check(packed).args.balance_data is False
    assert check(packed + " --balance-by-flops").args.balance_data is True
    assert check(packed + " --balance-by-flops").problems.wrong == []


def test_v11_missing_clips_and_keys_come_from_their_partners(check: Check, caplog: pytest.LogCaptureFixture) -> None:
    args = check("--eps-clip 0.3 --reward-key score").args
    assert (args.eps_clip_high, args.eval_reward_key) == (0.3, "score")
    given = check(
        "--eps-clip 0.3 --eps-clip-high 0.4 --reward-key score --eval-reward-key acc "
        "--eval-interval 1 --eval-prompt-data data.jsonl"
    ).args
    assert (given.eps_clip_high, given.eval_reward_key) == (0.4, "acc")
    has(check("--eps-clip-c 1").problems.wrong, "--eps-clip-c 1.0 must be > 1")
    cispo = check("--advantage-estimator cispo")
    accept(dataclasses.replace(cispo, problems=Problems()))
    assert "cispo with --eps-clip 0.2 also bounds the ratio from below" in caplog.text


def test_v12_dump_details_is_short_for_both_dumps(check: Check) -> None:
    checked = check("--dump-details out/")
    args = checked.args
    assert args.save_debug_rollout_data == "out/rollout_data/{rollout_id}.pt"
    assert args.save_debug_train_data == "out/train_data/{rollout_id}.pt"
    assert (checked.problems.wrong, checked.problems.environment) == ([], [])
    same = "--save-debug-rollout-data out/{rollout_id}.pt --save-debug-train-data out/{rollout_id}.pt"
    has(check(same).problems.wrong, "are both out/{rollout_id}.pt and would overwrite each other")
    has(
        check("--dump-details out --save-debug-rollout-data x/{rollout_id}.pt").problems.wrong,
        "--save-debug-rollout-data has no effect with --dump-details",
    )


def test_v13_replayed_samples_need_no_engines(check: Check) -> None:
    Path("dump").mkdir()
    Path("dump/0.pt").write_bytes(b"")
    checked = check("--load-debug-rollout-data dump/{rollout_id}.pt")
    assert checked.args.debug_train_only is True and checked.args.rollout_num_gpus == 0
    assert (checked.problems.wrong, checked.problems.environment) == ([], [])
    has(
        check("--load-debug-rollout-data absent/{rollout_id}.pt").problems.environment,
        "there is no file absent/0.pt; dump it with --save-debug-rollout-data",
    )
    has(check("--load-debug-rollout-data dump/0.pt").problems.wrong, "must contain {rollout_id}")
    has(check("--load-debug-rollout-data-subsample 2").problems.wrong, "-subsample 2.0 must lie in (0, 1]")


# ---- V14 to V18: engines elsewhere, critic, debug modes, sharing


def test_v14_engines_that_run_already_have_addresses(check: Check) -> None:
    external = "--rollout-external-engine-addrs 10.0.0.1:30000 http://host:1 [::1]:65535"
    checked = check(external, without="--colocate")
    assert checked.args.rollout_external is True and checked.args.rollout_num_gpus == 3
    assert checked.problems.wrong == []
    for address in ("host", "host:0", "host:65536", "host:x", "ftp://host:1", "::1:30000"):
        wrong = check(f"--rollout-external-engine-addrs {address}", without="--colocate").problems.wrong
        has(wrong, f"--rollout-external-engine-addrs {address} is no address")
    has(check(external).problems.wrong, "--colocate has no effect with --rollout-external-engine-addrs")
    has(check(external + " --rollout-num-gpus 2", without="--colocate").problems.wrong, "--rollout-num-gpus has no")
    assert check().args.rollout_external is False


def test_v15_ppo_has_a_critic_of_the_trainers_size(check: Check) -> None:
    args = check("--advantage-estimator ppo --actor-num-nodes 2 --actor-num-gpus-per-node 4").args
    assert (args.use_critic, args.critic_num_nodes, args.critic_num_gpus_per_node) == (True, 2, 4)
    assert check().args.use_critic is False


def test_v16_a_run_of_engines_alone_has_no_trainers(check: Check, caplog: pytest.LogCaptureFixture) -> None:
    checked = check("--debug-rollout-only --rollout-num-gpus 16", without="--colocate")
    args = checked.args
    assert (args.actor_num_nodes, args.actor_num_gpus_per_node) == (2, 8)
    assert (args.colocate, args.offload_train, args.offload_rollout) == (False, False, False)
    assert checked.problems.wrong == []
    shared = check("--debug-rollout-only --actor-num-gpus-per-node 4 --accelerator cuda --dry-run --offload")
    assert (shared.args.rollout_num_gpus, shared.args.actor_num_gpus_per_node) == (4, 4)
    assert (shared.args.colocate, shared.args.offload_train) == (False, False)
    none = check("--debug-rollout-only --rollout-num-gpus 0", without="--colocate").args
    assert (none.actor_num_nodes, none.actor_num_gpus_per_node) == (0, 0)
    both = check("--debug-rollout-only --debug-train-only").problems.wrong
    has(both, "--debug-rollout-only starts no trainers and --debug-train-only no engines")
    accept(dataclasses.replace(shared, problems=Problems()))
    assert "these flags have no effect: --actor-num-gpus-per-node --colocate --offload." in caplog.text


def test_v16_offload_on_a_cpu_frees_nothing(check: Check) -> None:
    has(check("--offload").problems.wrong, "--offload-train (or --offload) has no effect with --accelerator cpu")
    args = check().args
    assert (args.offload_train, args.offload_rollout) == (False, False)
    assert "offload" not in vars(args), "only a short form"


def test_v17_sharing_gpus_turns_both_offloads_on(check: Check) -> None:
    on_gpu = "--accelerator cuda --dry-run --actor-num-gpus-per-node 2"

    def offloads(changes: str, without: str = "") -> tuple[bool, bool]:
        args = check(f"{on_gpu} {changes}", without).args
        assert args.disable_grad_buffers_cpu_backup is args.disable_param_buffers_cpu_backup is args.offload_train
        return args.offload_train, args.offload_rollout

    assert offloads("") == (True, True)
    assert offloads("--no-offload-train") == (False, True)
    assert offloads(NO_OFFLOAD) == (False, False)
    assert offloads("--rollout-num-gpus 2", without="--colocate") == (False, False)
    assert offloads("--rollout-num-gpus 2 --offload", without="--colocate") == (True, True)
    assert offloads("--release-train") == (False, True)
    assert offloads(f"--advantage-estimator ppo {NO_OFFLOAD}") == (True, False)
    assert offloads("--debug-train-only") == (False, False)
    assert check(on_gpu).args.rollout_num_gpus == 2


def test_v17_releasing_memory_is_not_built_yet(check: Check) -> None:
    on_gpu = "--accelerator cuda --dry-run --actor-num-gpus-per-node 2"
    problems = check(on_gpu).problems
    assert problems.wrong == []
    has(problems.unsupported, f"give {NO_OFFLOAD}")
    assert check(f"{on_gpu} {NO_OFFLOAD}").problems == Problems()
    critic = check(f"{on_gpu} --advantage-estimator ppo --no-offload-rollout").problems.unsupported
    has(critic, "--offload-train is not supported yet (one GPU), and --advantage-estimator ppo needs it")


def test_v17_engines_beyond_the_trainers_are_not_built_yet(check: Check) -> None:
    problems = check("--rollout-num-gpus 2").problems
    assert problems.wrong == []
    has(problems.unsupported, "--rollout-num-gpus 2 is more than the trainer's 1 GPUs (slots)")
    none = check("--rollout-num-gpus 0")
    assert none.problems.wrong == [] and none.args.rollout_num_gpus == 0
    has(none.problems.unsupported, "runs without engines of their own are not supported yet")
    has(check(without="--colocate").problems.wrong, "--rollout-num-gpus is required without --colocate")


def test_v18_evaluation_uses_the_rollout_function(check: Check) -> None:
    args = check("--rollout-function-path hooks.py:reward").args
    assert args.eval_function_path == "hooks.py:reward"


@pytest.mark.parametrize(("accelerator", "own", "other"), [("cpu", "gloo", "nccl"), ("cuda", "nccl", "gloo")])
def test_the_collectives_are_those_of_the_device(check: Check, accelerator: str, own: str, other: str) -> None:
    line = f"--accelerator {accelerator} --dry-run {NO_OFFLOAD}"
    assert check(line).args.distributed_backend == own
    assert check(f"{line} --distributed-backend {own}").problems.wrong == []
    has(
        check(f"{line} --distributed-backend {other}").problems.wrong,
        f"--distributed-backend {other} does not work with --accelerator {accelerator}, whose trainers need {own}",
    )


# ---- V19 to V22: batches and the length of the run


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
    few = check("--num-epoch 3", without="--num-rollout").problems.environment
    has(few, "data.jsonl has 2 rows, fewer than --rollout-batch-size 4")


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
    unknown = check(f"{epochs} --rollout-max-prompt-len 9", without="--num-rollout").problems.wrong
    has(unknown, " ".join(schedule.split()[:2]) + " needs the number of train steps")
    known = f"{epochs} --rollout-max-prompt-len 9 --lr-decay-iters 5"
    assert check(known, without="--num-rollout").problems == Problems()


# ---- V23 to V27: model parts, lengths, frozen parameters, weights on disk


def test_v23_multi_token_prediction_and_routing_replay(check: Check) -> None:
    has(check("--enable-mtp-training").problems.wrong, "--enable-mtp-training has no effect without --mtp-num-layers")
    assert check("--enable-mtp-training --mtp-num-layers 1").problems.wrong == []
    replayed = check("--use-rollout-routing-replay")
    assert replayed.args.use_routing_replay is True and check().args.use_routing_replay is False
    has(replayed.problems.wrong, "--use-rollout-routing-replay has no effect without --num-experts")


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
    problems = check(DISK, without="--colocate").problems
    assert problems.wrong == []
    has(problems.unsupported, "--update-weight-transport disk is not supported yet (several GPUs); use nccl.")


def test_v27_deltas_are_files_beside_a_local_copy(check: Check) -> None:
    delta = "--update-weight-mode delta"
    has(check(delta).problems.wrong, f"{delta} needs --update-weight-transport disk, not nccl")
    has(check(delta).problems.wrong, f"{delta} does not go with --colocate")
    has(check(delta).problems.wrong, f"{delta} needs --update-weight-local-checkpoint-dir")
    right = f"{DISK} {delta} --update-weight-local-checkpoint-dir local --update-weight-delta-encoding overwrite"
    assert check(right, without="--colocate").problems.wrong == []


def test_v27_released_trainers_have_everything_on_disk(check: Check) -> None:
    wrong = check("--release-train --advantage-estimator ppo --keep-old-actor").problems.wrong
    has(wrong, "--release-train does not go with a critic (--advantage-estimator ppo)")
    has(wrong, "--release-train does not go with --keep-old-actor")
    has(wrong, "--release-train needs --save")
    has(wrong, "--release-train needs --update-weight-transport disk and --update-weight-mode full, not nccl and full")
    right = check("--release-train --save out --update-weight-transport disk --update-weight-disk-dir sync")
    assert right.problems.wrong == [] and right.args.save_interval == 1
    assert check("--save out").args.save_interval is None


# ---- every given flag has an effect

NO_EFFECT = {
    "--tis-clip 3": "--tis-clip has no effect without --use-tis.",
    "--opsm-delta 1": "--opsm-delta has no effect without --use-opsm.",
    "--opd-kl-coef 2": "--opd-kl-coef has no effect without --use-opd.",
    "--opd-teacher-ckpt-step 1": "--opd-teacher-ckpt-step has no effect without --opd-teacher-load.",
    "--kl-target 1": "--kl-target has no effect without --kl-ctrl adaptive.",
    "--gamma 0.9": "no effect without --advantage-estimator ppo or --advantage-estimator reinforce_plus_plus or",
    "--value-clip 0.1": "--value-clip has no effect without --advantage-estimator ppo.",
    "--pf-ppo-weight-pow 3": "--pf-ppo-weight-pow has no effect without --pf-ppo-reweight pow.",
    "--lora-alpha 1": "--lora-alpha has no effect without --lora-rank.",
    "--update-weight-disk-dir x": "--update-weight-disk-dir has no effect without --update-weight-transport disk.",
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
    "--offload --no-offload-train": "--offload-train has no effect with --offload;",
}


@pytest.mark.parametrize("changes", NO_EFFECT)
def test_a_flag_that_would_do_nothing_is_refused(check: Check, changes: str) -> None:
    has(check(changes).problems.wrong, NO_EFFECT[changes])


def test_a_coefficient_of_zero_asks_for_nothing(check: Check) -> None:
    assert check("--kl-loss-coef 0 --kl-coef 0.00 --entropy-coef 0").problems == Problems()


def test_what_a_flag_needs_exists(command_line: CommandLine) -> None:
    attributes = {action.dest for action in command_line.parser.options().values()}
    for field in (field for flags_class in FLAG_CLASSES for field in dataclasses.fields(flags_class)):
        for need in field.metadata["needs"]:
            assert need.partition("=")[0] in attributes, (field.name, need)
    assert {name for mode in POINTLESS for name in mode.pointless} <= attributes


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
        ("--rollout-max-response-len 4 --overlong-buffer-len 5", "--overlong-buffer-len 5 is longer than"),
    ],
)
def test_numbers_and_parameters_are_in_range(check: Check, changes: str, sentence: str) -> None:
    has(check(changes).problems.wrong, sentence)


def test_either_name_and_a_target_turn_the_profiler_on(check: Check) -> None:
    for changes in ("--profile", "--use-pytorch-profiler", "--profile-target train_actor"):
        assert check(changes).args.use_pytorch_profiler is True
    assert check().args.use_pytorch_profiler is False


def test_a_kl_in_the_rewards_is_said_not_to_train_grpo(check: Check, caplog: pytest.LogCaptureFixture) -> None:
    accept(check("--kl-coef 0.1 --ref-load hf"))
    assert "--kl-coef 0.1: --advantage-estimator grpo does not take the KL into its rewards" in caplog.text


def test_token_mean_and_the_per_token_loss_are_one_thing(check: Check) -> None:
    for changes in ("--calculate-per-token-loss", "--loss-agg-mode token-mean"):
        args = check(changes).args
        assert (args.calculate_per_token_loss, args.loss_agg_mode) == (True, "token-mean")


def test_an_evaluation_set_that_compares_has_a_label(check: Check) -> None:
    wrong = check("--eval-interval 1 --eval-prompt-data a data.jsonl", without="--label-key").problems.wrong
    has(wrong, "evaluation data set a: rm_type math compares with a label: name its field with --eval-label-key")


def test_unreadable_things_are_no_contradictions(check: Check) -> None:
    for changes in ("--prompt-data absent.jsonl", "--hf-checkpoint absent", "--custom-rm-path hooks.py:absent"):
        problems = check(changes).problems
        assert problems.environment and not any("absent" in sentence for sentence in problems.wrong), problems


def test_a_data_file_is_read_again_only_when_it_changed(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []
    original = check_files.check_data_file
    monkeypatch.setattr(
        check_files, "check_data_file", lambda path, **keys: reads.append(path) or original(path, **keys)
    )
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
