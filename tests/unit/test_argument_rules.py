"""Rules of the interface (data, losses, dumps, engines), through whole command lines.

A sentence is looked for in the kind that it belongs to.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from slime.config.parse import accept
from slime.config.problems import Problems
from slime.plan.layout import slot_layout
from tests.unit.argument_lines import NO_OFFLOAD, Check, check, command_line, has

__all__ = ["check", "command_line"]  # fixtures


# ---- evaluation sets, sampling, references, teachers, checkpoints, KL


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


def test_v2_the_policy_loss_does_not_know_top_k_for_now(check: Check) -> None:
    problems = check("--rollout-top-k 5").problems
    assert problems.wrong == []
    has(problems.unsupported, "--rollout-top-k 5 is not supported with --loss-type policy_loss")


def test_v2_a_nucleus_is_not_compared_with_whole_distributions(check: Check) -> None:
    assert check("--rollout-top-p 0.9").problems.unsupported == []
    hook = "--custom-tis-function-path slime.backends.megatron_utils.loss.icepop_function"
    for changes in ("--use-tis", "--use-rollout-logprobs", f"--get-mismatch-metrics {hook}", "--use-opd"):
        option = changes.split()[0]
        has(check(f"--rollout-top-p 0.9 {changes}").problems.wrong, f"0.9 and {option} exclude each other")


@pytest.mark.parametrize("asked", ["--kl-coef 0.1", "--use-kl-loss"])
def test_v3_a_kl_needs_a_reference_that_exists(check: Check, asked: str) -> None:
    has(check(asked).problems.wrong, f"{asked} needs --ref-load")
    takes_kl = "--advantage-estimator reinforce_plus_plus --normalize-advantages"
    problems = check(f"{asked} --ref-load absent {takes_kl}").problems
    assert problems.wrong == []
    has(problems.environment, "--ref-load absent does not exist")
    assert check(f"{asked} --ref-load hf {takes_kl}").problems == Problems()


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
    assert right == Problems()
    has(check("--use-opd --opd-type sglang").problems.wrong, "nothing sets them; give --custom-rm-path slime.rollout")
    served = "--use-opd --opd-type sglang --rm-url http://t/generate --custom-rm-path"
    reward = "slime.rollout.on_policy_distillation.reward_func"
    assert check(f"{served} {reward}", without="--rm-type --label-key").problems == Problems()


def test_v4_the_trainers_own_teacher_is_a_model_like_the_actor(check: Check, tmp_path: Path) -> None:
    asked = "--use-opd --opd-type megatron --opd-teacher-load"
    config = json.loads((tmp_path / "hf/config.json").read_text())
    layers = config["num_hidden_layers"]
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper/config.json").write_text(json.dumps(config | {"num_hidden_layers": layers + 1}))
    wrong = check(f"{asked} deeper").problems.wrong
    has(wrong, f"--opd-teacher-load deeper is a model with --num-layers {layers + 1}, the flags say {layers}; the")
    has(wrong, "serve another one and use --opd-type sglang")
    has(check(f"{asked} hf --opd-teacher-ckpt-step 3").problems.wrong, "--opd-teacher-ckpt-step 3 has no effect")
    saved = tmp_path / "saved/iter_0000004"
    saved.mkdir(parents=True)
    (tmp_path / "saved/latest_checkpointed_iteration.txt").write_text("4")
    (saved / "model_shape.json").write_text(json.dumps({"num_layers": layers + 2}))
    text = f"--opd-teacher-load saved holds a model with --num-layers {layers + 2}, the flags say {layers}; the"
    has(check(f"{asked} saved").problems.wrong, text)
    has(check(f"{asked} saved --opd-teacher-ckpt-step 5").problems.wrong, "--opd-teacher-load: ")


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
    both = check("--ref-load out --ref-ckpt-step 4 --ckpt-step 3").args
    assert (both.ckpt_step, both.ref_ckpt_step) == (3, 4), "what training starts from, and the reference"
    has(
        check("--ckpt-step 3").warnings(), "--ckpt-step 3 has no effect: what is loaded, hf, is no Megatron checkpoint"
    )
    assert check("--load out --save out --ckpt-step 4").warnings() == []


def test_a_run_goes_on_from_what_it_saved_or_begins_as_resume_says(check: Check) -> None:
    def loads(line: str) -> tuple[object, ...]:
        checked = check(line)
        assert checked.problems == Problems(), line
        names = ("load", "ckpt_step", "finetune", "no_load_optim", "no_load_rng", "start_rollout_id")
        return tuple(vars(checked.args)[name] for name in names)

    begins = ("hf", None, True, True, True, 0)
    assert loads("--save out --resume auto") == begins, "there is nothing yet"
    assert loads("--save out --load hf --resume auto") == begins
    Path("out/iter_0000004").mkdir(parents=True)
    Path("out/latest_checkpointed_iteration.txt").write_text("4")
    goes_on = ("out", None, False, False, False, None)
    assert loads("--save out --resume auto") == goes_on
    assert loads("--save out --load hf --resume auto") == goes_on, "the same line as before"
    assert loads("--resume out") == loads("--load out") == goes_on
    assert loads("--save out --load out --resume never") == ("out", None, True, True, True, 0)
    has(check("--resume auto").problems.wrong, "--resume auto has no effect without --save")
    has(check("--resume hf").problems.wrong, "--resume hf holds no iteration of a run; give the --save of a run")
    has(check("--resume out --load hf").problems.wrong, "--resume out and --load hf are two places to go on from")
    Path("out/latest_checkpointed_iteration.txt").write_text("four")
    has(check("--save out --resume auto").problems.wrong, "holds 'four', neither an iteration number nor 'release'")


def test_v6_intervals_have_something_to_do(check: Check) -> None:
    has(check("--eval-interval 1").problems.wrong, "--eval-interval 1 has no effect without --eval-prompt-data")
    has(check("--save-interval 1").problems.wrong, "--save-interval has no effect without --save or --save-hf")
    assert check("--save-interval 1 --save out").problems == Problems()


def test_v7_the_kl_counts_once(check: Check) -> None:
    both = "--kl-coef 0.1 --use-kl-loss --kl-loss-coef 0.2 --ref-load hf"
    has(check(both).problems.wrong, "--kl-coef 0.1 and --kl-loss-coef 0.2 would count the KL twice")
    takes_kl = "--advantage-estimator reinforce_plus_plus --normalize-advantages"
    assert check(both.replace("0.2", "0") + " " + takes_kl).problems == Problems()


# ---- advantages, mismatch, packing, clipping, dumps


@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_v8_reinforce_plus_plus_whitens(check: Check, estimator: str) -> None:
    line = f"--advantage-estimator {estimator}"
    has(check(line).problems.wrong, f"{line} needs --normalize-advantages")
    assert check(line + " --normalize-advantages").problems.wrong == []


def test_v9_corrections_have_what_they_compare(check: Check) -> None:
    has(check("--use-rollout-logprobs --use-tis").problems.wrong, "--use-rollout-logprobs and --use-tis exclude")
    has(check("--get-mismatch-metrics").problems.wrong, "--get-mismatch-metrics needs --custom-tis-function-path")
    has(check("--use-tis --tis-clip 1 --tis-clip-low 2").problems.wrong, "--tis-clip-low 2.0 is above --tis-clip 1.0")
    assert check("--use-tis --tis-clip 2 --tis-clip-low 0.5").problems == Problems()


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
    checked = check("--load-debug-rollout-data dump/{rollout_id}.pt --num-rollout 1")
    assert checked.args.debug_train_only is True and checked.args.rollout_num_gpus == 0
    assert (checked.problems.wrong, checked.problems.environment) == ([], [])
    has(
        check("--load-debug-rollout-data absent/{rollout_id}.pt").problems.environment,
        "there is no file absent/0.pt; dump it with --save-debug-rollout-data",
    )
    assert check("--load-debug-rollout-data dump/0.pt").problems.all() == []  # every rollout's
    has(check("--load-debug-rollout-data-subsample 2").problems.wrong, "-subsample 2.0 must lie in (0, 1]")


# ---- engines elsewhere, critic, debug modes, sharing


def test_v14_engines_that_run_already_have_addresses(check: Check) -> None:
    external = "--rollout-external-engine-addrs 127.0.0.1:1 http://localhost:1 [::1]:65535"
    checked = check(external, without="--colocate")
    assert checked.args.rollout_external is True and checked.args.rollout_num_gpus == 3  # one each is assumed
    assert checked.problems.wrong == []
    for address in external.split()[1:]:
        has(checked.problems.environment, f"--rollout-external-engine-addrs {address}: GET http://")
    wrong = check(f"{external} --sglang-dtype float32", without="--colocate").problems.wrong
    has(wrong, "--sglang-dtype has no effect with --rollout-external-engine-addrs")
    for address in ("host", "host:0", "host:65536", "host:x", "ftp://host:1", "::1:30000"):
        wrong = check(f"--rollout-external-engine-addrs {address}", without="--colocate").problems.wrong
        has(wrong, f"--rollout-external-engine-addrs {address} is no address")
    has(check(external).problems.wrong, "--colocate has no effect with --rollout-external-engine-addrs")
    has(check(external + " --rollout-num-gpus 2", without="--colocate").problems.wrong, "--rollout-num-gpus has no")
    assert check().args.rollout_external is False


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ("--colocate", "--elastic-rollout does not go with --colocate"),
        ("--prefill-num-servers 1", "--elastic-rollout does not go with --sglang-config or --prefill-num-servers"),
        ("--update-weight-local-checkpoint-dir /x", "not go with --update-weight-local-checkpoint-dir"),
    ],
)
def test_engines_that_join_are_like_those_of_a_run_that_has_its_own(check: Check, more: str, sentence: str) -> None:
    elastic = "--use-fault-tolerance --elastic-rollout --rollout-num-gpus 2"
    has(check(f"{elastic} {more}", without="" if more == "--colocate" else "--colocate").problems.wrong, sentence)
    assert not any("--elastic-rollout" in line for line in check(elastic, without="--colocate").problems.wrong)


def test_v15_ppo_has_a_critic_of_the_trainers_size(check: Check) -> None:
    args = check("--advantage-estimator ppo --actor-num-nodes 2 --actor-num-gpus-per-node 4").args
    assert (args.use_critic, args.critic_num_nodes, args.critic_num_gpus_per_node) == (True, 2, 4)
    assert check().args.use_critic is False


@pytest.mark.parametrize(
    ("nodes", "remedies"),
    [
        # 2 x 8 GPUs are 4 nodes of 4
        (4, ["--actor-num-gpus-per-node 4 with --actor-num-nodes 4", "--num-gpus-per-node 8"]),
        (3, ["--actor-num-gpus-per-node 3", "--num-gpus-per-node 8"]),
    ],
)
def test_trainers_of_a_node_are_no_more_than_its_gpus(check: Check, nodes: int, remedies: list[str]) -> None:
    sizes = f"--actor-num-nodes 2 --actor-num-gpus-per-node 8 --num-gpus-per-node {nodes}"
    line = f"--accelerator cuda --dry-run {sizes}"
    found = [p for p in check(line).problems.wrong if p.startswith("--actor-num-gpus-per-node 8")]
    assert found == [
        f"--actor-num-gpus-per-node 8 is more than a node has (--num-gpus-per-node {nodes}); give "
        f"{', or '.join(remedies)}."
    ]
    for remedy in remedies:
        again = check(f"{line} {remedy.replace(' with', '')}").problems.wrong
        assert not any("more than a node has" in problem for problem in again)
    on_cpu, apart = check(sizes), check(f"{line} --rollout-num-gpus 4", without="--colocate")
    for checked in (on_cpu, apart):
        assert not any("more than a node has" in problem for problem in checked.problems.wrong)


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
    has(check("--offload").problems.wrong, "--offload-train (or --offload) is refused with --accelerator cpu")
    args = check().args
    assert (args.offload_train, args.offload_rollout) == (False, False)
    assert "offload" not in vars(args), "only a short form"


def test_a_deterministic_run_sets_what_it_needs_and_refuses_what_cannot_be_repeated(check: Check) -> None:
    args = check("--deterministic").args
    assert args.deterministic_mode and args.sglang_enable_deterministic_inference
    given = {"enable_deterministic_inference": True, "max_running_requests": 1, "disable_radix_cache": True}
    assert given.items() <= args.sglang_overrides.items(), "the engine is started with them"
    on_gpu = f"--accelerator cuda --dry-run --deterministic {NO_OFFLOAD}"
    args = check(on_gpu).args
    assert args.train_env_vars == {"NCCL_ALGO": "Ring"} and "max_running_requests" not in args.sglang_overrides
    assert check(f'{on_gpu} --train-env-vars {{"NCCL_ALGO":"Tree"}}').args.train_env_vars == {"NCCL_ALGO": "Tree"}
    assert not check("").args.deterministic_mode
    for flags in (
        "--partial-rollout",
        "--update-weights-in-flight",
        "--over-sampling-batch-size 64",
        "--dynamic-sampling-filter-path hooks.py:reward",
        "--elastic-dp --max-restarts 1",
    ):
        has(check(f"--deterministic {flags}").problems.wrong, f"--deterministic does not go with {flags.split()[0]}")
    path = "slime.rollout.fully_async_rollout.generate_rollout_fully_async --rollout-num-gpus 1"
    fully_async = f"--deterministic --rollout-function-path {path}"
    wrong = check(fully_async, "--colocate").problems.wrong
    has(wrong, "generate_rollout_fully_async needs --max-weight-staleness, which says how many rollouts are begun")
    taken = check(f"{fully_async} --max-weight-staleness 1", "--colocate")
    assert not taken.problems.wrong and taken.args.update_weights_in_flight is False
    stopping = f"{fully_async} --max-weight-staleness 1 --save saved --exit-duration-in-mins 5"
    has(check(stopping, "--colocate").problems.wrong, "does not go with --exit-duration-in-mins")
    wrong = check("--deterministic --sglang-max-running-requests 8").problems.wrong
    has(wrong, "needs --sglang-max-running-requests 1, not 8: logits change with the batch")


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
    assert offloads("--advantage-estimator ppo --rollout-num-gpus 2", without="--colocate") == (True, False)
    assert offloads(f"--advantage-estimator ppo {NO_OFFLOAD}") == (False, False)
    assert offloads("--debug-train-only") == (False, False)
    assert check(on_gpu).args.rollout_num_gpus == 2


def test_v17_a_plan_that_releases_memory_can_be_made_on_a_machine_that_cannot(check: Check) -> None:
    on_gpu = "--accelerator cuda --dry-run --actor-num-gpus-per-node 2"
    for changes in ("", "--advantage-estimator ppo", NO_OFFLOAD, f"--advantage-estimator ppo {NO_OFFLOAD}"):
        assert check(f"{on_gpu} {changes}").problems == Problems()


def test_v17_colocated_engines_may_be_more_or_none(check: Check) -> None:
    more = check("--rollout-num-gpus 2")  # the second has a slot of its own
    assert more.problems == Problems() and slot_layout(more.args).total == 2
    none = check("--rollout-num-gpus 0")
    assert none.problems == Problems() and none.args.rollout_num_gpus == 0  # a router, for engines of somebody else
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


def test_a_buffer_server_is_asked_by_its_rollout_function_and_brings_a_whole_train_step(check: Check) -> None:
    function = "--rollout-function-path slime_plugins.rollout_buffer.rollout_buffer_example.generate_rollout"
    has(check(function).problems.wrong, f"{function} needs --rollout-buffer-url, as http://host:8889.")
    url = "--rollout-buffer-url http://10.0.0.1:8889"
    has(check(url).problems.wrong, "--rollout-buffer-url has no effect with --rollout-function-path slime.rollout.")
    assert check(f"{function} {url}").problems.wrong == []
    for wrong in ("10.0.0.1:8889", "http://", "http://host:1/buffer"):
        has(check(f"{function} --rollout-buffer-url {wrong}").problems.wrong, f"{wrong} is no address of a server")
    # Batch and step by the command line of these tests; a half of it cannot fill its one step.
    batch = f"{function} {url} --rollout-batch-size 4 --n-samples-per-prompt 2 --global-batch-size 8"
    wrong = check(f"{batch} --min-batch-collection-ratio 0.5").problems.wrong
    has(wrong, "0.5: 4 samples would be enough, and one train step needs 8 (--global-batch-size); raise the ratio.")
    has(check(f"{batch} --min-batch-collection-ratio 0").problems.wrong, "it must be above 0 and at most 1")
    assert check(f"{batch} --min-batch-collection-ratio 0.9").problems.wrong == []
