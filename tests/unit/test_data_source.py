"""The data source never runs short, never loses a prompt, and resumes where it stopped."""

from __future__ import annotations

import io
import json
import os
import signal

import numpy as np
import pytest
import torch

from slime.checkpoints.paths import state_path
from slime.ray.rollout.manager import RolloutManager
from slime.rollout import data_source
from slime.rollout.data_source import RolloutDataSource, RolloutDataSourceWithBuffer, pop_first
from slime.rollout.sampling.weight_versions import SyncSchedule, WeightClock, staleness
from slime.utils.errors import UsageError
from slime.utils.types import Sample
from tests.unit.rollout_fakes import LetterTokenizer, rollout_args
from tests.unit.test_untrusted_files import RunsCode


@pytest.fixture
def make(tmp_path, monkeypatch):
    monkeypatch.setattr(data_source, "load_tokenizer", lambda name, **kw: LetterTokenizer())
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"input": letter, "metadata": {"l": [letter]}}) + "\n" for letter in "abcde"))

    def build(kind=RolloutDataSourceWithBuffer, **changes):
        return kind(rollout_args(prompt_data=str(path), **changes))

    return build


def letters(groups):
    return "".join(group[0].prompt for group in groups)


def test_groups_are_independent_copies_with_increasing_numbers(make):
    source = make(n_samples_per_prompt=3)
    (first,), (second,) = source.get_samples(1), source.get_samples(1)
    assert [s.index for s in first + second] == [0, 1, 2, 3, 4, 5]
    assert {s.group_index for s in first} == {0} and {s.group_index for s in second} == {1}
    first[0].metadata["l"].append("changed")
    assert first[1].metadata == {"l": ["a"]}
    assert source.dataset[0].metadata == {"l": ["a"]}


def test_a_reward_model_gets_the_messages_of_rendered_prompts(make):
    ((sample, _),) = make(apply_chat_template=True, reward_model_path="rm").get_samples(1)
    assert sample.metadata["messages"] == [{"role": "user", "content": "a"}]
    ((sample, _),) = make(apply_chat_template=True).get_samples(1)
    assert "messages" not in sample.metadata


def test_a_request_larger_than_the_file_wraps_and_is_served_in_full(make):
    assert letters(make().get_samples(12)) == "abcdeabcdeab"


def test_each_epoch_is_shuffled_anew_and_complete(make):
    source = make(rollout_shuffle=True)
    first, second = letters(source.get_samples(5)), letters(source.get_samples(5))
    assert sorted(first) == sorted(second) == list("abcde")
    assert first != second


def test_the_buffer_is_served_first_in_its_order(make):
    source = make(n_samples_per_prompt=1)
    taken = source.get_samples(3)
    source.add_samples([taken[2], taken[0]])
    assert source.get_buffer_length() == 2
    assert letters(source.get_samples(4)) == "cade"
    assert source.get_buffer_length() == 0
    assert len(source) == 5


def test_the_buffer_filter_picks(make):
    source = make(n_samples_per_prompt=1, buffer_filter_path=f"{__file__}:pop_last")
    source.add_samples(source.get_samples(3))
    assert letters(source.get_samples(1)) == "c"
    assert letters(source.buffer) == "ab"


def pop_last(args, rollout_id, buffer, num_samples):
    assert rollout_id is None
    return [buffer.pop() for _ in range(num_samples)]


def too_many(args, rollout_id, buffer, num_samples):
    return list(buffer)


def test_a_buffer_filter_that_returns_too_much_is_refused(make):
    source = make(n_samples_per_prompt=1, buffer_filter_path=f"{__file__}:too_many")
    source.add_samples(source.get_samples(2))
    with pytest.raises(ValueError, match="returned 2 groups; at most 1"):
        source.get_samples(1)


def test_pop_first_takes_no_more_than_asked_or_there_is():
    buffer = [[Sample(prompt="a")], [Sample(prompt="b")]]
    assert letters(pop_first(rollout_args(), None, buffer, 1)) == "a"
    assert letters(pop_first(rollout_args(), None, buffer, 5)) == "b"
    assert buffer == []


def test_a_group_of_the_wrong_size_is_refused(make):
    with pytest.raises(ValueError, match="groups of 2 samples .* not 1"):
        make(n_samples_per_prompt=2).add_samples([[Sample()]])
    with pytest.raises(RuntimeError, match="cannot take back 1 groups"):
        make(RolloutDataSource).add_samples([[Sample()]])


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_resumed_source_goes_on_with_the_same_samples_and_buffer(make, tmp_path, shuffle):
    flags = {"rollout_shuffle": shuffle, "save": str(tmp_path), "load": str(tmp_path)}
    source = make(**flags)
    source.add_samples(source.get_samples(7)[2:4])
    source.update_metadata({"note": 1})
    source.save(4)
    expected = source.get_samples(6)
    resumed = make(**flags)
    resumed.load(4)
    assert resumed.get_metadata() == {"note": 1}
    assert resumed.get_samples(6) == expected
    assert state_path(str(tmp_path), 4).name == "global_dataset_state_dict_4.pt"
    names = sorted(p.name for p in (tmp_path / "rollout").iterdir())
    assert names == ["global_dataset_state_dict_4.manifest.json", "global_dataset_state_dict_4.pt"], (
        "no temporary left"
    )


