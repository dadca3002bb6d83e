"""The rollout function of the buffer server, against a real server on uvicorn, real generators and a scripted engine.

The engine answers a prompt that ends with letter "a" + n with n tokens, so tokens and log-probs are known in advance.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import httpx
import pytest
import uvicorn

from slime.processes.wait import WaitTimeout
from slime.rollout import data_source
from slime.rollout.base_types import RolloutFnEvalOutput
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.hooks.sample_errors import SampleError
from slime.rollout.sampling import generation
from slime.rollout.sampling.generation import GenerateState
from slime.utils.http import api_keys
from slime.utils.http_utils import HttpError
from slime.utils.types import Sample
from slime_plugins.rollout_buffer import rollout_buffer_example as example
from slime_plugins.rollout_buffer.buffer import create_app
from slime_plugins.rollout_buffer.discovery import find_generators
from slime_plugins.rollout_buffer.rollout_buffer_example import BufferClient, generate_rollout
from slime_plugins.rollout_buffer.store import RolloutBuffer
from tests.unit.rollout_fakes import FakeEngine, LetterTokenizer, rollout_args

GENERATORS = '''
import time
import requests
from slime_plugins.rollout_buffer.generators.base_generator import BaseGenerator

class Letters(BaseGenerator):
    """The reward is the length; prompts that end with "f" fail."""

    async def reward(self, prompt, sample):
        if prompt.prompt.endswith("f"):
            raise ValueError("no reward for f")
        sample.metadata["seen"] = prompt.label
        return float(sample.response_length)

TASK_TYPE = "letters"

def run_rollout(data):
    Letters(data).run()
'''
FOREIGN = '''
import requests

TASK_TYPE = "foreign"

def run_rollout(data):
    """Written without slime: reads the file itself, names prompts as it likes, sends conversations."""
    for number, line in enumerate(open(data["input_file"])):
        for repeat in range(data["num_repeat_per_sample"]):
            messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a" * (1 + repeat)}]
            body = {"instance_id": f"row-{number}", "messages": messages, "reward": 0.5, "extra_info": {"row": number}}
            requests.post(data["remote_buffer_url"] + "/buffer/write", json=body).raise_for_status()
'''
LATE = '''
import requests

TASK_TYPE = "late"
late = []

def run_rollout(data):
    """Completes every other prompt; the rest comes late, while the next request is served."""
    global late
    prompts = data["prompts"]
    for prompt in late + prompts[::2]:
        for _ in range(data["num_repeat_per_sample"]):
            sample = {"tokens": prompt["input_ids"] + [7], "response_length": 1, "rollout_log_probs": [-0.5]}
            body = {"instance_id": prompt["instance_id"], "sample": sample, "reward": 1.0}
            requests.post(data["remote_buffer_url"] + "/buffer/write", json=body).raise_for_status()
    late = prompts[1::2]
'''
DEAF = '''
import time
import requests

TASK_TYPE = "deaf"

def run_rollout(data):
    """Answers its first prompt, and goes on for a while although it is told to stop."""
    prompt = data["prompts"][0]
    for _ in range(data["num_repeat_per_sample"]):
        sample = {"tokens": prompt["input_ids"] + [7], "response_length": 1, "rollout_log_probs": [-0.5]}
        body = {"instance_id": prompt["instance_id"], "sample": sample, "reward": 1.0}
        requests.post(data["remote_buffer_url"] + "/buffer/write", json=body).raise_for_status()
    time.sleep(0.4)
'''
BROKEN = """
TASK_TYPE = "broken"

def run_rollout(data):
    raise RuntimeError("the disk is full")
"""
SHORT = """
import requests

TASK_TYPE = "short"

def is_valid_group(group, min_valid_group_size, task_type):
    return True

def run_rollout(data):
    body = {"instance_id": data["prompts"][0]["instance_id"], "messages": [{"role": "assistant", "content": "a"}]}
    requests.post(data["remote_buffer_url"] + "/buffer/write", json=body).raise_for_status()
