"""Multi-turn generation with tools: --custom-generate-function-path slime.rollout.multi_turn.generate.

The model writes a turn; its tool calls are made by the user's function (`tool_function_path` in the file of
--custom-config-path) or by servers of MCP (`mcp` there), what they answer is appended with mask 0, and the model goes
on, until it calls nothing, has had --max-turns turns, or its length limit is reached. `generate_turns` makes a sample
of every turn instead.

What a conversation has come to is kept in `sample.metadata`, so an aborted sample can go on later: "messages" (all
after the prompt), "round_number", "tool_calls", "tool_errors", "template_drift", and "turn_start" while a turn is
unfinished. docs/multi_turn.md has an example.

Wait graph: a turn waits for the router's /generate (its own deadline), then for one of --tool-concurrency threads,
which each call holds for `tool_timeout_s` at most, and for the tool (`tool_timeout_s`); all inside the semaphore of
generate_and_rm, which no tool function may take again.
"""

from __future__ import annotations

import copy
import json
import logging
import os.path
import time
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from slime.config.args import Args
from slime.rollout.mcp_tools import McpTools
from slime.rollout.sampling.generation import GenerateState
from slime.rollout.sampling.generation import generate as generate_once
from slime.rollout.sampling.images import (
    AnsweredImages,
    collapsed,
    has_images,
    set_prompt,
    with_images,
)
from slime.rollout.sampling.turn_text import text_after_turn
from slime.rollout.tool_calls import EnvError, ToolCall, ToolError, call_tool, parse_tool_calls, tool_names
from slime.utils.errors import UsageError
from slime.utils.mask_utils import TurnMarkers, find_turn_markers
from slime.utils.misc import load_function
from slime.utils.processing_utils import decode_ids, encode_text, render_chat
from slime.utils.types import Sample

__all__ = [
    "Conversation",
    "EnvError",
    "ToolError",
    "converse",
    "count_drift",
    "final_answer",
    "generate",
    "generate_turns",
    "next_turn_tokens",
]

logger = logging.getLogger(__name__)
DEFAULT_MAX_TURNS = 8
DEFAULT_TOOL_TIMEOUT_S = 60.0
_STATE_KEYS = (
    *("messages", "round_number", "tool_calls", "tool_errors", "template_drift", "turn_start", "final_status"),
    "mcp_calls",
)
Status = Sample.Status


async def generate(args: Args, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False) -> Sample:
    """Complete one sample in as many turns as it takes.

    Args:
        args: reads `max_turns`, the custom config's `tool_function_path` and `tool_timeout_s`, and what the default
            generate function reads. The length limits count the whole response, what tools say included.
        sample: its prompt is a message list; tool schemas are `metadata["tools"]`. An aborted one is continued.
        sampling_params: SGLang's.
        evaluation: whose limits hold; an evaluation is not aborted.

    Returns:
        The sample; TRUNCATED where a limit of tokens or turns ended it, ABORTED where its rollout ended. Its reward is
        not trusted where a tool's environment failed.

    Raises:
        UsageError: the prompt is no message list, or the tool function is not named.
    """
    conversation = Conversation(args, sample, await McpTools.of(args))
    return await converse(conversation, sampling_params, evaluation)


async def converse(conversation: Conversation, sampling_params: dict[str, Any], evaluation: bool = False) -> Sample:
    """`generate` for a conversation of a class of one's own, whose `calls` finds tool calls of another form."""
    sample, args = conversation.sample, conversation.args
    await conversation.begin()
    while True:
        text = await conversation.write_turn(sampling_params, evaluation)
        if sample.status is not Status.COMPLETED:
            return sample
        answers = await conversation.use_tools(text)
        if not answers:
            break
        if reason := conversation.append(answers, sampling_params, evaluation):
            sample.status, sample.end_reason = Status.TRUNCATED, reason
            break
        if GenerateState(args).aborted and not evaluation:
            sample.status = Status.ABORTED
            return sample
    conversation.measure_drift()
    return sample


