"""Whole command lines through `parse_args`: what each wrong one says."""

from __future__ import annotations

import errno
import json
import os
import socket
from pathlib import Path
from random import Random

import pytest

from slime.config.parse import build_parser, parse_args
from slime.utils.errors import UsageError
from tests.unit.argument_lines import base, errors, line
from tests.unit.argument_mutations import HF_CONFIG

__all__ = ["base"]  # a fixture


def test_an_evaluation_without_a_reward_is_refused(base: dict[str, list[str]]) -> None:
    changes = "--eval-only --eval-prompt-data add data.jsonl"
    assert errors(line(base, changes, without="--rm-type")) == [
        "evaluation data set add: no reward is given: use --rm-type, --custom-rm-path, or rm_type in --eval-config."
    ]
    Path("data.jsonl").write_text('{"input": "1+1=", "label": "2", "metadata": {"rm_type": "math"}}\n')
    assert parse_args(argv=line(base, changes, without="--rm-type")).eval_only


WRONG = {
    # Parsing
    "--rollout-batch-sise 4": "unknown flag --rollout-batch-sise: did you mean --rollout-batch-size?",
    "--rollout-batch 4": "unknown flag --rollout-batch",  # no abbreviations
    "--zzzz=3": "unknown flag --zzzz: see --help",
    "--seed abc": "--seed: invalid int value: 'abc'",
    "--seed": "--seed: expected one argument",
    "--seed 1 2": "'2' belongs to no flag",
    "--loss-type ppo": "--loss-type: invalid choice: 'ppo'",
    "--apply-chat-template-kwargs {": "is no JSON",
    "--apply-chat-template-kwargs 3": "'3' is no JSON object",
    "--sglang-tp-size 2": "--sglang-tp-size is set by slime: use --rollout-num-gpus-per-engine",
    # Required, ranges
    "--rollout-batch-size 0": "--rollout-batch-size 0 must be at least 1",
    "--lr -1": "--lr -1.0 must be at least 0",
    "--rollout-temperature 0": "--rollout-temperature 0.0 must be > 0",
    "--rollout-top-p 0.9 --use-tis": "--rollout-top-p 0.9 and --use-tis exclude each other",
    "--rollout-top-p 0.9 --use-rollout-logprobs": "0.9 and --use-rollout-logprobs exclude each other",
    "--rollout-top-k 5": "--rollout-top-k 5 is not supported",
    "--log-probs-chunk-size 0": "--log-probs-chunk-size 0 must be -1 (one chunk) or at least 1",
    "--make-vocab-size-divisible-by 0": "--make-vocab-size-divisible-by 0 must be at least 1",
    "--weight-decay -1": "--weight-decay -1.0 must be at least 0",
    "--model-name gpt9": "--model-name gpt9: no weight rules for 'gpt9'",
    "--rollout-max-context-len 8 --rollout-max-prompt-len 8": "leaves no room for a response",
    "--rollout-max-response-len 8 --rollout-min-new-tokens 9": "9 is more than --rollout-max-response-len 8",
    "--rollout-min-new-tokens -1": "--rollout-min-new-tokens -1 must be at least 0",
    "--prompt-truncation left": "no effect without --rollout-max-prompt-len or --eval-max-prompt-len",
    "--rollout-max-prompt-len 8 --prompt-truncation centre": "invalid choice: 'centre'",
    "--filter-prompts-workers 2": "no effect without --rollout-max-prompt-len or --eval-max-prompt-len",
    "--rollout-max-prompt-len 8 --filter-prompts-workers 0": "--filter-prompts-workers 0 must be at least 1",
    "--log-reward-category kind": "no effect without --reward-key or --custom-reward-post-process-path",
    "--alarms-config no-such.yaml": "--alarms-config no-such.yaml",
    "--keep-rollouts newest": "--keep-rollouts newest: write all, none, or a list of last:N",
    "--rollout-record-fraction 0": "--rollout-record-fraction 0 records nothing",
    "--rollout-record-fraction 1.5": "1.5 must be at most 1",
    "--log-eval-samples 2": "--log-eval-samples has no effect without --eval-interval",
    "--eval-interval 1 --eval-prompt-data data.jsonl --log-eval-samples -1": "-1 must be at least 0",
    "--tracker wanda": "--tracker wanda is no tracker, and no path module:Class: did you mean wandb?",
    "--tracker no_such_module:Class": "--tracker no_such_module:Class: cannot load",
    "--tracker json:JSONDecoder": "--tracker json:JSONDecoder has no method 'open'",
    "--tracker tensorboard": "--use-tensorboard (--tracker tensorboard) needs --tb-project-name",
    "--eps-clip-c 1": "--eps-clip-c 1.0 must be > 1",
    "--lambd 0.9": "--lambd has no effect without --advantage-estimator ppo or --custom-advantage-function-path.",
    "--num-critic-only-steps 2": "--num-critic-only-steps has no effect without --advantage-estimator ppo.",
    "--advantage-estimator ppo --value-clip -1": "--value-clip -1.0 must be at least 0",
    "--update-weight-transport disk": "--update-weight-transport disk needs --update-weight-disk-dir",
    "--train-backend deepspeed": "--train-backend: invalid choice: 'deepspeed'",
    "--update-weight-mode delta": "--update-weight-mode delta needs --update-weight-transport disk, not nccl",
    # Batches
    "--global-batch-size 3": "= 8 samples do not divide into steps of --global-batch-size 3",
    "--num-steps-per-rollout 3": "= 8 samples do not divide into --num-steps-per-rollout 3",
    "--num-steps-per-rollout 2 --global-batch-size 8": "make 4 a step, but --global-batch-size is 8",
    "--over-sampling-batch-size 2": "--over-sampling-batch-size 2 must be at least --rollout-batch-size 4",
    "--micro-batch-size 3": "--global-batch-size 8 does not divide into micro-batches",
    "--actor-num-gpus-per-node 3": "3 data-parallel ranks x --micro-batch-size 1",
    "--actor-num-gpus-per-node 2 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
    "--num-layers 4 --micro-batch-size 8": "x 2 micro-batches that virtual pipeline stages take at a time",
    "--use-dynamic-batch-size": "--use-dynamic-batch-size needs --max-tokens-per-gpu",
    "--use-dynamic-batch-size --max-tokens-per-gpu 9 --actor-num-gpus-per-node 9": "8 is too small: 9 data-parallel",
    "--num-steps-per-rollout 3 --drop-last-rollouts": "make 2 a step, of which there are 4",
    "--lr nan": "--lr nan is no finite number",
    # Flags without effect
    "--tis-clip 3": "--tis-clip has no effect without --use-tis",
    "--update-weight-disk-keep-files": "keep-files has no effect without --update-weight-transport disk",
    "--loss-type sft_loss --eps-clip 0.1": "--eps-clip has no effect with --loss-type sft_loss",
    "--max-tokens-per-gpu 64": "--max-tokens-per-gpu has no effect without --use-dynamic-batch-size",
    "--use-dynamic-batch-size --max-tokens-per-gpu 9 --micro-batch-size 2": "--micro-batch-size has no effect",
    "--kl-loss-coef 0.1": "--kl-loss-coef has no effect without --use-kl-loss",
    "--wandb-project p": "--wandb-project has no effect without --use-wandb",
    "--disable-wandb-random-suffix": "--disable-wandb-random-suffix has no effect without --use-wandb",
    "--tb-project-name p": "--tb-project-name has no effect without --use-tensorboard",
    "--save-interval 1": "--save-interval has no effect without --save",
    "--ref-ckpt-step 1": "--ref-ckpt-step has no effect without --ref-load",
    "--eval-temperature 1": "--eval-temperature has no effect without --eval-prompt-data or --eval-config",
    "--use-rollout-logprobs --recompute-old-log-probs": "--recompute-old-log-probs has no effect",
    # Devices
    "--offload": "--offload-train (or --offload) is refused with --accelerator cpu",
    "--offload-rollout": "--offload-rollout (or --offload) is refused with --accelerator cpu",
    "--distributed-backend nccl": "--distributed-backend nccl does not work with --accelerator cpu",
    "--debug-rollout-only --debug-train-only": "starts no trainers and --debug-train-only no engines",
    "--rollout-external-engine-addrs x": "--rollout-external-engine-addrs x is no address",
    "--release-train": "--release-train needs --save",
    "--rollout-num-gpus -1": "--rollout-num-gpus -1 must be at least 0",
    "--reward-model-num-gpus 1": "--reward-model-num-gpus has no effect without --reward-model-path",
    "--sglang-config gone.yaml --prefill-num-servers 1": "exclude each other; keep the one that describes the engines",
    "--rollout-num-gpus 3 --rollout-num-gpus-per-engine 2": "--rollout-num-gpus 3 does not divide into engines",
    "--tensor-model-parallel-size 0": "--tensor-model-parallel-size 0 must be at least 1",
    "--tensor-model-parallel-size 2": "do not divide by --tensor-model-parallel-size 2",
    "--pipeline-model-parallel-size 2": "do not divide by --pipeline-model-parallel-size 2; the nearest layout",
    # Losses and rewards
    "--disable-compute-advantages-and-returns": "leaves --loss-type policy_loss without advantages",
    "--advantage-estimator reinforce_plus_plus": "needs --normalize-advantages",
    "--use-opd": "--use-opd needs --opd-type",
    "--loss-type custom_loss": "--loss-type custom_loss needs --custom-loss-function-path",
    "--custom-loss-function-path hooks.py:one": "--custom-loss-function-path has no effect",
    "--kl-coef 0.1 --use-kl-loss --kl-loss-coef 0.1": "would count the KL twice",
    "--kl-coef 0.1": "--kl-coef 0.1 needs --ref-load",
    "--use-kl-loss": "--use-kl-loss needs --ref-load",
    "--rm-type mathe": "--rm-type mathe is no built-in reward: did you mean math?",
    "--rm-type remote_rm": "--rm-type remote_rm needs --rm-url",
    # Hooks
    "--custom-rm-path eval.yaml.py": "there is no file",
    "--custom-rm-path two.py": "names a file but no function in it, and has the public coroutines a and b; write two",
    "--custom-rm-path hooks.py:absent": "no attribute 'absent'",
    "--custom-rm-path nowhere.mod.fn": "no module 'nowhere'",
    "--custom-rm-path hooks.py:NUMBER": "it is a int, not a function",
    "--custom-rm-path hooks.py:NOTHING": "hooks.py:NOTHING does not fit: it is a NoneType, not a function",
    "--custom-rm-path hooks.py:one": "--custom-rm-path hooks.py:one does not fit: it is called as (args, sample)",
    "--rollout-sample-hook-path hooks.py:absent": "--rollout-sample-hook-path: cannot load",
    "--custom-generate-function-path broken.py:fn": "loading it raised ValueError: at import",
    # Evaluation
    "--eval-interval 1": "--eval-interval 1 has no effect without --eval-prompt-data or --eval-config",
    "--eval-prompt-data a data.jsonl": "--eval-prompt-data has no effect without --eval-interval",
    "--eval-interval 1 --eval-prompt-data a b c": "--eval-prompt-data takes NAME PATH pairs, not 3 values",
    "--eval-interval 1 --eval-prompt-data a absent.jsonl": "set a: data file absent.jsonl does not",
    "--eval-interval 1 --eval-config absent.yaml": "--eval-config absent.yaml: there is no such file",
    "--eval-interval 1 --eval-config eval.yaml": "datasets[0].temprature: unknown key",
    "--eval-interval 1 --eval-config eval.yaml --eval-prompt-data a data.jsonl": "has no effect with --eval-config",
    "--eval-interval 1 --eval-config named.yaml --custom-rm-path hooks.py:reward": "rm_type math has no effect",
    "--eval-interval 1 --eval-config named.yaml --label-key x": "evaluation data set a: data.jsonl:1: no label under",
    "--use-tensorboard": "--use-tensorboard (--tracker tensorboard) needs --tb-project-name",
    "--eval-interval 1 --eval-config hook.yaml": "evaluation data set a: custom_rm_path: cannot load",
    "--eval-interval 1 --debug-train-only": "--eval-interval 1 has no effect with --debug-train-only",
    "--debug-train-only": "--debug-train-only starts no engines, which the default rollout needs",
    "--num-rollout 0 --eval-interval 1 --eval-prompt-data data.jsonl --skip-eval-before-train": "no effect with --num",
    "--eval-only": "--eval-only (or --num-rollout 0) needs --eval-prompt-data or --eval-config",
    "--eval-only --eval-prompt-data data.jsonl --debug-train-only": "nothing to do with --debug-train-only",
    "--drop-last-rollouts --global-batch-size 9": "= 8 samples do not divide into steps of --global-batch-size 9",
    "--drop-last-rollouts --num-steps-per-rollout 3": "make 2 a step, of which there are 4",
    "--num-rollout 0": "--eval-only (or --num-rollout 0) needs --eval-prompt-data or --eval-config",
    # Files
    "--prompt-data absent.jsonl": "--prompt-data: data file absent.jsonl does not exist",
    "--prompt-data empty.jsonl": "empty.jsonl",
    "--prompt-data malformed.jsonl": "malformed.jsonl:2: not valid JSON",
    "--input-key question": "no key 'question' (--input-key); the keys are 'input', 'label'",
    "--label-key answer": "no label under 'answer' (--label-key)",
    "--hf-checkpoint absent": "--hf-checkpoint absent is no directory",
    "--hf-checkpoint plain": "--hf-checkpoint plain is no HF checkpoint: it has no config.json",
    "--hf-checkpoint mcore": "it is a Megatron checkpoint",
    "--hf-checkpoint badjson": "config.json is not valid JSON",
    "--hf-checkpoint notmodel": "names no model_type",
    "--hf-checkpoint bare": "--hf-checkpoint bare has no tokenizer",
    "--ref-load absent": "--ref-load absent does not exist",
    "--load plain": "--load plain is no checkpoint",
    "--save data.jsonl/out --save-interval 1": "--save data.jsonl/out cannot be written: Not a directory",
    "--save out --save-hf out/{id}": "--save-hf out/{id}: only {rollout_id} can be filled in, not {id}",
    "--save out --save-hf out/{": "--save-hf out/{: ",
    # Engines
    "--sglang-server-concurrency 0": "--sglang-server-concurrency 0 must be at least 1",
    "--sglang-router-port 70000": "--sglang-router-port 70000 is no port",
    "--sglang-router-ip 1.2.3.4": "--sglang-router-ip 1.2.3.4 needs --sglang-router-port",
}