"""
BAD_SAMPLE = '''
import requests

TASK_TYPE = "bad sample"

def run_rollout(data):
    """What is wrong with a sample is the prompt."""
    wrong = {"pb": {"rollout_log_probs": [0.0, 0.0]}, "pc": {"tokens": [1, -2]}, "pd": {"rollout_log_probs": [None]}}
    for prompt in data["prompts"]:
        for _ in range(data["num_repeat_per_sample"]):
            sample = {"tokens": [1, 2], "response_length": 1, "rollout_log_probs": [0.0], **wrong[prompt["prompt"]]}
            body = {"instance_id": prompt["instance_id"], "sample": sample, "reward": 1.0}
            requests.post(data["remote_buffer_url"] + "/buffer/write", json=body).raise_for_status()
'''


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    for singleton in (GenerateState, BufferClient):
        singleton.clear_instances()
    for module in (generation, data_source):
        monkeypatch.setattr(module, "load_tokenizer", lambda name, **kw: LetterTokenizer())
    monkeypatch.setattr(example, "POLL_S", 0.02)
    yield
    for singleton in (GenerateState, BufferClient):
        singleton.clear_instances()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The address of a real server, with the generators of this file."""
    folder: Path = tmp_path_factory.mktemp("generators")
    files = {"letters": GENERATORS, "foreign": FOREIGN, "broken": BROKEN, "short": SHORT, "bad_sample": BAD_SAMPLE}
    files |= {"late": LATE, "deaf": DEAF}
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    app = create_app(find_generators([folder]), RolloutBuffer())
    running = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    end = time.monotonic() + 30
    while not running.started:
        assert time.monotonic() < end and thread.is_alive()
        time.sleep(0.02)
    yield f"http://127.0.0.1:{running.servers[0].sockets[0].getsockname()[1]}"
    running.should_exit = True
    thread.join(10)


@pytest.fixture
def engine():
    with FakeEngine().serve() as fake:
        yield fake


@pytest.fixture
def make(engine, server, tmp_path):
    """(args, data source) over prompts given as letters; letter n of the alphabet is answered with n tokens."""

    def build(letters: str, **changes):
        path = tmp_path / "prompts.jsonl"
        rows = [{"input": f"p{letter}", "label": letter} for letter in letters]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        flags = {
            "rollout_buffer_url": server,
            "rollout_task_type": "letters",
            "label_key": "label",
            "custom_rm_path": None,
        }
        args = rollout_args(prompt_data=str(path), sglang_router_port=engine.port, **(flags | changes))
        return args, RolloutDataSourceWithBuffer(args)

    return build


def prompts(groups: list[list[Sample]]) -> list[str]:
    return [group[0].prompt for group in groups]


def test_prompts_of_the_data_source_come_back_with_the_engine_s_tokens_and_the_generator_s_reward(make, engine):
    args, source = make("bcde")
    output = generate_rollout(args, 0, source)
    assert prompts(output.samples) == ["pb", "pc"]
    assert [[s.index for s in group] for group in output.samples] == [[0, 1], [2, 3]]
    sample = output.samples[1][0]
    assert (sample.tokens, sample.rollout_log_probs) == ([ord("p"), ord("c"), 100, 101], [-0.5, -1.5])
    assert (sample.response_length, sample.loss_mask, sample.reward) == (2, [1, 1], 2.0)
    assert (sample.status, sample.weight_versions) == (Sample.Status.COMPLETED, ["7"])
    assert (sample.label, sample.metadata["seen"]) == ("c", "c")
    assert output.metrics["rollout_buffer/total_groups"] == 2
    assert output.metrics["rollout_buffer/avg_reward"] == 1.5, "rewards 1, 1, 2, 2"
    assert engine.requests[0]["sampling_params"]["max_new_tokens"] == args.rollout_max_response_len
    assert prompts(generate_rollout(args, 1, source).samples) == ["pd", "pe"], "the next rollout, the next prompts"


def test_a_server_with_a_key_answers_the_run_and_its_generator_and_nobody_else(make, server, monkeypatch):
    """Every user of a machine reaches its loopback."""
    monkeypatch.setattr(api_keys, "PROTECTED", api_keys.Protected())
    monkeypatch.setenv(api_keys.SERVICE_ENV, "k" * 32)
    for method, path in (("GET", "status"), ("POST", "buffer/write"), ("POST", "start_rollout"), ("GET", "nowhere")):
        for headers in ({}, {"Authorization": "Bearer nonsense"}):
            status = httpx.request(method, f"{server}/{path}", headers=headers, json={}).status_code
            assert status == (404 if path == "nowhere" else 401)
    args, source = make("bcde")
    assert prompts(generate_rollout(args, 0, source).samples) == ["pb", "pc"]


def test_a_dynamic_filter_and_a_reward_of_slime_work_as_in_the_default_rollout(make):
    args, source = make(
        "bcde",
        rollout_task_type="foreign",
        rollout_global_dataset=False,
        custom_rm_path=f"{__file__}:never_called",
        dynamic_sampling_filter_path=f"{__file__}:keep_even_groups",
        rollout_batch_size=2,
    )
    output = generate_rollout(args, 0, source)
    assert [group[0].group_index for group in output.samples] == [0, 2]
    assert output.metrics["rollout/dynamic_filter/drop_odd"] == 1


