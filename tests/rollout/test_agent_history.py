"""Append-only sessions on real chat templates: whatever a client replays, a conversation is one sequence of tokens.

The scripted engine writes what a model of the family would, so the ids that the adapter sends it are compared with the
ids that it saw and wrote before: a prompt that was rendered anew would differ as soon as a template drops a thought.
"""

from __future__ import annotations

import base64
import copy
import importlib.util
import json
import sys
import types
from pathlib import Path

import anthropic
import numpy as np
import openai
import pytest

from slime.agent.adapters import AnthropicAdapter, OpenAIAdapter
from slime.agent.history import History, Prompt, SharedIds, _digests, render
from slime.agent.trajectory import TurnRecord
from slime.utils.processing_utils import render_chat
from tests.rollout.chat_tokenizers import SPECIAL, family_tokenizer
from tests.unit import agent_fakes
from tests.unit.agent_fakes import finish

TOOLS = [{"type": "function", "function": {"name": "calculator", "description": "", "parameters": {"type": "object"}}}]
ANTHROPIC_TOOLS = [{"name": "calculator", "input_schema": {"type": "object"}}]
QUESTION = {"role": "user", "content": "What is 84*18?"}
AGAIN = {"role": "user", "content": "And 12*12?"}
THINKERS = ("qwen3", "qwen3_5", "deepseek_r1_distill_qwen", "glm4_5")
REASONING = {"glm4_5": "glm45", "qwen3": "qwen3", "qwen3_5": "qwen3", "deepseek_r1_distill_qwen": "deepseek-r1"}
ENDS = {"deepseek_r1_distill_qwen": "<｜end▁of▁sentence｜>", "llama3": "<|eot_id|>", "glm4": "<|observation|>"}
ENDS["glm4_5"] = ENDS["glm4"]
TURNS = 30


def written(family, turn, last):
    """What a model writes: a thought, then a call whose keys are in no alphabetical order, or the answer."""
    opened = "" if family in ("qwen3_5", "deepseek_r1_distill_qwen") else "<think>\n"
    thought = f"{opened}Let me think about {turn}.\n</think>\n\n" if family in THINKERS else ""
    call = (
        f'<tool_call>\n{{"name": "calculator", "arguments": {{"z": {turn}, "expression": "{turn}*2"}}}}\n</tool_call>'
    )
    return thought + ("The answer is 144." if last else call) + ENDS.get(family, "<|im_end|>")


def serving(kind, family, texts, **kwargs):
    parsers = {"tool_parser": "qwen25", "reasoning_parser": REASONING.get(family), **kwargs}
    return agent_fakes.serving(kind, texts, tokenizer=family_tokenizer(family), **parsers)