def make_wrong_files() -> None:
    files = {
        "empty.jsonl": "",
        "malformed.jsonl": '{"input": "a", "label": "b"}\n{"input": \n',
        "broken.py": "raise ValueError('at import')\n",
        "eval.yaml": "datasets: [{name: a, path: data.jsonl, temprature: 1}]",
        "hook.yaml": "datasets: [{name: a, path: data.jsonl, custom_rm_path: 'hooks.py:absent'}]",
        "named.yaml": "datasets: [{name: a, path: data.jsonl, rm_type: math, label_key: null}]",
        "plain/readme.txt": "",
        "mcore/latest_checkpointed_iteration.txt": "1",
        "badjson/config.json": "{",
        "notmodel/config.json": "{}",
        "bare/config.json": json.dumps(HF_CONFIG),
    }
    for name, text in files.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)


@pytest.mark.parametrize("changes", WRONG)
def test_a_wrong_line_says_what_is_wrong(base: dict[str, list[str]], changes: str) -> None:
    make_wrong_files()
    messages = errors(line(base, changes))
    assert any(WRONG[changes] in message for message in messages), messages


MISSING = {
    "--rollout-batch-size": "--rollout-batch-size is required",
    "--num-rollout": "--num-rollout or --num-epoch is required",
    "--hf-checkpoint": "--hf-checkpoint is required",
    "--prompt-data": "--prompt-data is required",
    "--colocate": "--rollout-num-gpus is required without --colocate",
    "--label-key": "compares with a label: name its field with --label-key (the fields are input, label)",
    "--rm-type": "no reward is given",
    "--model-args-from-hf": "--num-layers, --hidden-size, --num-attention-heads not given",
}