def keep_even_groups(args, group):
    from slime.rollout.filter_hub.base_types import DynamicFilterOutput

    return DynamicFilterOutput(keep=group[0].group_index % 2 == 0, reason="odd")


async def never_called(args, sample, **kwargs):
    raise AssertionError("the generator's reward counts")


def test_a_generator_that_knows_nothing_of_slime_sends_conversations(make):
    args, source = make("bc", rollout_task_type="foreign", rollout_global_dataset=False)
    output = generate_rollout(args, 0, source)
    sample = output.samples[0][1]
    assert sample.metadata["row"] == 0 and sample.reward == 0.5 and sample.label is None
    assert (sample.group_index, sample.index) == (0, 1)
    trained = [token for token, kept in zip(sample.tokens[-sample.response_length :], sample.loss_mask, strict=True)]
    assert "aa" in LetterTokenizer().decode(trained) and sum(sample.loss_mask) > 0
    assert sample.rollout_log_probs is None


def test_records_of_an_earlier_round_are_never_trained_under_another_prompts_label(make, caplog):
    args, source = make("bcdefghi", rollout_batch_size=4, rollout_task_type="late", min_batch_collection_ratio=0.5)
    trained, refused = [], 0.0
    for rollout_id in range(6):
        output = generate_rollout(args, rollout_id, source)
        trained += [sample for group in output.samples for sample in group]
        refused += output.metrics.get("rollout_buffer/refused_groups", 0)
    # Half of 4 prompts x 2 responses are trained each time; the 2 other prompts of a round come in the next one.
    assert len(trained) == 6 * 2 * 2
    assert {sample.label: chr(sample.tokens[1]) for sample in trained} == {s.label: s.label for s in trained}
    assert refused == 5 * 2
    assert caplog.text.count("is refused") == 1, "logged once"
    seen = {group[0].prompt for group in source.buffer} | {sample.prompt for sample in trained}
    assert seen >= {f"p{letter}" for letter in "bcdefghi"}, "a prompt whose records came late is asked for again"


def test_a_prompt_that_is_sent_again_has_another_name():
    """So a record of the round before is not taken for it, even where a data source gives its groups no numbers."""
    groups = [[Sample(prompt="a")], [Sample(prompt="b")]]
    first, second = example._by_instance_id(groups), example._by_instance_id(groups[::-1])
    assert len(first) == len(second) == 2 and not first.keys() & second.keys()


def test_a_generator_that_does_not_stop_is_waited_for_before_it_gets_the_next_prompts(make, monkeypatch):
    monkeypatch.setattr(example, "STOP_S", 0.05)
    args, source = make("bc", rollout_batch_size=1, rollout_task_type="deaf", global_batch_size=2)
    assert [prompts(generate_rollout(args, number, source).samples) for number in range(2)] == [["pb"], ["pc"]]


def test_prompts_whose_data_source_gives_them_no_numbers_are_told_apart(make):
    args, source = make("bcde")
    groups = source.get_samples(2)
    for sample in (sample for group in groups for sample in group):
        sample.group_index = None
    source.add_samples(groups)
    assert sorted(prompts(generate_rollout(args, 0, source).samples)) == ["pb", "pc"]


def test_a_generator_that_ignores_the_prompts_it_is_sent_is_named_with_the_flag_it_needs(make):
    args, source = make("bc", rollout_task_type="foreign")
    with pytest.raises(RuntimeError, match=r"refused.*instance_id 'row-0'.*--disable-rollout-global-dataset"):
        generate_rollout(args, 0, source)
    assert prompts(source.buffer) == ["pb", "pc"]


def test_a_group_that_fails_is_replaced_and_its_prompt_is_not_lost(make):
    args, source = make("fbc")
    output = generate_rollout(args, 0, source)
    # "f" fails; it is asked for again together with one more prompt, fails again, and goes back to the source.
    assert prompts(output.samples) == ["pb", "pc"]
    assert prompts(source.buffer) == ["pf"]


def test_a_rollout_in_which_nothing_can_be_completed_ends_with_the_reason(make):
    args, source = make("ff")
    with pytest.raises(RuntimeError, match="all 4 responses failed"):
        generate_rollout(args, 0, source)
    assert source.get_buffer_length() == 2, "its prompts are back in the data source"


