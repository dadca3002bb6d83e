"""Rewards that a service computes: what it is sent, and what a slow or failing one costs.

The services are ten lines of aiohttp over real HTTP: the client, its bounds and its errors are the real ones.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import time
from argparse import Namespace
from typing import Any

import pytest
from aiohttp import web

from slime.rollout.rm_hub import RewardError, async_rm, batched_async_rm, remote_rm, service
from slime.rollout.rm_hub.code_sandbox import extract_code, read_test_cases, same_output
from slime.utils.types import Sample
from tests.rollout.reward_fakes import FakeService, run
from tests.unit.rollout_fakes import rollout_args


def length_of_response(request: dict[str, Any]) -> dict[str, Any]:
    return {"score": len(request["response"])}


def ask(fake: FakeService, **kwargs: Any) -> Any:
    return run(
        remote_rm(rollout_args(rm_url=fake.url), Sample(index=7, prompt="p", response="abc", label="l"), **kwargs)
    )


# ---- remote_rm


def test_the_service_gets_three_fields_and_its_json_is_the_reward(start_service) -> None:
    fake = start_service(length_of_response)
    assert ask(fake) == {"score": 3}
    assert fake.requests == [{"prompt": "p", "response": "abc", "label": "l"}]


def test_server_errors_and_answers_that_are_no_json_are_tried_again(start_service) -> None:
    fake = start_service(lambda request: '{"score": 3' if len(fake.requests) == 3 else {"score": 3})
    fake.statuses = [500, 503]
    assert ask(fake) == {"score": 3}
    assert len(fake.requests) == 4
    assert service.take_reward_failures() == 0


def test_a_refused_request_fails_at_once_with_the_text(start_service) -> None:
    fake = start_service(length_of_response)
    fake.statuses = [400]
    with pytest.raises(RewardError, match="refused the request for sample 7: HTTP 400: bad label") as caught:
        ask(fake)
    assert len(fake.requests) == 1
    assert caught.value.status == 400, "final: the rollout does not repeat it"


def test_a_lost_reward_names_service_sample_and_last_answer_and_is_counted(start_service) -> None:
    fake = start_service(length_of_response)
    fake.statuses = [500, 502]
    with pytest.raises(RewardError) as caught:
        ask(fake, max_retries=2)
    expected = f"the reward service of --rm-url ({fake.url}) failed 2 times for sample 7: HTTP 502: bad label"
    assert str(caught.value) == expected
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.sample_index, again.answer) == (expected, 7, "HTTP 502: bad label")
    assert service.take_reward_failures() == 1
    assert service.take_reward_failures() == 0


def test_a_service_that_is_not_there_is_an_error_with_its_address(start_service) -> None:
    args = rollout_args(rm_url="http://127.0.0.1:9")
    with pytest.raises(RewardError, match=r"http://127\.0\.0\.1:9\) failed 3 times"):
        run(remote_rm(args, Sample(), max_retries=3))


def test_tries_wait_longer_and_longer_but_never_more_than_half_a_minute() -> None:
    waits = [service.backoff_s(attempt) for attempt in range(10)]
    expected = [1, 2, 4, 8, 16, 30, 30, 30, 30, 30]
    assert all(low <= wait < low + 1 for wait, low in zip(waits, expected, strict=True))


def test_a_group_asks_with_a_bound_and_a_wait_for_a_slot_counts_to_no_deadline(start_service) -> None:
    fake = start_service(lambda request: 1.0)
    fake.delay_s = 0.2
    bounded = service.Service("slow", fake.url, max_in_flight=2, timeout_s=2.0, max_tries=1)

    async def all_of_them() -> list[Any]:
        return await asyncio.gather(*(service.ask(bounded, {}, Sample()) for _ in range(24)))

    began = time.monotonic()
    assert run(all_of_them()) == [1.0] * 24
    assert fake.most_running == 2
    assert time.monotonic() - began > 2.0, "the last ones waited longer than the deadline of a try"


def test_a_service_that_hangs_is_given_up(start_service) -> None:
    fake = start_service(lambda request: 1.0)
    fake.delay_s = 2.0
    hanging = service.Service("hanging", fake.url, timeout_s=0.1, max_tries=2)
    with pytest.raises(RewardError, match="failed 2 times for sample None: no answer within 0.1 s"):
        run(service.ask(hanging, {}, Sample()))


def test_batched_rewards_go_through_the_service_one_by_one_and_keep_their_order(start_service) -> None:
    fake = start_service(length_of_response)
    args = rollout_args(custom_rm_path=None, rm_type="remote_rm", rm_url=fake.url, group_rm=True)
    samples = [Sample(response="x" * length) for length in (3, 1, 2)]
    assert run(batched_async_rm(args, samples)) == [{"score": 3}, {"score": 1}, {"score": 2}]
    assert len(fake.requests) == 3


def test_http_proxy_is_asked_in_place_of_the_service(start_service) -> None:
    proxy = start_service(lambda request: 5.0)
    args = rollout_args(rm_url="http://rewards.invalid/score", http_proxy=proxy.url)
    assert run(remote_rm(args, Sample())) == 5.0
    assert (proxy.hosts, proxy.paths) == (["rewards.invalid"], ["/score"])


def score_all(fake: FakeService, responses: list[str], **flags: Any) -> list[Any]:
    args = rollout_args(rm_url=fake.url, **flags)
    samples = [Sample(index=i, response=text) for i, text in enumerate(responses)]

    async def scored() -> list[Any]:
        return await asyncio.gather(*(remote_rm(args, sample, max_retries=2) for sample in samples))

    return run(scored())


def test_rm_concurrency_bounds_the_requests_in_flight(start_service) -> None:
    fake = start_service(lambda request: 1.0)
    fake.delay_s = 0.05
    assert score_all(fake, ["x"] * 12, rm_concurrency=3) == [1.0] * 12
    assert fake.most_running == 3


def test_what_waits_for_the_service_is_one_request_with_a_list(start_service) -> None:
    fake = start_service(lambda batch: [len(one["response"]) for one in batch])
    fake.delay_s = 0.05
    lengths = list(range(1, 22))
    assert score_all(fake, ["x" * n for n in lengths], rm_concurrency=1, rm_batch_size=8) == lengths
    assert sorted(len(batch) for batch in fake.requests) == [5, 8, 8]
    assert fake.requests[0][0] == {"prompt": "", "response": "x", "label": None}


def test_a_bad_sample_of_a_batch_costs_the_others_nothing(start_service) -> None:
    def answer(batch: list[dict[str, Any]]) -> Any:
        texts = [one["response"] for one in batch]
        return web.Response(status=422, text="bad") if "bad" in texts else [len(text) for text in texts]

    fake = start_service(answer)
    args = rollout_args(rm_url=fake.url, rm_concurrency=1, rm_batch_size=3)
    samples = [Sample(index=i, response=text) for i, text in enumerate(["four", "bad", "sixsix"])]

    async def scored() -> list[Any]:
        return await asyncio.gather(*(remote_rm(args, one) for one in samples), return_exceptions=True)

    first, second, third = run(scored())
    assert (first, third) == (4, 6)
    assert isinstance(second, RewardError) and second.status == 422 and second.sample_index == 1


def test_a_batch_is_answered_by_as_many_rewards(start_service) -> None:
    fake = start_service(lambda batch: [1.0])
    with pytest.raises(RewardError, match=r"failed 2 times for sample 0: 2 rewards in a list are needed, not \[1.0\]"):
        score_all(fake, ["a", "b"], rm_batch_size=2, rm_concurrency=1)


def test_a_sample_that_is_given_up_strands_no_other_of_its_batch(start_service) -> None:
    fake = start_service(lambda batch: [1.0] * len(batch))
    fake.delay_s = 0.2
    args = rollout_args(rm_url=fake.url, rm_concurrency=1, rm_batch_size=2)

    async def scored() -> list[Any]:
        tasks = [asyncio.create_task(remote_rm(args, Sample(index=i))) for i in range(5)]
        await asyncio.sleep(0.1)
        tasks[0].cancel()  # it sends for the second, too
        tasks[3].cancel()  # it waits for its turn
        async with asyncio.timeout(5):
            return await asyncio.gather(*tasks, return_exceptions=True)

    kinds = [type(result) for result in run(scored())]
    assert kinds == [asyncio.CancelledError, float, float, asyncio.CancelledError, float]


@pytest.mark.parametrize(("status", "headers"), [(429, {}), (503, {"Retry-After": "0"})])
def test_a_service_that_has_enough_is_asked_again_without_a_try(start_service, status, headers) -> None:
    fake = start_service(length_of_response)
    fake.statuses, fake.headers = [status] * 5, headers
    assert ask(fake, max_retries=1) == {"score": 3}
    assert len(fake.requests) == 6


def test_the_more_requests_are_turned_away_the_fewer_are_sent(start_service) -> None:
    beside: list[int] = []  # requests that run while one is answered
    fake = start_service(lambda request: beside.append(fake.running) or 1.0)
    fake.delay_s, fake.statuses, fake.headers = 0.05, [429] * 3, {"Retry-After": "1"}
    began = time.monotonic()
    assert score_all(fake, ["x"] * 8, rm_concurrency=4) == [1.0] * 8
    assert time.monotonic() - began >= 1.0
    assert len(fake.requests) == 11, "the three are asked again"
    assert beside[:5] == [0] * 5, "three of four slots are taken for a second, the fourth does the others"


def test_a_service_that_never_has_time_is_given_up(start_service, monkeypatch) -> None:
    monkeypatch.setattr(service, "MAX_BUSY_S", 0.2)
    fake = start_service(length_of_response)
    fake.statuses = [429] * 10_000
    with pytest.raises(RewardError, match="failed 2 times for sample 7: HTTP 429"):
        ask(fake, max_retries=2)


# ---- code


def sandbox(request: dict[str, Any]) -> dict[str, Any]:
    """Stands in for an interpreter: a program "echo" prints its input; with "crash" in it, it fails."""
    if "crash" in request["code"]:
        return {"status": "Failed", "run_result": {"status": "Finished", "return_code": 1, "stdout": "3\n"}}
    return {"status": "Success", "run_result": {"stdout": request["stdin"] + " \n\n", "return_code": 0}}


def code_score(fake: FakeService, response: str, label: Any = None, **metadata: Any) -> Any:
    args = rollout_args(
        custom_rm_path=None, rm_type="code", code_sandbox_url=fake.url + "/", code_sandbox_concurrency=2
    )
    return run(async_rm(args, Sample(index=1, response=response, label=label, metadata=metadata)))


PROGRAM = "Sure:\n```python\necho\n```\nDone."
PAIRS = {"inputs": ["3", "4", "5", "6"], "outputs": ["3", "4", "5", "6"]}


def test_a_program_that_passes_every_test_scores_one(start_service) -> None:
    fake = start_service(sandbox)
    assert code_score(fake, PROGRAM, json.dumps(PAIRS)) == 1.0
    assert fake.paths == ["/run_code"] * 4
    request = fake.requests[0]
    assert (request["code"], request["language"], request["stdin"]) == ("echo\n", "python", "3")
    assert request["run_timeout"] == 10.0


def test_one_failed_test_is_enough_for_zero_and_a_failed_first_one_spares_the_others(start_service) -> None:
    fake = start_service(sandbox)
    assert code_score(fake, PROGRAM, test_cases={"inputs": ["3", "4"], "outputs": ["3", "5"]}) == 0.0
    assert len(fake.requests) == 2
    assert code_score(fake, PROGRAM, test_cases={"inputs": ["3", "4"], "outputs": ["x", "4"]}) == 0.0
    assert len(fake.requests) == 3
    assert code_score(fake, "```\ncrash\n```", test_cases={"inputs": ["3"], "outputs": ["3"]}) == 0.0


def test_code_sandbox_concurrency_bounds_the_requests_in_flight(start_service) -> None:
    fake = start_service(sandbox)
    fake.delay_s = 0.05
    assert code_score(fake, PROGRAM, PAIRS) == 1.0
    assert fake.most_running == 2


def test_statements_run_after_the_program_each_by_itself(start_service) -> None:
    fake = start_service(sandbox)
    assert code_score(fake, PROGRAM, ["assert f(1) == 2", "assert crash"], language="cpp") == 0.0
    assert [request["code"] for request in fake.requests] == ["echo\n\nassert f(1) == 2\n", "echo\n\nassert crash\n"]
    assert {request["language"] for request in fake.requests} == {"python"}


def test_a_response_without_a_program_scores_zero_and_asks_nobody(start_service) -> None:
    fake = start_service(sandbox)
    assert code_score(fake, "```python\nnever closed", PAIRS) == 0.0
    assert fake.requests == []


def test_the_sandboxs_own_failure_is_tried_again_and_then_is_no_score(start_service) -> None:
    fake = start_service(lambda request: {"status": "SandboxError", "message": "no pod"})
    with pytest.raises(RewardError, match=r"code sandbox of --code-sandbox-url .* failed 5 times .* no pod"):
        code_score(fake, PROGRAM, PAIRS)
    assert len(fake.requests) == 5
    odd = start_service(lambda request: {"detail": "what?"})
    with pytest.raises(RewardError, match="unexpected answer for sample 1: .*what"):
        code_score(odd, PROGRAM, PAIRS)


def test_the_last_closed_block_after_the_reasoning_is_the_program() -> None:
    two = "```python\na = 1\n```\ntext\n  ```cpp\nint b;\n  ```"
    assert extract_code(two) == ("int b;\n", "cpp")
    assert extract_code("```py\nx\n```\n</think> no block") is None
    assert extract_code("```py\nfirst\n```\n```py\nsecond, cut off") == ("first\n", "py")


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        ('[{"input": "1", "output": "2"}]', [("1", "2", "")]),
        ([{"stdin": "1\n", "stdout": ["2", "3"]}], [("1\n", "2\n3", "")]),
        ("assert f() == 1\nassert f() == 1", [("", None, "assert f() == 1\nassert f() == 1")]),
        ('["assert f()", "assert g()"]', [("", None, "assert f()"), ("", None, "assert g()")]),
        ("[1, 2] == f()", [("", None, "[1, 2] == f()")]),
    ],
)
def test_the_forms_of_test_cases(label: Any, expected: list[tuple[str, str | None, str]]) -> None:
    assert [(case.stdin, case.stdout, case.code) for case in read_test_cases(label, {})] == expected


@pytest.mark.parametrize(
    ("label", "message"),
    [
        (None, "found no test cases"),
        ("", "found no test cases"),
        ("[]", "found no test cases"),
        ({"inputs": ["1"], "outputs": []}, "two lists of one length"),
        ({"fn_name": "f", "inputs": [], "outputs": []}, "write them as assert statements"),
        ([{"input": "1"}], "a test case is a statement or"),
    ],
)
def test_what_is_no_test_case_is_named(label: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_test_cases(label, {})


def test_output_is_compared_without_blanks_at_line_ends() -> None:
    assert same_output("1 2 \r\n3\n\n", "1 2\n3")
    assert not same_output("1\n\n2", "1\n2")
    assert not same_output(" 1", "1")


# ---- classify


class RewardTokenizer:
    """Words are ids; the template writes roles, so that a test sees which turns were rendered."""

    chat_template = "yes"

    def apply_chat_template(self, messages: list[dict[str, str]], **kwargs: Any) -> str:
        assert kwargs["add_generation_prompt"] is False
        return " ".join(f"<{m['role']}> {m['content']}" for m in messages)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [len(word) for word in text.split()]


def classify_score(fake: FakeService, monkeypatch: pytest.MonkeyPatch, sample: Sample) -> Any:
    monkeypatch.setattr(service, "RewardTokenizer", lambda args: Namespace(tokenizer=RewardTokenizer()))
    routers = {"reward": ("127.0.0.1", fake.port)}
    args = rollout_args(custom_rm_path=None, rm_type="classify", reward_model_path="rm", sglang_model_routers=routers)
    return run(async_rm(args, sample))


def test_the_reward_model_scores_the_conversation_under_its_own_template(start_service, monkeypatch) -> None:
    fake = start_service(lambda request: {"embedding": [sum(request["input_ids"]) / 10], "meta_info": {}})
    sample = Sample(prompt="hello there", response="yes")
    ids = [len("<user>"), 5, 5, len("<assistant>"), 3]
    assert classify_score(fake, monkeypatch, sample) == sum(ids) / 10
    assert (fake.requests, fake.paths) == ([{"input_ids": ids}], ["/classify"])


def test_a_message_list_stays_turns_and_metadata_messages_replace_a_rendered_prompt(
    start_service, monkeypatch
) -> None:
    fake = start_service(lambda request: [{"embedding": [1.5]}])
    messages = [{"role": "system", "content": "a bb"}, {"role": "user", "content": "ccc"}]
    assert classify_score(fake, monkeypatch, Sample(prompt=messages, response="d")) == 1.5
    rendered = Sample(prompt="<policy> a bb", response="d", metadata={"messages": messages})
    assert classify_score(fake, monkeypatch, rendered) == 1.5
    expected = [len("<system>"), 1, 2, len("<user>"), 3, len("<assistant>"), 1]
    assert fake.requests == [{"input_ids": expected}] * 2


def test_a_model_with_several_scores_is_no_reward_model(start_service, monkeypatch) -> None:
    fake = start_service(lambda request: {"embedding": [0.1, 0.9]})
    with pytest.raises(RewardError, match="unexpected answer for sample 3: 2 scores, not 1"):
        classify_score(fake, monkeypatch, Sample(index=3))


def test_the_policy_never_answers_for_a_missing_reward_model() -> None:
    args = rollout_args(custom_rm_path=None, rm_type="classify", sglang_model_routers={"default": ("h", 1)})
    with pytest.raises(ValueError, match=r"no model 'reward' runs \(running: default\); --reward-model-path starts"):
        run(async_rm(args, Sample()))