def test_images_of_half_done_samples_are_resumed_as_plain_data_by_a_run_that_saves_elsewhere(make, tmp_path, caplog):
    from PIL import Image

    image = Image.effect_noise((9, 7), 50).convert("RGB")
    source = make(save=str(tmp_path), n_samples_per_prompt=2)
    (group,) = source.get_samples(1)
    given, made = {"images": [image], "videos": None}, {"image_grid_thw": np.array([[1, 4, 3]])}
    for sample in group:
        sample.tokens, sample.image_spans, sample.response_length = [5, 9, 9, 9, 6], [[1, 3]], 1
        sample.multimodal_inputs, sample.multimodal_train_inputs = given, made
    source.add_samples([group])
    source.save(0)
    resumed = make(load=str(tmp_path), n_samples_per_prompt=2)
    resumed.load(0)
    ((one, other),) = resumed.buffer
    assert one.multimodal_inputs is other.multimodal_inputs and one.image_spans == [[1, 3]]
    assert one.multimodal_inputs["images"][0].tobytes() == image.tobytes()
    arrays = [sample.multimodal_train_inputs["image_grid_thw"] for sample in (one, other)]
    assert arrays[0] is arrays[1] and type(arrays[0]) is np.ndarray and arrays[0].tolist() == [[1, 4, 3]]
    assert group[0].multimodal_inputs["images"] == [image] and "file of your own" not in caplog.text


@pytest.fixture
def clock():
    """The process's clock of weight versions, which has heard of no sync; as in a process that has just begun."""
    WeightClock.clear_instances()
    yield WeightClock()
    WeightClock.clear_instances()


def test_a_driver_that_is_killed_while_it_saves_leaves_the_buffer_of_the_save_before(make, tmp_path, clock):
    """Half an answer is in it, of weights that this process counts differently."""
    flags = {"save": str(tmp_path), "load": str(tmp_path), "n_samples_per_prompt": 1}
    half = {"tokens": [1, 2, 3], "response_length": 2, "response": "xy", "rollout_log_probs": [-0.5, -0.25]}
    half |= {"loss_mask": [1, 1], "status": Sample.Status.ABORTED, "metadata": {"l": ["b"], "start_rollout_id": 3}}

    def killed() -> None:
        clock.follow(SyncSchedule(0, 9))  # rollout 4 is trained at version 1 + 4
        clock.publish(5)
        source = make(**flags)
        (group,) = source.get_samples(2)[1:]
        vars(group[0]).update(half, weight_versions=["4", "5"])
        source.add_samples([group])
        source.save(4)
        source.get_samples(3)
        os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        source.save(5)

    if (child := os.fork()) == 0:
        try:
            killed()
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert not state_path(str(tmp_path), 5).exists()
    source = make(**flags)
    source.load(4)
    ((sample,),) = source.buffer
    assert {name: vars(sample)[name] for name in half} == half
    clock.follow(SyncSchedule(5, 9))
    assert staleness([sample], clock.trained_at(5)) == 2, "rollout 5 would have been trained at 6, it was begun at 4"
    clock.publish(1)
    source.load(4)
    assert source.buffer[0][0].weight_versions == ["4", "5"], "a process that goes on counts on"


def test_the_state_file_has_the_documented_keys(make, tmp_path):
    source = make(save=str(tmp_path))
    source.get_samples(6)
    source.save(0)
    state = torch.load(state_path(str(tmp_path), 0), weights_only=True)
    expected = {"sample_offset": 1, "epoch_id": 1, "sample_group_index": 6, "sample_index": 12, "metadata": {}}
    assert expected.items() <= state.items()


def test_without_a_state_to_load_prompts_start_at_the_beginning(make, tmp_path, caplog):
    source = make(load=str(tmp_path))
    source.load(None)
    source.load(-1)
    assert not caplog.records
    source.load(3)
    assert "no data source state" in caplog.text
    assert letters(source.get_samples(1)) == "a"


def test_objects_in_a_buffer_are_loaded_from_the_runs_own_directory_alone(make, tmp_path):
    """Making them runs code that the file names: here it makes a file."""
    saved, marker = tmp_path / "saved", tmp_path / "marker"
    source = make(save=str(saved), n_samples_per_prompt=1)
    (group,) = source.get_samples(1)
    group[0].metadata["code"] = RunsCode(marker)
    source.add_samples([group])
    source.save(0)
    (tmp_path / "link").symlink_to(saved)
    assert not marker.exists()
    for other in (None, str(tmp_path / "other")):
        with pytest.raises(UsageError, match=f"if --load {saved} is your own, --save it there"):
            make(save=other, load=str(saved), n_samples_per_prompt=1).load(0)
    assert not marker.exists()
    make(save=str(tmp_path / "link"), load=str(saved), n_samples_per_prompt=1).load(0)
    assert marker.exists()