def openai_agent(url, turns, *, echoes=None):
    """An agent: it calls its tool as often as it is told to, and replays what it got, without thoughts and ids."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="s", max_retries=0)
    messages = [{"role": "system", "content": "be brief"}, QUESTION]
    for turn in range(turns):
        message = client.chat.completions.create(model="m", messages=messages, tools=TOOLS).choices[0].message
        if not message.tool_calls:
            return message.content
        echo = {"role": "assistant", "content": message.content or "", "tool_calls": []}
        for call in message.tool_calls:
            arguments = dict(sorted(json.loads(call.function.arguments).items()))
            function = {"name": call.function.name, "arguments": json.dumps(arguments, indent=1)}
            echo["tool_calls"].append({"id": f"mine_{turn}", "type": "function", "function": function})
        echo = echoes(echo, message) if echoes else echo
        messages += [echo, {"role": "tool", "tool_call_id": f"mine_{turn}", "content": f"{turn * 2}"}]
        if turn == TURNS // 2:  # now templates drop every thought before it
            messages.append(AGAIN)
    return None


def anthropic_agent(url, turns):
    """The same over Messages; it drops thinking blocks, too."""
    client = anthropic.Anthropic(base_url=url, auth_token="s", max_retries=0)
    messages = [QUESTION]
    for turn in range(turns):
        answer = client.messages.create(model="m", max_tokens=999, messages=messages, tools=ANTHROPIC_TOOLS)
        uses = [block for block in answer.content if block.type == "tool_use"]
        if not uses:
            return answer.content[-1].text
        results = [{"type": "tool_result", "tool_use_id": use.id, "content": f"{turn * 2}"} for use in uses]
        if turn == TURNS // 2:
            results.append({"type": "text", "text": AGAIN["content"]})
        kept = [block for block in answer.content if block.type != "thinking"]
        messages += [{"role": "assistant", "content": kept}, {"role": "user", "content": results}]
    return None


def check_one_sequence(sample, engine):
    """The sample is what the engine saw and wrote: prompts continue what was before, and every output is trained."""
    held = []
    for request, output in zip(engine.requests, engine.outputs, strict=True):
        assert request["input_ids"][: len(held)] == held, "a prompt does not go on from the tokens before it"
        held = [*request["input_ids"], *output]
    assert sample.tokens == held
    trained = [t for t, bit in zip(held[-sample.response_length :], sample.loss_mask, strict=True) if bit]
    assert trained == [token for output in engine.outputs for token in output]
    sampled = [-(i + 1) / 8 for output in engine.outputs for i in range(len(output))]
    assert [p for p, bit in zip(sample.rollout_log_probs, sample.loss_mask, strict=True) if bit] == sampled


@pytest.mark.parametrize("family", THINKERS)
@pytest.mark.parametrize("kind", [OpenAIAdapter, AnthropicAdapter], ids=["openai", "anthropic"])
def test_thirty_turns_under_a_template_that_drops_thoughts_are_one_sample_without_a_break(kind, family):
    texts = [written(family, turn, turn == TURNS - 1) for turn in range(TURNS)]
    with serving(kind, family, texts) as (adapter, url, engine):
        agent = openai_agent if kind is OpenAIAdapter else anthropic_agent
        assert agent(url, TURNS) == "The answer is 144."
        [sample] = finish(adapter)
    check_one_sequence(sample, engine)
    counts = sample.metadata["agent"]
    assert (counts["turns"], counts["breaks"], counts["forks"], counts["masked_tokens"]) == (TURNS, 0, 0, 0)
    assert counts["template_drift"] > 0, "the template would have shown other tokens, and that is counted"
    assert sample.metadata["use_tool"] and not sample.metadata["ill_formed"]


@pytest.mark.parametrize("family", sorted(set(SPECIAL) - {"smollm2"}))
def test_every_family_continues_its_own_tokens(family):
    texts = [written(family, turn, turn == 2) for turn in range(3)]
    with serving(OpenAIAdapter, family, texts) as (adapter, url, engine):
        openai_agent(url, 3)
        [sample] = finish(adapter)
    check_one_sequence(sample, engine)


def test_rendering_every_request_breaks_where_a_thought_is_dropped_and_counts_it():
    texts = [written("qwen3", turn, turn == 3) for turn in range(4)]
    with serving(OpenAIAdapter, "qwen3", texts, history="render", fork_threshold_tokens=0) as (adapter, url, engine):
        openai_agent(url, 4)
        samples = finish(adapter)
    assert len(samples) == sum(s.metadata["agent"]["breaks"] for s in samples) + 1 > 1
    trained = sum(sum(s.loss_mask) for s in samples)
    lost = sum(s.metadata["agent"]["masked_tokens"] for s in samples)
    assert trained + lost == sum(map(len, engine.outputs)), "no generated token is lost without a count"


@pytest.mark.parametrize(
    "change",
    [
        lambda echo, message: {**echo, "content": f"\n{echo['content']}  "},
        lambda echo, message: {**echo, "content": None},
        lambda echo, message: {**echo, "reasoning_content": message.model_extra["reasoning_content"]},
        lambda echo, message: {**echo, "content": f"<think>other</think>{echo['content']}"},
    ],
    ids=["whitespace", "null", "echoed thought", "rewritten thought"],
)
def test_what_clients_do_to_a_message_does_not_break_the_session(change):
    texts = [written("qwen3", turn, turn == 2) for turn in range(3)]
    with serving(OpenAIAdapter, "qwen3", texts) as (adapter, url, engine):
        openai_agent(url, 3, echoes=change)
        [sample] = finish(adapter)
    check_one_sequence(sample, engine)


def test_another_system_prompt_or_a_compaction_is_a_branch_and_shared_turns_are_trained_once():
    texts = [written("qwen3", turn, True) for turn in range(3)]
    with serving(OpenAIAdapter, "qwen3", texts) as (adapter, url, engine):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="s", max_retries=0)

        def ask(*messages):
            answer = client.chat.completions.create(model="m", messages=list(messages)).choices[0].message
            return {"role": "assistant", "content": answer.content}

        said = ask(QUESTION)
        ask(QUESTION, said, {"role": "user", "content": "And 12*12?"})
        ask({"role": "user", "content": "Summary: 84*18 was asked."})
        samples = finish(adapter)
    assert [s.metadata["agent"]["forks"] for s in samples] == [0, 1]
    assert sum(sum(s.loss_mask) for s in samples) == sum(map(len, engine.outputs))


def test_a_turn_that_was_cut_off_is_closed_before_the_next_message():
    with serving(OpenAIAdapter, "qwen2_5", ["The answer", "is 144.<|im_end|>"]) as (adapter, url, engine):
        engine.finish = "length"
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="s", max_retries=0)
        said = client.chat.completions.create(model="m", messages=[QUESTION]).choices[0].message
        messages = [QUESTION, {"role": "assistant", "content": said.content}, {"role": "user", "content": "Go on."}]
        client.chat.completions.create(model="m", messages=messages)
        [sample] = finish(adapter)
    check_one_sequence(sample, engine)
    text = family_tokenizer("qwen2_5").decode(engine.requests[1]["input_ids"])
    assert text.endswith("The answer<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n")


def test_messages_that_the_template_refuses_are_the_clients_fault():
    tokenizer = copy.copy(family_tokenizer("qwen2_5"))
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with agent_fakes.serving(OpenAIAdapter, [], tokenizer=tokenizer) as (_, url, engine):
        status, text = agent_fakes.raw(url, "/v1/chat/completions", {"messages": [QUESTION]})
    assert status == 400 and "roles must alternate" in text and not engine.requests


def test_only_what_is_new_is_tokenised(monkeypatch):
    tokenizer, history = family_tokenizer("qwen3"), History()
    messages = [QUESTION]
    encoded = []
    for turn in range(6):
        prompt = history.prompt(tokenizer, history.match(messages, None), appends=True)
        output = tokenizer.encode("It is 144." * (turn + 1) + "<|im_end|>", add_special_tokens=False)
        answer = {"role": "assistant", "content": "It is 144." * (turn + 1)}
        history.add(prompt, answer, TurnRecord(prompt.ids, output, "stop"))
        messages = [*messages, answer, QUESTION]
        encoded.append(len(prompt.ids))
    texts = []
    monkeypatch.setattr("slime.rollout.multi_turn.encode_text", lambda _, text: texts.append(text) or [1])
    history.prompt(tokenizer, history.match(messages, None), appends=True)
    assert sum(map(len, texts)) < 200 < encoded[-1]


def test_a_long_first_message_changes_nothing_of_the_tokens_behind_a_turn():
    for family in sorted(set(SPECIAL) - {"smollm2"}):
        tokenizer, tails = family_tokenizer(family), []
        for question in (QUESTION, {**QUESTION, "content": "What is 84*18? " * 500}):
            history, messages = History(), [{"role": "system", "content": "be brief " * 300}, question]
            prompt = history.prompt(tokenizer, history.match(messages, None), appends=True)
            output = tokenizer.encode("It is 144.", add_special_tokens=False)
            answer = {"role": "assistant", "content": "It is 144."}
            history.add(prompt, answer, TurnRecord(SharedIds.of(prompt.ids), output, "stop"))
            again = history.prompt(tokenizer, history.match([*messages, answer, AGAIN], None), appends=True)
            tails.append(again.ids[len(prompt.ids) + len(output) :])
        assert tails[0] == tails[1] != [], family


def test_the_prompts_of_a_conversation_share_their_ids_and_a_branch_has_its_own():
    first = SharedIds.of([1, 2])
    second, branch = first.plus([3]).plus([4]).kept(), first.plus([3, 9]).kept()
    third = second.plus([5, 6]).kept()
    held = {"first": first, "second": second, "branch": branch, "third": third}
    expected = {"first": [1, 2], "second": [1, 2, 3, 4], "branch": [1, 2, 3, 9], "third": [1, 2, 3, 4, 5, 6]}
    assert held == expected and {name: list(ids) for name, ids in held.items()} == expected
    assert first.held is second.held is third.held is not branch.held
    assert SharedIds.of(third) is third and SharedIds.of(first.plus([7])) == [1, 2, 7]


@pytest.mark.parametrize(
    "place", [slice(1, 3), slice(-1, None), slice(3, 5), slice(None, None, -1), slice(9, 12), -1, 0, 3]
)
def test_shared_ids_are_cut_as_a_list_is_before_and_after_they_are_kept(place):
    ids = SharedIds.of([1, 2, 3]).plus([4, 5])
    assert ids[place] == ids.kept()[place] == [1, 2, 3, 4, 5][place] and len(ids) == 5


def test_the_json_of_shared_ids_is_written_once_and_right_in_every_order():
    first = SharedIds.of([10, 20])
    second = first.plus([30])
    third = second.kept().plus([40, 50]).kept()
    for ids in (third, first, second, second.kept(), third.plus([60]), first.plus([]), SharedIds.of([])):
        assert json.loads(ids.json()) == list(ids)
    calls = []
    third.held.ids, whole = _Spy(third.held.ids, calls), third.plus([70]).json()
    assert json.loads(whole) == [10, 20, 30, 40, 50, 70] and not calls, "what was written is not read again"


class _Spy(list):
    """An array that notes where it is read."""

    def __init__(self, ids, calls):
        super().__init__(ids)
        self.calls = calls

    def __getitem__(self, place):
        self.calls.append(place)
        return super().__getitem__(place)


def test_what_the_last_request_had_too_is_not_digested_again(monkeypatch):
    history, seen = History(), []
    monkeypatch.setattr(
        "slime.agent.history._next", lambda digest, m: seen.append(m) or digest + m["content"].encode()
    )
    messages = [{"role": "user", "content": text} for text in "abcd"]
    history.match(messages[:3], None)
    assert history.match(messages, None).digest[-4:] == b"abcd" and seen == messages, "only the fourth was new"
    changed = [messages[0], {"role": "user", "content": "x"}, *messages[2:]]
    assert history.match(changed, None).digest[-4:] == b"axcd" and seen[4:] == changed[1:]
    assert history.match(changed, TOOLS).digest[-4:] == b"axcd" and seen[7:] == changed, "other tools: all anew"


def test_other_tools_are_another_conversation():
    tokenizer, history = family_tokenizer("qwen3"), History()
    answer = {"role": "assistant", "content": "144"}
    history.add(Prompt([1, 2], [QUESTION], _digests([QUESTION], TOOLS)[-1]), answer, TurnRecord([1, 2], [3], "stop"))
    messages = [QUESTION, answer, QUESTION]
    assert history.prompt(tokenizer, history.match(messages, TOOLS), appends=True).ids[:3] == [1, 2, 3]
    assert history.prompt(tokenizer, history.match(messages, None), appends=True).ids == render(
        tokenizer, messages, None
    )


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_the_fixtures_of_qwen3_show_calls_and_separate_thoughts(family):
    call = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": "84*18"}}}
    said = {"role": "assistant", "content": "Sure.", "reasoning_content": "hm", "tool_calls": [call, call]}
    text = render_chat(family_tokenizer(family), [QUESTION, said], tools=TOOLS, add_generation_prompt=False)
    shown = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "84*18"}}\n</tool_call>'
    assert text.endswith(f"<think>\nhm\n</think>\n\nSure.\n{shown}\n{shown}<|im_end|>\n")


def capture_graph(engine):
    """OpenEnv's own graph of the calls that an engine saw; its package would load gradio, the module needs nothing."""
    package = importlib.util.find_spec("openenv")
    assert package is not None and package.submodule_search_locations
    path = Path(package.submodule_search_locations[0]) / "core" / "harness" / "capture" / "graph.py"
    spec = importlib.util.spec_from_file_location("openenv_capture_graph", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    graph = module.RolloutGraph()
    for i, (request, output) in enumerate(zip(engine.requests, engine.outputs, strict=True)):
        log_probs = [-(k + 1) / 8 for k in range(len(output))]
        graph.add_turn(module.TurnNode(str(i), request["input_ids"], output, log_probs))
    return graph


def branching_agent(url):
    """Two helpers that continue the same answer, a third that begins anew, and the main agent after them."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="s", max_retries=0)

    def ask(*messages):
        answer = client.chat.completions.create(model="m", messages=list(messages), tools=TOOLS).choices[0].message
        return [*messages, {"role": "assistant", "content": answer.content, "tool_calls": answer.tool_calls}]

    start = ask({"role": "system", "content": "be brief"}, QUESTION)
    answers = [{"role": "tool", "tool_call_id": call.id, "content": "1512"} for call in start[-1]["tool_calls"]]
    for helper in ("first", "second"):
        ask(*start, *answers, {"role": "user", "content": f"You are the {helper} helper."})
    ask({"role": "user", "content": "You are the third helper."})
    return ask(*ask(*start, *answers), AGAIN)


@pytest.mark.parametrize("history", ["append", "render"])
@pytest.mark.parametrize("agent", [lambda url: openai_agent(url, 6), branching_agent], ids=["chain", "branches"])
@pytest.mark.parametrize("family", ["qwen2_5", "qwen3"])
def test_samples_are_the_sequences_of_openenvs_capture_of_the_same_calls(family, agent, history):
    pytest.importorskip("openenv", reason="OpenEnv's capture is the reference")
    texts = [written(family, turn, turn == 5) for turn in range(6)]
    with serving(OpenAIAdapter, family, texts, history=history, fork_threshold_tokens=0) as (adapter, url, engine):
        agent(url)
        samples = finish(adapter)
    graph = capture_graph(engine)
    expected = graph.sequences()
    assert sorted(s.tokens for s in samples) == sorted(s.input_ids for s in expected)
    # OpenEnv trains a shared turn in every sequence that holds it, slime in the first.
    assert sum(sum(s.loss_mask) for s in samples) == sum(len(node.sampled_ids) for node in graph.nodes())
    by_tokens = {tuple(sequence.input_ids): sequence for sequence in expected}
    for sample in samples:
        sequence = by_tokens[tuple(sample.tokens)]
        mask, own = sequence.loss_mask[-sample.response_length :], sequence.logprobs[-sample.response_length :]
        trained = [(i, own[i]) for i, bit in enumerate(sample.loss_mask) if bit]
        assert trained and all(mask[i] and sample.rollout_log_probs[i] == p for i, p in trained)


class CountedExperts:
    """The meta_info of an engine that chooses expert N for every token that its call N reads or writes."""

    def __init__(self, engine, shape):
        self.engine, self.shape = engine, shape

    def keys(self):
        return ["routed_experts"]

    def __getitem__(self, _):
        rows = len(self.engine.requests[-1]["input_ids"]) + len(self.engine.outputs[-1]) - 1
        data = np.full((rows, *self.shape), len(self.engine.requests) - 1, np.int32)
        return base64.b64encode(data.tobytes()).decode()


def test_experts_are_those_of_the_call_that_wrote_a_token_and_are_held_once():
    turns, args = 12, types.SimpleNamespace(use_rollout_routing_replay=True, num_layers=2, moe_router_topk=3)
    args.sglang_speculative_algorithm = None
    texts = [written("qwen2_5", turn, True) for turn in range(turns + 1)]
    with agent_fakes.gateway(list(texts), tokenizer=family_tokenizer("qwen2_5"), args=args) as (server, engine):
        engine.meta = CountedExperts(engine, (2, 3))
        key, messages = agent_fakes.opened(server), [QUESTION]
        for _ in range(turns):
            said = agent_fakes.send(server, agent_fakes.CHAT, key, {"messages": messages})[1]
            messages = [*messages, said["choices"][0]["message"], AGAIN]
        agent_fakes.send(server, agent_fakes.CHAT, key, {"messages": [*messages[:4], QUESTION]})  # a branch
        tree = server.sessions.manager.trees[key]
        main, branch = finish(server, key)  # it waits for the last turn, which is recorded behind its answer
    nodes = [node for leaf in tree.leaves() for node in leaf.path_from_root() if node.turn]
    held = {id(node.turn.meta_info["routed_experts"].held) for node in nodes}
    assert len(nodes) > turns and len(held) == 2, "one buffer, and one of the branch"
    ends = [len(r["input_ids"]) + len(o) - 1 for r, o in zip(engine.requests, engine.outputs, strict=True)]
    counts = [end - start for start, end in zip([0, *ends[:-2]], ends[:-1], strict=True)]
    expected = [number for number, count in enumerate(counts) for _ in range(count)]
    assert [int(row[0, 0]) for row in main.rollout_routed_experts] == expected
    assert len(expected) == len(main.tokens) - 1
    rows = [int(row[0, 0]) for row in branch.rollout_routed_experts]
    assert len(rows) == len(branch.tokens) - 1 and rows == [*expected[: ends[1]], *[turns] * (ends[-1] - ends[1])]