def test_a_share_of_the_batch_is_enough_when_asked_and_the_rest_returns(make, engine):
    engine.held = {ord("j")}
    args, source = make("bjcd", rollout_batch_size=3, min_batch_collection_ratio=0.5)
    output = generate_rollout(args, 0, source)
    assert prompts(output.samples) == ["pb", "pc"], "half of 3 is 2"
    assert prompts(source.buffer) == ["pj"]
    assert all(not sample.tokens for sample in source.buffer[0])


def test_groups_beyond_whole_train_steps_wait_finished_for_the_next_rollout(make, engine):
    engine.held = {ord("j")}
    # A train step is 4 samples = 2 groups; 3 of 4 groups are complete. The next rollout's fresh prompts are e and f.
    args, source = make("bcdjef", rollout_batch_size=4, min_batch_collection_ratio=0.75)
    output = generate_rollout(args, 0, source)
    (late,) = {"pb", "pc", "pd"} - set(prompts(output.samples))  # the last of the three to be complete
    assert {group[0].prompt: group[0].status for group in source.buffer} == {
        late: Sample.Status.COMPLETED,
        "pj": Sample.Status.PENDING,
    }
    engine.held = set()
    calls = len(engine.requests)
    assert late in prompts(generate_rollout(args, 1, source).samples)
    asked = [request["input_ids"][-1] for request in engine.requests[calls:]]
    assert ord(late[1]) not in asked, "it is not generated again"


def test_empty_answers_are_borne_as_often_as_said(make, engine):
    engine.held = {ord("j")}
    args, source = make("jj", fetch_trajectory_retry_times=3)
    with pytest.raises(WaitTimeout, match=r"4 empty answers \(--fetch-trajectory-retry-times 3\)"):
        generate_rollout(args, 0, source)
    assert source.get_buffer_length() == 2


def test_without_a_number_the_wait_ends_when_a_request_would_have(make, engine):
    engine.held = {ord("j")}
    args, source = make("jj", sglang_router_request_timeout_secs=1)
    with pytest.raises((WaitTimeout, RuntimeError), match=r"waited 1 s|responses failed"):
        generate_rollout(args, 0, source)


@pytest.mark.parametrize(
    ("task_type", "letters", "error", "said"),
    [
        ("broken", "bc", RuntimeError, "task broken failed: RuntimeError: the disk is full"),
        ("short", "bc", SampleError, "made a group of 1 records for sample 0 .*; --n-samples-per-prompt is 2"),
        ("bad sample", "bb", SampleError, "a rollout_log_probs of 2 entries for response_length 1"),
        ("bad sample", "cc", SampleError, "task-type bad sample returned sample 0 .* with -2 as token 1 of 2"),
        ("bad sample", "dd", SampleError, "None in rollout_log_probs at response token 0, which is trained"),
        ("leters", "bc", HttpError, "no generator for task 'leters'; did you mean letters?"),
    ],
)
def test_what_is_wrong_with_a_generator_is_said(make, task_type, letters, error, said):
    args, source = make(letters, rollout_task_type=task_type)
    with pytest.raises(error, match=said):
        generate_rollout(args, 0, source)


def test_what_an_earlier_run_left_on_the_server_is_not_trained_on(make, server, engine):
    import requests

    args, source = make("bc")
    generate_rollout(args, 0, source)
    stale = {"instance_id": "3", "messages": [{"role": "assistant", "content": "old"}], "reward": 9.0}
    for _ in range(2):
        requests.post(f"{server}/buffer/write", json=stale, timeout=10).raise_for_status()
    BufferClient.clear_instances()  # a new run of the trainer
    rewards = [s.reward for group in generate_rollout(args, 0, source).samples for s in group]
    assert 9.0 not in rewards


def test_no_request_is_in_flight_after_a_rollout(make, engine, server):
    import requests

    engine.held = {ord("j")}
    args, source = make("bcj", rollout_batch_size=3, min_batch_collection_ratio=0.6)
    generate_rollout(args, 0, source)
    assert requests.get(f"{server}/status", timeout=10).json()["running"] is False


def test_an_evaluation_is_slime_s_own(make):
    args, source = make("bc")
    assert isinstance(generate_rollout(args, 0, source, evaluation=True), RolloutFnEvalOutput)


def test_an_image_is_refused(make):
    args, source = make("bc")
    groups = source.get_samples(2)
    groups[0][0].multimodal_inputs = {"images": ["x"]}
    source.add_samples(groups)
    with pytest.raises(ValueError, match="takes no images"):
        generate_rollout(args, 0, source)