def test_an_interrupted_save_leaves_the_old_state(make, tmp_path, monkeypatch):
    source = make(save=str(tmp_path), load=str(tmp_path))
    source.save(0)
    before = state_path(str(tmp_path), 0).read_bytes()
    source.get_samples(1)
    monkeypatch.setattr(data_source.os, "replace", lambda *paths: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        source.save(0)
    assert state_path(str(tmp_path), 0).read_bytes() == before


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
@pytest.mark.parametrize("file", ["global_dataset_state_dict_0.tmp", ".global_dataset_state_dict_0.manifest.json"])
def test_a_full_disk_leaves_the_old_state_and_is_said_by_the_manager(make, tmp_path, monkeypatch, file):
    source = make(save=str(tmp_path))
    source.save(0)
    folder, opens = tmp_path / "rollout", io.open
    before = {path: path.read_bytes() for path in folder.iterdir()}
    source.get_samples(1)

    def open_full(path, *more, **named):
        return opens("/dev/full" if str(path).startswith(str(folder / file)) else path, *more, **named)

    manager = RolloutManager.__new__(RolloutManager)
    manager.data_source, manager.args = source, source.args
    with monkeypatch.context() as patch:
        patch.setattr(io, "open", open_full)
        assert "No space left on device" in manager.save(0)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before, "and no temporary is left"
    assert manager.save(0) is None
    assert {path: path.read_bytes() for path in folder.iterdir()}.keys() == before.keys()


ROW = {
    "input": "hi",
    "question": "who",
    "answer": "you",
    "metadata": {"m": 1},
    "notes": {"n": 2},
    "functions": [{"f": 3}],
}
CHAT = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


class ThinkingTokenizer(LetterTokenizer):
    """Its chat template has a setting."""

    def apply_chat_template(self, messages, thinking=True, **kwargs) -> str:
        return super().apply_chat_template(messages, **kwargs) + ("" if thinking else "<no_think>")


@pytest.mark.parametrize(
    ("flags", "prompt", "label", "metadata"),
    [
        ({}, "hi", None, {"m": 1}),
        ({"input_key": "question"}, "who", None, {"m": 1}),
        ({"label_key": "answer"}, "hi", "you", {"m": 1}),
        ({"metadata_key": "notes"}, "hi", None, {"n": 2}),
        (
            {"tool_key": "functions", "apply_chat_template": True},
            "[1 tools]" + CHAT,
            None,
            {"m": 1, "tools": [{"f": 3}]},
        ),
        ({"apply_chat_template": True}, CHAT, None, {"m": 1}),
        (
            {"apply_chat_template": True, "apply_chat_template_kwargs": {"thinking": False}},
            CHAT + "<no_think>",
            None,
            {"m": 1},
        ),
    ],
)
def test_flags_say_what_of_a_row_becomes_a_sample(tmp_path, monkeypatch, flags, prompt, label, metadata):
    monkeypatch.setattr(data_source, "load_tokenizer", lambda name, **kw: ThinkingTokenizer())
    path = tmp_path / "row.jsonl"
    path.write_text(json.dumps(ROW) + "\n")
    ((sample, _),) = RolloutDataSource(rollout_args(prompt_data=str(path), **flags)).get_samples(1)
    assert (sample.prompt, sample.label, sample.metadata) == (prompt, label, metadata)


def test_the_seed_decides_the_order_of_shuffled_prompts(make):
    def order(seed):
        return letters(make(rollout_shuffle=True, rollout_seed=seed).get_samples(5))

    assert order(1) == order(1)
    assert len({order(seed) for seed in range(5)}) > 1


def test_the_tokenizer_is_the_checkpoints_whose_code_runs_only_where_it_is_trusted(make, monkeypatch):
    asked = []
    monkeypatch.setattr(
        data_source, "load_tokenizer", lambda name, **kw: asked.append((name, kw)) or LetterTokenizer()
    )
    make(hf_checkpoint="here")
    make(hf_checkpoint="there", trust_remote_code=True)
    assert asked == [("here", {"trust_remote_code": False}), ("there", {"trust_remote_code": True})]


def test_drawing_from_the_buffer_does_not_look_through_it(monkeypatch):
    monkeypatch.setattr(data_source, "check_picked", lambda *_: pytest.fail("looked through the buffer"))
    source = RolloutDataSourceWithBuffer(rollout_args(rollout_global_dataset=False))
    groups = source.get_samples(2)
    source.add_samples(groups)
    assert source.get_samples(1) + source.get_samples(1) == groups
