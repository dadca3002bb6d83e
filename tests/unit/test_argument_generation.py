"""Rules of what is generated (rules.generation): prompts without a file, images, hot tokens, partials, replays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from slime.config.problems import Problems
from tests.unit.argument_lines import Check, check, command_line, has

__all__ = ["check", "command_line"]  # fixtures

FORGE = "--rollout-function-path slime.rollout.forge_load.generate_rollout"


@pytest.mark.parametrize(
    "line",
    [
        "--partial-rollout --mask-offpolicy-in-partial-rollout",
        "--rollout-fire-temperature 30",
        "--on-sample-error drop",
        "--on-sample-error retry --max-group-retries 0",
        "--rollout-function-path slime.rollout.sleep_rollout.sleep",
    ],
)
def test_these_lines_are_accepted(check: Check, line: str) -> None:
    assert check(line).problems == Problems()


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--rollout-fire-temperature 0", "--rollout-fire-temperature 0.0 must be > 0"),
        (
            "--rollout-fire-temperature 2 --custom-generate-function-path slime.rollout.sglang_rollout.generate",
            "--rollout-fire-temperature has no effect with --custom-generate-function-path",
        ),
        (
            "--partial-rollout --data-source-path slime.rollout.data_source.RolloutDataSource",
            "takes none; use slime.rollout.data_source.RolloutDataSourceWithBuffer",
        ),
        ('--multimodal-keys {"picture":"p"}', "there is no kind 'picture'; the kinds are image, video, audio"),
        ('--multimodal-keys {"image":3}', "image must name a field of the data rows, not 3"),
        (FORGE, "needs --load-forge-rollout-data"),
        ("--load-forge-rollout-data a.pt", "--load-forge-rollout-data has no effect without --rollout-function-path"),
        ("--max-dynamic-sampling-rounds 3", "no effect without --dynamic-sampling-filter-path"),
        ("--max-group-retries -1", "--max-group-retries -1 must be at least 0"),
        ("--mask-offpolicy-in-partial-rollout", "no effect without --partial-rollout"),
    ],
)
def test_a_contradiction_is_named_with_its_remedy(check: Check, line: str, sentence: str) -> None:
    has(check(line).problems.wrong, sentence)


def test_samples_without_prompts_need_a_function_that_makes_them(check: Check) -> None:
    line, without = "--disable-rollout-global-dataset", "--prompt-data --label-key --rm-type"
    has(check(line, without=without).problems.wrong, "samples without prompts, which the default generate function")
    own = f"{line} --custom-generate-function-path slime.rollout.sglang_rollout.generate"
    assert not [s for s in check(own, without=without).problems.wrong if "without prompts" in s]


def test_images_need_a_checkpoint_that_sees_them(check: Check) -> None:
    line = '--multimodal-keys {"image":"pictures"}'
    has(check(line).problems.environment, "has no processor (preprocessor_config.json or processor_config.json)")
    Path("hf/preprocessor_config.json").write_text("{}")
    has(check(line).problems.environment, "has no vision_config in its config.json (model_type 'qwen3'), so its model")
    config = json.loads(Path("hf/config.json").read_text())
    Path("hf/config.json").write_text(json.dumps(config | {"vision_config": {"depth": 1}}))
    save_file({"model.embed_tokens.weight": torch.zeros(1)}, "hf/model.safetensors")
    has(check(line).problems.environment, "has no weights of a part that sees images, whatever its config.json says")
    tensors = {"model.language_model.norm.weight": torch.zeros(1), "model.visual.norm.weight": torch.zeros(1)}
    save_file(tensors, "hf/model.safetensors")
    assert not check(line).problems.environment
    reason = "--multimodal-keys video is not supported: processor and engine would each pick the frames of a video"
    has(check('--multimodal-keys {"video":"v"}').problems.unsupported, reason)
    has(check('--multimodal-keys {"audio":"a"}').problems.unsupported, "--multimodal-keys audio is not supported")
    cut = check(f"{line} --prompt-truncation left --rollout-max-prompt-len 9").problems.unsupported
    has(cut, "--prompt-truncation left cuts the text of a prompt, and with it the places of its images")
    sizes = check(f"{line} --image-min-pixels 9 --image-max-pixels 8").problems.unsupported
    has(sizes, "--image-min-pixels 9 is more than --image-max-pixels 8")
    judge = check(f"{line} --rm-type classify --reward-model-path hf --reward-model-num-gpus 1").problems.unsupported
    has(judge, "--reward-model-path hf: the reward model is given no images (--multimodal-keys), and would judge")


def test_images_that_a_model_does_not_see_may_be_generated_for_but_not_trained_on(check: Check) -> None:
    line = '--multimodal-keys {"image":"pictures"}'
    reason = "--multimodal-keys: no part that sees images is known in model_type 'qwen3'"
    has(check(line).problems.unsupported, reason)
    for generates in ("--debug-rollout-only", "--eval-only"):
        assert not check(f"{line} {generates}").problems.unsupported


def test_the_first_file_of_a_replay_exists(check: Check) -> None:
    line = f"{FORGE} --load-forge-rollout-data d/{{rollout_id}}.pt"
    has(check(line).problems.environment, "there is no file d/0.pt; dump it with --save-debug-rollout-data")
    Path("d").mkdir()
    Path("d/0.pt").write_text("")
    assert check(line).problems == Problems()
