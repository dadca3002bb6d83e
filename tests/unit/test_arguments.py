"""Whole command lines through `parse_args`: what they become."""

from __future__ import annotations

import dataclasses
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import slime
from slime.config.args import Args, publish_runtime
from slime.config.parse import FLAG_CLASSES, parse_args
from slime.rollout.base_types import HOOKS
from tests.unit.argument_lines import base, errors, line
from tests.unit.argument_mutations import HF_CONFIG

__all__ = ["base"]  # a fixture


def test_a_plain_line_derives_what_was_left_out(base: dict[str, list[str]]) -> None:
    args = parse_args(argv=line(base))
    assert args.global_batch_size == 4 * 2  # one train step per rollout
    assert args.actor_num_gpus_per_node == 1  # on a CPU; 8 elsewhere
    assert args.rollout_num_gpus == 1  # --colocate: the trainer's
    assert (args.offload_train, args.offload_rollout) == (False, False)
    assert args.over_sampling_batch_size == args.rollout_batch_size
    assert args.eval_function_path == args.rollout_function_path
    assert args.eps_clip_high == args.eps_clip == 0.2
    # --model-args-from-hf
    assert args.hidden_size == HF_CONFIG["hidden_size"] and args.num_layers == HF_CONFIG["num_hidden_layers"]
    assert args.lr == 1e-6 and args.micro_batch_size == 1 and args.clip_grad == 1.0  # slime's defaults, not Megatron's
    assert args.output_dir.startswith("outputs/")
    assert args.sglang_overrides == {} and args.eval_datasets == []
    assert not (Path.cwd() / "outputs").exists(), "checking a directory leaves nothing behind"


def test_initial_weights_come_from_the_hf_checkpoint_when_nothing_else_has_some(base: dict[str, list[str]]) -> None:
    args = parse_args(argv=line(base, "--load out --save out --save-interval 1"))
    assert (args.load, args.finetune, args.no_load_optim, args.start_rollout_id) == ("hf", True, True, 0)


def test_a_megatron_checkpoint_under_load_is_resumed(base: dict[str, list[str]]) -> None:
    Path("out/iter_0000004").mkdir(parents=True)
    Path("out/latest_checkpointed_iteration.txt").write_text("4")
    args = parse_args(argv=line(base, "--load out --save out --save-interval 1"))
    assert (args.load, args.finetune, args.no_load_optim, args.start_rollout_id) == ("out", False, False, None)


def test_ref_load_is_where_training_starts_without_load(base: dict[str, list[str]]) -> None:
    Path("ref/iter_0000007").mkdir(parents=True)
    Path("ref/latest_checkpointed_iteration.txt").write_text("7")
    args = parse_args(argv=line(base, "--ref-load ref --ref-ckpt-step 7"))
    assert (args.load, args.ckpt_step, args.finetune, args.start_rollout_id) == ("ref", 7, True, 0)


def test_frozen_args_refuse_changes_also_after_pickling(base: dict[str, list[str]]) -> None:
    args = parse_args(argv=line(base))
    for copy in (args, pickle.loads(pickle.dumps(args)), args.replace(lr=1.0)):
        with pytest.raises(AttributeError, match="args.lr cannot be set"):
            copy.lr = 2.0
        with pytest.raises(AttributeError, match="cannot be deleted"):
            del copy.lr
    assert args.replace(lr=1.0).lr == 1.0 and args.lr == 1e-6
    assert pickle.loads(pickle.dumps(args)) == args
    assert "_frozen" not in vars(args)


def test_run_time_values_are_published_to_frozen_args() -> None:
    args = Args(sglang_router_ip=None, sglang_router_port=None, sglang_model_routers=None).freeze()
    publish_runtime(args, sglang_router_ip="1.2.3.4", sglang_router_port=5, sglang_model_routers={"m": ("1.2.3.4", 5)})
    assert (args.sglang_router_ip, args.sglang_router_port) == ("1.2.3.4", 5)
    assert args.is_frozen


