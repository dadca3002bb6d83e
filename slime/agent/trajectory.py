"""The turns of an agent's session as a tree of messages, and the samples that the tree becomes.

An agent's client sends its whole history with every request. `TrajectoryManager` keeps one tree per session: a node is
a message, and a request walks down the nodes whose messages it repeats. The first message that it does not repeat
begins a new branch: another system prompt, a sub-agent, a compaction, a second answer. Every path from the root to a
leaf becomes one sample, or several where the tokens of a later prompt do not continue those before.

Only ids that the engine read and wrote reach a sample. A generated token that is not trained after all is counted in
`sample.metadata["agent"]["masked_tokens"]`. Callers bring token ids; nothing is rendered or tokenised here.
"""

from __future__ import annotations

import hashlib
import logging
import os.path
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from slime.agent.pictures import Picture, Widened, spans_within
from slime.utils.types import Sample

if TYPE_CHECKING:
    from slime.config.args import Args

logger = logging.getLogger(__name__)
DEFAULT_FORK_THRESHOLD_TOKENS = 1024
Message = dict[str, Any]
EXPERTS = "routed_experts"
_EXPERT_KEYS = (EXPERTS, "routed_experts_start_len")
_STATUS = {"length": Sample.Status.TRUNCATED, "abort": Sample.Status.ABORTED}


@dataclass(frozen=True)
class TurnRecord:
    """One engine call: the ids it read, the ids it wrote, and how it ended.

    Attributes:
        prompt_ids: the whole prompt.
        output_ids: what the engine wrote.
        finish_reason: SGLang's "stop", "length" or "abort".
        output_log_probs: one per output id, or empty.
        ill_formed: the output holds a tool call that could not be read.
        meta_info: the engine's own, for weight versions, cache counters and top-p ids; None where there is none.
        parts: the engine's calls, where it aborted the turn and went on with it later; else empty.
        is_forced: a grammar chose tokens, so the turn is context and not trained.
        images: of the prompt, which has one token for each.
    """

    prompt_ids: Sequence[int]
    output_ids: list[int]
    finish_reason: str
    output_log_probs: list[float] = field(default_factory=list)
    ill_formed: bool = False
    meta_info: dict[str, Any] | None = None
    parts: tuple[TurnRecord, ...] = ()
    is_forced: bool = False
    images: tuple[Picture, ...] = ()


@dataclass(eq=False)
class MessageNode:
    """A message of a session; `turn` is set where the engine wrote it. The root holds no message."""

    role: str = ""
    message: Message | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    children: list[MessageNode] = field(default_factory=list)
    turn: TurnRecord | None = None
    turn_index: int | None = None
    response_trained: bool = False
    _above: weakref.ref[MessageNode] | None = field(default=None, repr=False)

    @property
    def parent(self) -> MessageNode | None:
        """The node above; None for a root. It is not held: an ended session is freed without the collector."""
        return None if self._above is None else self._above()

    @property
    def is_root(self) -> bool:
        """Whether the node has no parent."""
        return self._above is None

    def add_child(self, node: MessageNode) -> None:
        """Make a node the last child of this one."""
        node._above = weakref.ref(self)
        self.children.append(node)

    def path_from_root(self) -> list[MessageNode]:
        """The nodes from below the root down to this one."""
        path, node = [], self
        while not node.is_root:
            assert node.parent is not None, "whoever holds a node holds its tree's root"
            path.append(node)
            node = node.parent
        return path[::-1]

    def leaves(self) -> Iterator[MessageNode]:
        """The nodes without children, depth first and left to right; a root without children is its own leaf."""
        stack = [self]
        while stack:
            node = stack.pop()
            if not node.children:
                yield node
            stack += node.children[::-1]


class DriftKind(Enum):
    """How a prompt goes on from the tokens before it."""

    CLEAN = "clean"
    """They are its beginning."""
    REALIGN = "realign"
    """It differs within the last response, which is then context and no longer trained."""
    FORK = "fork"
    """It differs before that, or too much would be lost: it begins a sample of its own."""


def shown_key(sid: str) -> str:
    """What the log calls a session, whose key is a secret."""
    return hashlib.blake2b(sid.encode(), digest_size=4).hexdigest()


def _common_prefix_len(a: list[int], b: Sequence[int]) -> int:
    """The length of the head that two id lists have in common."""
    head = list(b[: len(a)])
    return len(a) if a == head else len(os.path.commonprefix([a, head]))  # the usual case is compared in C