async def generate_turns(
    args: Args, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> list[Sample]:
    """Complete one sample as a fan-out: every turn becomes a sample whose prompt is the conversation before it.

    For templates that show earlier turns otherwise than the model wrote them (Qwen3 drops their thoughts): each turn
    is generated and trained from what the template shows. The siblings share a rollout_id, so that they count as one
    execution, and "messages", so that a reward function gives all of them the same. An aborted execution begins anew.

    Returns:
        One sample per turn, or the untouched sample where the rollout was aborted.
    """
    turns: list[Sample] = []
    messages: list[Message] = []
    images: list[Any] = []
    counts: dict[str, Any] = {"tool_calls": 0, "tool_errors": 0}
    if servers := await McpTools.of(args):
        counts["mcp_calls"] = {}
    for number in range(1, (args.max_turns or DEFAULT_MAX_TURNS) + 1):
        if GenerateState(args).aborted and not evaluation:
            sample.status = Status.ABORTED
            return [sample]
        turn = copy.deepcopy(sample)
        turn.multimodal_inputs = with_images(turn, images)
        turn.rollout_id = sample.index if sample.rollout_id is None else sample.rollout_id
        conversation = Conversation(args, turn, servers)
        await conversation.begin(messages)
        turn.metadata |= {"round_number": number - 1, **counts}
        text = await conversation.write_turn(sampling_params, evaluation)
        if turn.status is Status.ABORTED:
            sample.status = Status.ABORTED
            return [sample]
        turns.append(turn)
        answers = await conversation.use_tools(text) if turn.status is Status.COMPLETED else []
        counts = {name: turn.metadata[name] for name in counts}
        messages = [*turn.metadata["messages"], *answers]
        images += conversation.images.take()
        if not answers:
            break
    else:
        turns[-1].status, turns[-1].end_reason = Status.TRUNCATED, "max_turns"
    last = turns[-1]
    last.note_end()
    for turn in turns:
        turn.metadata |= {"messages": messages, "final_status": last.status.value, **counts}
        turn.end_reason, turn.reward_is_trusted = last.end_reason, last.reward_is_trusted
    return turns


def final_answer(sample: Sample) -> str:
    """The model's last message, without what it thought before `</think>`; "" where it was cut off or called a tool.

    For reward functions: `sample.response` also holds the turns before, and what the tools said.
    """
    messages = sample.metadata.get("messages") or []
    status = sample.metadata.get("final_status", sample.status.value)  # of a fan-out: how the last turn ended
    if status != Status.COMPLETED.value or not messages or messages[-1]["role"] != "assistant":
        return ""
    text = str(messages[-1]["content"])
    return "" if parse_tool_calls(text) else text.rpartition("</think>")[2].strip()


class Conversation:
    """A sample as messages: writes turns, makes their tool calls, and keeps tokens and metadata in step."""

    def __init__(self, args: Args, sample: Sample, servers: McpTools | None = None) -> None:
        if not isinstance(sample.prompt, list):
            raise UsageError(
                f"slime.rollout.multi_turn needs a prompt that is a list of messages, not "
                f"{str(sample.prompt)[:80]!r}; point --input-key at the messages and leave --apply-chat-template off"
            )
        self.args = args
        self.sample = sample
        self.prompt: list[Message] = sample.prompt
        self.tokenizer = GenerateState(args).tokenizer
        self.servers = servers
        if servers is not None:
            own = list(sample.metadata.get("tools") or [])
            sample.metadata["tools"] = own + [s for s in servers.schemas if tool_names([s])[0] not in tool_names(own)]
        self.tools: list[dict[str, Any]] | None = sample.metadata.get("tools")
        self.images = AnsweredImages(GenerateState(args), args)
        self.media = GenerateState(args).media if args.multimodal_keys or has_images(sample) else None
        self.template: dict[str, Any] = {"tools": self.tools, "template_kwargs": sample.apply_chat_template_kwargs}

    @property
    def messages(self) -> list[Message]:
        """Every message after the prompt; the list is never changed in place, because copies of a sample share it."""
        return list(self.sample.metadata["messages"])

    @property
    def ends_with_media(self) -> bool:
        """Whether the model has ended its turn with a token of images, from which an engine cannot go on."""
        return self.media is not None and self.sample.tokens[-1] in self.media.stops

    async def begin(self, messages: list[Message] | None = None) -> None:
        """Tokenise the prompt and the messages after it; a sample that has a response goes on where it stopped."""
        sample = self.sample
        if sample.response_length:
            if "messages" not in sample.metadata:
                raise ValueError(f"sample {sample.index} has a response that slime.rollout.multi_turn did not write")
            return
        sample.metadata = {key: value for key, value in sample.metadata.items() if key not in _STATE_KEYS}
        sample.metadata |= {"messages": list(messages or []), "round_number": 0, "tool_calls": 0, "tool_errors": 0}
        shown = [*self.prompt, *self.messages]
        text = render_chat(self.tokenizer, shown, tools=self.tools, **sample.apply_chat_template_kwargs)
        await set_prompt(sample, GenerateState(self.args), text)

    async def write_turn(self, sampling_params: dict[str, Any], evaluation: bool) -> str:
        """Let the model write, or finish, a turn; returns its text, and adds it to the messages unless aborted."""
        sample, metadata = self.sample, self.sample.metadata
        if "turn_start" not in metadata:
            metadata["turn_start"] = len(sample.tokens)
            metadata["round_number"] += 1
        sample.status = Status.PENDING
        if self.media is not None:  # a tool may answer with an image later
            sampling_params = self.media.with_stops(sampling_params)
        await generate_once(self.args, sample, sampling_params, evaluation)
        written = sample.tokens[metadata["turn_start"] :]
        text = turn_content(self.tokenizer, written, sample.apply_chat_template_kwargs)
        if sample.status is not Status.ABORTED:
            del metadata["turn_start"]
            metadata["messages"] = [*self.messages, {"role": "assistant", "content": text}]
        return text

    def calls(self, text: str) -> list[ToolCall]:
        """The tool calls of a turn, in order."""
        return parse_tool_calls(text)

    async def use_tools(self, text: str) -> list[Message]:
        """Make the calls of a turn, one after the other.

        Returns:
            the messages of the tools; none where the turn calls nothing, or the environment failed.
        """
        calls = self.calls(text)
        if not calls or self.ends_with_media:
            return []
        known = tool_names(self.tools)
        answers: list[Message] = []
        started = time.monotonic()
        try:
            for call in calls:
                function, timeout_s = self._function_of(call.name)
                answer, succeeded = await call_tool(
                    function, self.args, self.sample, call, known=known, timeout_s=timeout_s
                )
                content = await self.images.read(answer)
                answers.append({"role": "tool", "name": call.name, "content": content})
                self.sample.metadata["tool_errors"] += not succeeded
        except EnvError as error:
            logger.warning("sample %s: its environment failed: %s", self.sample.index, error)
            self.sample.end_reason, self.sample.reward_is_trusted = "env_error", False
            answers = []
        self.sample.metadata["tool_calls"] += len(calls)
        self.sample.non_generation_time += time.monotonic() - started
        return answers

    def _function_of(self, name: str) -> tuple[Any, float]:
        """What makes the calls of a tool, and how long it may take."""
        servers = self.servers
        if servers is not None and servers.has(name):
            return servers.call, servers.timeout_s(name)
        if servers is not None and name not in tool_names(self.tools):
            return servers.call, 0.0  # there is no such tool, which `call_tool` answers
        return tool_function(self.args), tool_timeout_s(self.args)

    def append(self, answers: list[Message], sampling_params: dict[str, Any], evaluation: bool) -> str | None:
        """Append messages and the next generation prompt.

        Returns:
            the reason of the sample's end where no turn may follow, and nothing was changed; else None.
        """
        sample, args = self.sample, self.args
        if sample.metadata["round_number"] >= (args.max_turns or DEFAULT_MAX_TURNS):
            return "max_turns"
        history = [*self.prompt, *self.messages]
        new = next_turn_tokens(self.tokenizer, history, answers, tokens=sample.tokens, **self.template)
        context = args.eval_max_context_len if evaluation else args.rollout_max_context_len
        length = len(new) + self.images.num_more
        if sample.response_length + length >= sampling_params["max_new_tokens"]:
            return "length"
        if context is not None and len(sample.tokens) + length >= context:
            return "length"
        said = self.tokenizer.decode(new, skip_special_tokens=sampling_params.get("skip_special_tokens", False))
        new = self.images.append_to(sample, new)
        sample.append_response_tokens(args, tokens=new, trainable=False, text=said)
        sample.metadata["messages"] = [*self.messages, *answers]
        return None

    def measure_drift(self) -> None:
        """Note by how many tokens the conversation rendered as a whole differs from the sample's."""
        history = [*self.prompt, *self.messages]
        self.sample.metadata["template_drift"] = count_drift(
            self.tokenizer, history, tokens=collapsed(self.sample), **self.template
        )


def tool_function(args: Args) -> Any:
    """The user's tool function.

    Raises:
        UsageError: the custom config does not name one, or it cannot be loaded.
    """
    path = vars(args).get("tool_function_path")
    if not path:
        raise UsageError(
            "slime.rollout.multi_turn has no tools: the model called one, but the file of --custom-config-path has no "
            "tool_function_path (path of async fn(args, sample, name, arguments) -> text)"
        )
    try:
        return load_function(path)
    except ImportError as error:
        raise UsageError(f"tool_function_path in --custom-config-path: {error}") from error


def tool_timeout_s(args: Args) -> float:
    """Seconds that a tool may take: the custom config's `tool_timeout_s`."""
    return float(vars(args).get("tool_timeout_s") or DEFAULT_TOOL_TIMEOUT_S)


Message = dict[str, Any]
_markers: WeakKeyDictionary[Any, dict[str, tuple[TurnMarkers, list[list[int]]]]] = WeakKeyDictionary()


def turn_markers(tokenizer: Any, template_kwargs: dict[str, Any] | None = None) -> TurnMarkers:
    """What opens and closes an assistant turn, learned once per tokenizer and arguments of its template.

    Raises:
        ValueError: the chat template does not mark turns.
    """
    return _learned(tokenizer, template_kwargs)[0]


def _learned(tokenizer: Any, template_kwargs: dict[str, Any] | None) -> tuple[TurnMarkers, list[list[int]]]:
    """The markers, and the token ids of each that ends a turn."""
    known = _markers.setdefault(tokenizer, {})
    key = json.dumps(template_kwargs, sort_keys=True, default=str) if template_kwargs else ""
    if key not in known:
        markers = find_turn_markers(tokenizer, **(template_kwargs or {}))
        known[key] = markers, [encode_text(tokenizer, end) for end in markers.ends]
    return known[key]


def next_turn_tokens(
    tokenizer: Any,
    messages_so_far: Sequence[Message],
    new_messages: Sequence[Message],
    *,
    tokens: Sequence[int],
    tools: list[dict[str, Any]] | None = None,
    template_kwargs: dict[str, Any] | None = None,
) -> list[int]:
    """The tokens to append after a model's turn, so that the model can write the next one.

    The conversation is rendered with a stand-in for the model's last message, and what follows the stand-in is
    tokenised: so it is the template's own text, and the model's tokens have no part in it (`text_after_turn`).

    Args:
        tokenizer: with a chat template.
        messages_so_far: ends with the assistant message that the model has just written.
        new_messages: of tools or of the user, in order.
        tokens: all tokens so far. Where the model was cut off before it closed its turn, the result begins with the
            end marker.
        tools: schemas for the template.
        template_kwargs: more arguments for the template.

    Returns:
        Token ids of the rest of the turn's end, the new messages and the generation prompt.

    Raises:
        ValueError: the messages do not end with an assistant's, or the template leaves that message out.
    """
    if not messages_so_far or messages_so_far[-1]["role"] != "assistant":
        raise ValueError("messages_so_far must end with the assistant message that the new messages answer")
    following = text_after_turn(tokenizer, messages_so_far, new_messages, tools=tools, template_kwargs=template_kwargs)
    ids = encode_text(tokenizer, following)
    for end_ids in _learned(tokenizer, template_kwargs)[1]:
        if ids[: len(end_ids)] == end_ids and list(tokens[-len(end_ids) :]) == end_ids:
            return ids[len(end_ids) :]
    return ids


def count_drift(
    tokenizer: Any,
    messages: Sequence[Message],
    *,
    tokens: Sequence[int],
    tools: list[dict[str, Any]] | None = None,
    template_kwargs: dict[str, Any] | None = None,
) -> int:
    """By how many tokens a conversation, rendered and tokenised as a whole, differs from its tokens.

    Args:
        messages: the whole conversation; ends with an assistant message.
        tokens: as they were appended turn by turn, the prompt included. It does not matter whether the last turn was
            closed.

    Returns:
        Length of the stretch between the first and the last difference, in the longer of the two; 0 when equal.
    """
    markers, end_ids_of_turns = _learned(tokenizer, template_kwargs)
    text = render_chat(tokenizer, list(messages), tools=tools, add_generation_prompt=False, **(template_kwargs or {}))
    whole = encode_text(tokenizer, text.removesuffix(markers.tail))
    own = list(tokens)
    for end_ids in end_ids_of_turns:
        if own[-len(end_ids) :] == end_ids:
            own = own[: -len(end_ids)]
            break
    if own == whole:
        return 0
    same_head = len(os.path.commonprefix([own, whole]))
    same_tail = len(os.path.commonprefix([own[same_head:][::-1], whole[same_head:][::-1]]))
    return max(len(own), len(whole)) - same_head - same_tail


def turn_content(tokenizer: Any, tokens: Sequence[int], template_kwargs: dict[str, Any] | None = None) -> str:
    """The content of the message that a model wrote as `tokens`: without the marker that closes the turn, and with
    what the generation prompt began for it (a family's "<think>"), so that the template recognises a thought.
    """
    markers = turn_markers(tokenizer, template_kwargs)
    text = markers.prefill + decode_ids(tokenizer, list(tokens))
    for end in markers.ends:
        if text.endswith(end):
            return text.removesuffix(end)
    return text