def test_names_of_older_documents_still_work_and_say_the_current_one(
    base: dict[str, list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    args = parse_args(argv=line(base, "--prompt-key input --reward-fn-path hooks.py:reward", without="--rm-type"))
    assert args.input_key == "input" and args.custom_rm_path == "hooks.py:reward"
    assert caplog.text.count("--prompt-key is called --input-key now") == 1
    assert caplog.text.count("--reward-fn-path is called --custom-rm-path now") == 1


def test_custom_arguments_are_parsed_and_slime_wins_where_names_clash(base: dict[str, list[str]]) -> None:
    def add(parser):  # type: ignore[no-untyped-def]
        parser.add_argument("--my-flag", type=int, default=1)
        parser.add_argument("--lr", type=str, default="mine")
        return parser

    args = parse_args(add, argv=line(base, "--my-flag 5"))
    assert args.my_flag == 5 and args.lr == 1e-6


def test_evaluation_sets_take_their_settings_from_the_flags(base: dict[str, list[str]]) -> None:
    changes = (
        "--eval-interval 2 --eval-prompt-data add data.jsonl --n-samples-per-eval-prompt 3 --eval-temperature 0.5"
    )
    (dataset,) = parse_args(argv=line(base, changes)).eval_datasets
    assert (dataset.name, dataset.path, dataset.label_key) == ("add", "data.jsonl", "label")
    assert (dataset.n_samples_per_eval_prompt, dataset.temperature) == (3, 0.5)


@pytest.mark.parametrize("asked", ["--eval-only", "--num-rollout 0", "--eval-only --num-rollout 7 --save out"])
def test_an_evaluation_needs_neither_prompts_nor_batches(base: dict[str, list[str]], asked: str) -> None:
    training = "--prompt-data --rollout-batch-size --num-rollout --n-samples-per-prompt"
    args = parse_args(argv=line(base, f"{asked} --eval-prompt-data add data.jsonl", without=training))
    assert (args.eval_only, args.num_rollout, args.eval_interval) == (True, 0, 1)
    assert args.rollout_batch_size == args.global_batch_size == 1, "a formality: nothing is trained"
    assert (args.no_load_optim, args.no_load_rng) == (True, True)
    assert parse_args(argv=line(base)).eval_only is False


def test_a_script_for_training_only_evaluates_with_one_more_flag(base: dict[str, list[str]]) -> None:
    changes = "--eval-interval 5 --eval-prompt-data add data.jsonl --global-batch-size 3 --prompt-data elsewhere.jsonl"
    assert any("elsewhere.jsonl" in message for message in errors(line(base, changes)))
    args = parse_args(argv=line(base, changes + " --eval-only"))
    assert (args.num_rollout, args.eval_interval, args.rollout_batch_size) == (0, 5, 4)


def test_a_tracker_has_two_names_and_jsonl_is_always_there(base: dict[str, list[str]]) -> None:
    args = parse_args(argv=line(base, "--tb-project-name tb") + ["--tracker", "jsonl", "--tracker", "tensorboard"])
    assert (args.use_tensorboard, args.use_wandb) == (True, False)
    args = parse_args(argv=line(base, "--tracker wandb --wandb-project p"))
    assert (args.use_tensorboard, args.use_wandb, args.wandb_project) == (False, True, "p")
    args = parse_args(argv=line(base, "--use-wandb --tracker jsonl"))
    assert (args.use_tensorboard, args.use_wandb) == (False, True)


def test_samples_that_fill_no_train_step_may_be_dropped(base: dict[str, list[str]]) -> None:
    assert any("--drop-last-rollouts" in message for message in errors(line(base, "--global-batch-size 3")))
    args = parse_args(argv=line(base, "--global-batch-size 3 --drop-last-rollouts"))
    assert args.global_batch_size == 3


def test_malformed_lines_may_be_skipped_in_training_and_evaluation_data(base: dict[str, list[str]]) -> None:
    rows = Path("data.jsonl").read_text()
    Path("data.jsonl").write_text("{\n" + rows)
    changes = "--eval-interval 1 --eval-prompt-data add data.jsonl"
    messages = errors(line(base, changes))
    assert [message.split(":")[0] for message in messages] == ["--prompt-data", "evaluation data set add"]
    assert parse_args(argv=line(base, changes + " --skip-malformed-data")).skip_malformed_data


def test_a_single_eval_path_is_called_aime(base: dict[str, list[str]]) -> None:
    args = parse_args(argv=line(base, "--eval-interval 1 --eval-prompt-data data.jsonl"))
    assert args.eval_prompt_data == ["aime", "data.jsonl"]


def test_explicit_model_flags_win_over_the_hf_config_and_are_compared_with_it(base: dict[str, list[str]]) -> None:
    messages = errors(line(base, "--num-layers 3"))
    assert any("--num-layers: the flags say 3, the HF config says 2" in message for message in messages)


def test_supervised_fine_tuning_needs_no_engine_and_no_reward(base: dict[str, list[str]]) -> None:
    changes = (
        "--debug-train-only --loss-type sft_loss --rollout-function-path slime.rollout.sft_rollout.generate_rollout"
    )
    args = parse_args(argv=line(base, changes, without="--colocate --rm-type --label-key"))
    assert args.rollout_num_gpus == 0


def test_a_reward_named_by_every_data_row_needs_no_rm_type(base: dict[str, list[str]]) -> None:
    Path("named.jsonl").write_text('{"input": "a", "label": "b", "metadata": {"rm_type": "math"}}\n')
    assert parse_args(argv=line(base, "--prompt-data named.jsonl", without="--rm-type")).rm_type is None


def test_every_hook_flag_has_a_protocol_and_every_protocol_a_flag() -> None:
    hooks = {f.name for c in FLAG_CLASSES for f in dataclasses.fields(c) if f.metadata["help"].startswith("hook")}
    assert hooks == set(HOOKS)


def test_flags_have_one_line_of_help_and_names_of_one_class_only() -> None:
    fields = [field for flags_class in FLAG_CLASSES for field in dataclasses.fields(flags_class)]
    assert len({field.name for field in fields}) == len(fields)
    assert all(field.metadata["help"] and "\n" not in field.metadata["help"] for field in fields)


WITHOUT_SGLANG = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("sglang", "sglang_router", "ray"):
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Absent())
from slime.config.parse import parse_args
args = parse_args()
assert args.sglang_overrides == {} and args.sglang_enable_deterministic_inference is False
"""


def test_a_train_only_run_is_parsed_without_sglang_and_ray(base: dict[str, list[str]]) -> None:
    sft = "--debug-train-only --loss-type sft_loss --sglang-dtype float32"
    sft += " --rollout-function-path slime.rollout.sft_rollout.generate_rollout"
    command = [sys.executable, "-c", WITHOUT_SGLANG, *line(base, sft, without="--colocate")]
    root = str(Path(slime.__file__).parent.parent)
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": root})
    assert done.returncode == 0, done.stderr[-3000:]