@pytest.mark.parametrize("flag", MISSING)
def test_a_missing_flag_is_named(base: dict[str, list[str]], flag: str) -> None:
    messages = errors(line(base, without=flag))
    assert any(MISSING[flag] in message for message in messages), messages


def test_all_problems_are_reported_at_once_and_follow_ups_are_not(base: dict[str, list[str]]) -> None:
    changes = "--rollout-batch-sise 4 --seed x --lr y --rm-type nope --prompt-data absent.jsonl"
    messages = errors(line(base, changes, without="--rollout-batch-size"))
    for part in (
        "did you mean --rollout-batch-size",
        "--seed: invalid",
        "--lr: invalid",
        "nope is no",
        "absent.jsonl",
    ):
        assert sum(part in message for message in messages) == 1, part
    assert not any("--rollout-batch-size is required" in message for message in messages)


def test_weights_are_asked_of_the_hf_checkpoint_unless_engines_make_them_up(base: dict[str, list[str]]) -> None:
    Path("hf/model.safetensors").unlink()
    assert any("--hf-checkpoint hf has no weights" in sentence for sentence in errors(line(base)))
    Path("ref").mkdir()
    Path("ref/latest_checkpointed_iteration.txt").write_text("release")
    Path("ref/release").mkdir()
    parse_args(argv=line(base, "--ref-load ref --sglang-load-format dummy"))