class TrajectoryManager:
    """The message trees of all open sessions.

    Args:
        fork_threshold_tokens: an answer shorter than this may replace the previous response by what the client made
            of it (realign); 0 or less never does. None is 1024, and then the response that would be lost must be
            shorter than that, too: otherwise a short turn could wipe out a long one.
    """

    def __init__(self, *, fork_threshold_tokens: int | None = None) -> None:
        self._is_given = fork_threshold_tokens is not None
        self.fork_threshold_tokens = (
            DEFAULT_FORK_THRESHOLD_TOKENS if fork_threshold_tokens is None else fork_threshold_tokens
        )
        self.trees: dict[str, MessageNode] = {}
        self._turn_counts: dict[str, int] = {}
        self._latest: dict[str, tuple[list[Message], MessageNode]] = {}  # prompt, and the node of its last message

    def has_session(self, sid: str) -> bool:
        """Whether anything was recorded for a session that was not consumed yet."""
        return sid in self.trees

    def turn_count(self, sid: str) -> int:
        """How many turns were recorded; 0 for an unknown session."""
        return self._turn_counts.get(sid, 0)

    def drop_session(self, sid: str) -> None:
        """Forget a session."""
        self.trees.pop(sid, None)
        self._turn_counts.pop(sid, None)
        self._latest.pop(sid, None)

    def record_turn(
        self,
        sid: str,
        *,
        turn: TurnRecord,
        prompt_messages: list[Message],
        response_message: Message | None,
        metadata: dict[str, Any] | None = None,
    ) -> None:
        """Add a turn to a session's tree, which is made where there is none.

        Args:
            sid: the session.
            turn: its tokens.
            prompt_messages: the whole history that the request brought. Nothing is recorded where it is empty.
            response_message: the model's answer; None where it wrote nothing.
            metadata: kept in the answer's node.

        Raises:
            AssertionError: the turn has log-probs, but not one for each of its tokens.
        """
        given, needed = len(turn.output_log_probs), len(turn.output_ids)
        if given not in (0, needed):
            raise AssertionError(f"output_log_probs has {given} entries for {needed} output_ids")
        if not prompt_messages:
            logger.warning("session %s: a turn without prompt messages was not recorded", shown_key(sid))
            return
        latest, node = self._latest.get(sid, ([], MessageNode()))
        num_known = len(latest) if prompt_messages[: len(latest)] == latest else 0  # the usual case is compared in C
        node = node if num_known else self.trees.setdefault(sid, MessageNode())
        node, num_known = self._walk(node, prompt_messages, num_known)
        for message in prompt_messages[num_known:]:
            routing = MessageNode(role=message.get("role", ""), message=message)
            node.add_child(routing)
            node = routing
        self._latest[sid] = list(prompt_messages), node
        self._turn_counts[sid] = self.turn_count(sid) + 1
        answer = MessageNode(role="assistant", message=response_message, metadata=dict(metadata or {}), turn=turn)
        answer.turn_index = self._turn_counts[sid]
        node.add_child(answer)

    def _walk(self, node: MessageNode, messages: list[Message], begin: int) -> tuple[MessageNode, int]:
        """Return the deepest node whose path the messages repeat, and how many of them it covers.

        Args:
            node: whose path the messages before place `begin` are.
        """
        for position, message in enumerate(messages[begin:], begin):
            role = message.get("role", "")
            child = next((c for c in node.children if c.role == role and c.message == message), None)
            child = child or self._merge_rewrite(node, message)
            if child is None:
                return node, position
            node = child
        return node, len(messages)

    def _merge_rewrite(self, node: MessageNode, message: Message) -> MessageNode | None:
        """Take over a client's own version of the last answer, where that loses only a short turn."""
        if self.fork_threshold_tokens <= 0 or message.get("role") != "assistant":
            return None
        answers = [child for child in node.children if child.role == "assistant"]
        if len(answers) > 1:
            logger.warning("a changed assistant message may be any of %d answers; it is a new branch", len(answers))
        if len(answers) != 1:
            return None
        [answer] = answers
        if answer.children or answer.turn is None or len(answer.turn.output_ids) >= self.fork_threshold_tokens:
            return None
        answer.metadata["merged_rewrite"] = {
            "abandoned_turn_index": answer.turn_index,
            "abandoned_response_tokens": len(answer.turn.output_ids),
        }
        answer.message, answer.turn, answer.turn_index = message, None, None
        return answer

    def get_trajectory(
        self,
        sid: str,
        *,
        base_sample: Sample,
        reward: float | dict[str, Any] | None = 0.0,
        extra_metadata: dict[str, Any] | None = None,
        max_sample_tokens: int = 0,
        args: Args | None = None,
    ) -> list[Sample]:
        """Turn a session into samples, and forget it.

        Args:
            sid: the session.
            base_sample: gives index, group, prompt and label.
            reward: every sample gets it in full.
            extra_metadata: added to every sample's metadata.
            max_sample_tokens: samples are cut to this length; 0 is no limit.
            args: the run's, which give routed experts their shape; without them they are dropped.

        Returns:
            Samples in the order of the leaves; none for an unknown session, and none that has no trained token. In
            `metadata["agent"]` of each: "turns" in it; "breaks", 1 where its first prompt did not go on from the
            tokens of its own history; "forks", 1 where it begins a further branch; "masked_tokens", generated tokens
            that are lost for training; "template_drift", which the last turn's node was given, else 0.
        """
        root = self.trees.get(sid)
        samples: list[Sample] = []
        counted: set[int] = set()
        lost = 0
        for number, leaf in enumerate(root.leaves() if root else ()):
            for part, builder in enumerate(self._pack(leaf.path_from_root(), counted)):
                sample = builder.sample(base_sample, max_sample_tokens=max_sample_tokens, args=args)
                if not any(sample.loss_mask or ()):
                    lost += builder.masked_tokens
                    continue
                counts = {"breaks": int(part > 0), "forks": int(part == 0 and number > 0)}
                builder.describe(sample, extra_metadata or {}, counts)
                sample.reward = reward
                samples.append(sample)
        if lost and samples:  # of parts that became no sample: they are counted all the same
            samples[-1].metadata["agent"]["masked_tokens"] += lost
        elif lost:
            logger.warning("session %s gives no sample, although the engine wrote %d tokens", shown_key(sid), lost)
        self.drop_session(sid)
        return samples

    def _pack(self, path: list[MessageNode], counted: set[int]) -> list[_Builder]:
        """Pack the turns of a path; `counted` are the rewritten answers whose loss an earlier path has counted."""
        builders: list[_Builder] = []
        lost = 0
        for node in path:
            merged = node.metadata.get("merged_rewrite")
            if merged and id(node) not in counted:
                counted.add(id(node))
                lost += merged["abandoned_response_tokens"]
            if node.turn is None:
                continue
            kind = self._drift(builders[-1], node.turn) if builders else DriftKind.FORK
            if kind is DriftKind.FORK:
                builders.append(_Builder(node.turn.prompt_ids))
            elif kind is DriftKind.REALIGN:
                builders[-1].realign(node.turn.prompt_ids)
            builders[-1].add(node)
            builders[-1].masked_tokens += lost
            lost = 0
        return builders

    def _drift(self, builder: _Builder, turn: TurnRecord) -> DriftKind:
        same = _common_prefix_len(builder.tokens, turn.prompt_ids)
        if same == len(builder.tokens):
            return DriftKind.CLEAN
        is_short = len(turn.output_ids) < self.fork_threshold_tokens
        is_cheap = self._is_given or builder.last_trained < self.fork_threshold_tokens
        is_late = same >= builder.last_start
        return DriftKind.REALIGN if is_late and is_short and is_cheap else DriftKind.FORK


class _Builder:
    """The tokens of one sample while the turns of a path are packed into it."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self.tokens = list(prompt_ids)
        self.prompt_length = self.last_start = len(prompt_ids)
        self.trained: list[tuple[int, int, TurnRecord]] = []
        self.nodes: list[MessageNode] = []
        self.masked_tokens = 0

    @property
    def last_trained(self) -> int:
        """How many trained tokens the last response has."""
        is_last = self.trained and self.trained[-1][0] == self.last_start
        return self.trained[-1][1] - self.last_start if is_last else 0

    def realign(self, prompt_ids: Sequence[int]) -> None:
        """Replace the last response, and what follows it, by what a prompt has in its place."""
        if self.last_trained:
            self.masked_tokens += self.last_trained
            self.trained.pop()
        self.tokens[self.last_start :] = prompt_ids[self.last_start :]

    def add(self, node: MessageNode) -> None:
        """Append a turn whose prompt begins with the tokens so far; it is trained unless another leaf trains it."""
        turn = node.turn
        assert turn is not None, "only generated nodes are added"
        self.tokens += turn.prompt_ids[len(self.tokens) :]
        self.last_start = len(self.tokens)
        self.tokens += turn.output_ids
        if turn.output_ids and not node.response_trained:
            if turn.is_forced:
                self.masked_tokens += len(turn.output_ids)
            else:
                self.trained.append((self.last_start, len(self.tokens), turn))
        node.response_trained = True
        self.nodes.append(node)

    def sample(self, base: Sample, *, max_sample_tokens: int, args: Args | None) -> Sample:
        """Build the sample, cut to a length (0 = whole)."""
        wide = Widened(self._last_turn.images)
        sample = Sample(
            index=base.index,
            group_index=base.group_index,
            rollout_id=base.index if base.rollout_id is None else base.rollout_id,
            prompt=base.prompt,
            label=base.label,
            tokens=wide.segment(self.tokens[: self.prompt_length], 0),
        )
        position = self.prompt_length
        for start, end, turn in self.trained:
            between = wide.segment(self.tokens[position:start], len(sample.tokens))
            sample.append_response_tokens(tokens=between, trainable=False)
            for call in turn.parts or (turn,):
                log_probs = call.output_log_probs or [0.0] * len(call.output_ids)
                meta_info = without_experts(call.meta_info)
                sample.append_response_tokens(args, tokens=call.output_ids, log_probs=log_probs, meta_info=meta_info)
            position = end
        sample.append_response_tokens(tokens=wide.segment(self.tokens[position:], len(sample.tokens)), trainable=False)
        sample.image_spans = wide.spans or None
        if args is not None:  # of all tokens: the last call of the engine has read or written them
            meta_info = self._last_turn.meta_info or {}
            experts = {key: meta_info[key] for key in _EXPERT_KEYS if key in meta_info}
            if not isinstance(shared := experts.get(EXPERTS, ""), str):
                experts[EXPERTS] = bytes(shared)
            sample.append_response_tokens(args, meta_info=experts)
        sample.status = _STATUS.get(self._last_turn.finish_reason, Sample.Status.COMPLETED)
        if 0 < max_sample_tokens < len(sample.tokens):
            before = sum(sample.loss_mask or ())
            _cut(sample, max_sample_tokens)
            self.masked_tokens += before - sum(sample.loss_mask or ())
        wide.give(sample)
        return sample

    @property
    def _last_turn(self) -> TurnRecord:
        turn = self.nodes[-1].turn
        assert turn is not None
        return turn

    def describe(self, sample: Sample, extra: dict[str, Any], counts: dict[str, int]) -> None:
        """Set a sample's metadata."""
        sample.metadata = {
            **extra,
            "truncated": self._last_turn.finish_reason == "length",
            "use_tool": any((node.message or {}).get("tool_calls") for node in self.nodes),
            "ill_formed": any(node.turn.ill_formed for node in self.nodes if node.turn),
            "agent": {
                "turns": len(self.nodes),
                **counts,
                "masked_tokens": self.masked_tokens,
                "template_drift": self.nodes[-1].metadata.get("template_drift", 0),
            },
        }


def without_experts(meta_info: dict[str, Any] | None) -> dict[str, Any]:
    """What the engine said of a call, without its experts."""
    return {key: value for key, value in (meta_info or {}).items() if key not in _EXPERT_KEYS}


def _cut(sample: Sample, length: int) -> None:
    """Cut a sample's tokens, and every list that goes with them; an image is cut as a whole."""
    spans, length = spans_within(sample.image_spans or [], length)
    sample.image_spans = spans or None
    kept = max(sample.response_length - (len(sample.tokens) - length), 0)
    sample.tokens = sample.tokens[:length]
    sample.response_length = kept
    sample.loss_mask = (sample.loss_mask or [])[:kept]
    sample.rollout_log_probs = (sample.rollout_log_probs or [])[:kept]
    if sample.rollout_top_p_token_offsets is not None:
        sample.rollout_top_p_token_offsets = sample.rollout_top_p_token_offsets[: kept + 1]
        sample.rollout_top_p_token_ids = sample.rollout_top_p_token_ids[: sample.rollout_top_p_token_offsets[-1]]
    if sample.rollout_routed_experts is not None:
        sample.rollout_routed_experts = sample.rollout_routed_experts[: length - 1]
    sample.status = Sample.Status.TRUNCATED