def test_a_taken_router_port_is_an_error_unless_a_router_is_said_to_be_there(base: dict[str, list[str]]) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        messages = errors(line(base, f"--sglang-router-port {port}"))
        assert any(f"--sglang-router-port {port} is taken" in message for message in messages)
        parse_args(argv=line(base, f"--sglang-router-port {port} --sglang-router-ip 127.0.0.1"))


def test_a_checkpoint_of_another_shape_is_refused(base: dict[str, list[str]]) -> None:
    Path("ref/iter_0000001").mkdir(parents=True)
    Path("ref/latest_checkpointed_iteration.txt").write_text("1")
    Path("ref/iter_0000001/model_shape.json").write_text('{"hidden_size": 32}')
    (message,) = errors(line(base, "--ref-load ref"))
    assert message == "--ref-load ref holds a model with --hidden-size 32, the flags say 64."


def test_a_load_path_without_a_checkpoint_is_warned_about_unless_it_is_where_the_run_saves(
    base: dict[str, list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    parse_args(argv=line(base, "--load absent --save absent"))
    assert "absent" not in caplog.text
    parse_args(argv=line(base, "--load absent --save out"))
    assert "--load absent has no checkpoint: training starts from hf." in caplog.text


def test_a_line_without_flags_says_what_is_required() -> None:
    assert any("--hf-checkpoint is required" in message for message in errors([]))


def test_a_group_of_one_is_warned_about(base: dict[str, list[str]], caplog: pytest.LogCaptureFixture) -> None:
    parse_args(argv=line(base, "--n-samples-per-prompt 1"))
    assert "a group of one minus its mean is 0" in caplog.text


def test_a_least_number_of_tokens_is_warned_about(
    base: dict[str, list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    """The engine never samples an end token there, so its distribution is not the trainer's."""
    parse_args(argv=line(base, "--rollout-min-new-tokens 2 --eval-only --eval-prompt-data data.jsonl"))
    assert "log-probs" not in caplog.text, "nothing is trained"
    parse_args(argv=line(base, "--rollout-min-new-tokens 2"))
    assert "--rollout-min-new-tokens 2: up to there the engine samples without the end token" in caplog.text


def test_sharing_a_gpu_releases_memory_and_needs_what_does_that(
    base: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offload is what --colocate means on CUDA, so a machine that cannot do it is told before anything starts."""
    from slime.utils.accelerator import memory_saver

    monkeypatch.setattr("slime.utils.accelerator.cuda_is_available", lambda: True)
    monkeypatch.setattr(memory_saver, "PACKAGE", "no_such_memory_saver")
    on_gpu = "--accelerator cuda --actor-num-gpus-per-node 1"
    for changes in (on_gpu, on_gpu + " --offload"):
        train, rollout = errors(line(base, changes))
        assert train.startswith("--offload-train needs the package no_such_memory_saver, which is not installed;")
        assert rollout.startswith("--offload-rollout needs the package no_such_memory_saver, which is not installed;")
    (message,) = errors(line(base, on_gpu + " --no-offload-train"))
    assert message.startswith("--offload-rollout needs") and "--no-offload-rollout" in message
    args = parse_args(argv=line(base, on_gpu + " --no-offload-train --no-offload-rollout"))
    assert args.accelerator == "cuda" and args.bf16
    monkeypatch.setattr(memory_saver, "environment", lambda inherited: {})
    monkeypatch.setattr(memory_saver, "is_installed", lambda: True)
    args = parse_args(argv=line(base, on_gpu))
    assert (args.offload_train, args.offload_rollout) == (True, True)
    ppo = parse_args(argv=line(base, on_gpu + " --advantage-estimator ppo --no-offload-rollout"))
    assert (ppo.offload_train, ppo.offload_rollout) == (True, False)


def test_cuda_without_cuda_is_an_error(base: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime.utils.accelerator.cuda_is_available", lambda: False)
    assert any("torch sees no CUDA device" in message for message in errors(line(base, "--accelerator cuda")))


def test_a_directory_that_cannot_be_written_is_found_by_trying(
    base: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(**keywords: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(keywords["dir"]))

    monkeypatch.setattr("tempfile.NamedTemporaryFile", read_only)
    messages = errors(line(base, "--save some/where"))
    assert messages == [
        "--save some/where cannot be written: Read-only file system (some/where); choose another directory."
    ]
    assert not Path("some").exists()


def test_random_flags_end_in_args_or_in_sentences(base: dict[str, list[str]]) -> None:
    options = build_parser().options()
    names = sorted(name for name, action in options.items() if action.dest != "help")
    random = Random(0)
    values = ("0", "-1", "2", "x", "", "{}", "a.b", "data.jsonl", "hf")
    for _ in range(30):
        chosen = random.sample(names, k=random.randint(1, 4))
        tail = [t for n in chosen for t in ([n] if options[n].nargs == 0 else [n, random.choice(values)])]
        try:
            assert parse_args(argv=line(base) + tail).is_frozen
        except UsageError as error:
            assert all(isinstance(message, str) and message for message in error.messages), tail
