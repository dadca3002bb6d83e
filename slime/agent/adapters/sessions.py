"""All sessions of a server: their keys, their running turns, their trees of messages, and their end.

Wait graph: `Sessions.shutdown` waits for the turns of a session, `wait_timeout` and then 10 s for those it cancelled.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import secrets
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from slime.agent.adapters.session import Answer, Session
from slime.agent.adapters.wire import BadRequest, omits_images
from slime.agent.history import MODES, Prompt, drift, has_template, kept
from slime.agent.pictures import Picture, Pictures
from slime.agent.trajectory import Message, TrajectoryManager, shown_key
from slime.processes.wait import DaemonThreads
from slime.rollout.sampling.images import collapsed
from slime.utils.errors import UsageError
from slime.utils.types import Sample

if TYPE_CHECKING:
    from slime.config.args import Args

logger = logging.getLogger(__name__)
rendering = DaemonThreads("agent-render", 4)
MAX_CLOSED = 100_000
IDLE_SESSION_S = 3600.0
_CANCEL_S = 10.0
_GC_THRESHOLDS = (100_000, 10, 10)  # 256 turns under way hold some 40,000 containers, which no collection frees


def quiet_collector() -> None:
    """Have Python look for garbage less often, and no more at what the process has imported: that is for ever."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


class Sessions:
    """The sessions of a server, of all protocols that it speaks.

    Args:
        tokenizer: renders and decodes.
        history: "append" or "render", see `slime.agent.history`.
        fork_threshold_tokens: of `TrajectoryManager`.
        args: the run's; needed where the engine returns routed experts.
        pictures: opens images; None where the model sees none.

    Attributes:
        store: open sessions by key.
        closed: keys of sessions that have ended, the latest 100,000.
        keeps_experts: the engine is asked for its choice of experts (--use-rollout-routing-replay).
        inflight: tasks of a key's requests.
        loop: the server's, once it has had a request.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        history: str = "append",
        fork_threshold_tokens: int | None = None,
        args: Args | None = None,
        pictures: Pictures | None = None,
    ) -> None:
        if history not in MODES:
            raise UsageError(f"history {history!r} is unknown; it is one of {', '.join(MODES)}")
        self.tokenizer, self.args, self.pictures = tokenizer, args, pictures
        self.keeps_experts = args is not None and args.use_rollout_routing_replay
        self.appends = history == "append" and has_template(tokenizer)
        self.store: dict[str, Session] = {}
        self.inflight: dict[str, set[asyncio.Task[Any]]] = {}
        self.closed: set[str] = set()
        self._closed_in_order: deque[str] = deque()
        self.manager = TrajectoryManager(fork_threshold_tokens=fork_threshold_tokens)
        self.loop: asyncio.AbstractEventLoop | None = None

    def open(self, sid: str | None, session: Session) -> str:
        """Begin a session under a key, or under a random one that nobody can guess; returns the key.

        Raises:
            ValueError: the session is open.
        """
        sid = secrets.token_urlsafe(32) if sid is None else sid
        if sid in self.store:
            raise ValueError(f"session {shown_key(sid)} is open already; finish or drop it first")
        self.closed.discard(sid)
        session.is_open = True
        self.store[sid] = session
        return sid

    def of_client(self, sid: str) -> Session:
        """The session of a key; an unknown one is made, and those that nobody opened end when they are idle."""
        session = self.store.get(sid)
        if session is None:
            now = time.monotonic()
            for other, kept in list(self.store.items()):
                if not kept.is_open and now - kept.used_at > IDLE_SESSION_S and not self.inflight.get(other):
                    del self.store[other]
                    self.manager.drop_session(other)
            session = self.store[sid] = Session()
        session.used_at = time.monotonic()
        return session

    async def take_images(self, session: Session, messages: list[Message]) -> list[Message]:
        """Open the images of messages; a model that sees none reads in their place that they are left out.

        Raises:
            BadRequest: one cannot be read.
        """
        if self.pictures is None:
            return [omits_images(message) for message in messages]
        try:
            return await self.pictures.take(session.images, messages)
        except UsageError as error:
            raise BadRequest(str(error), param="content") from error

    def images_of(self, session: Session, prompt: Prompt) -> tuple[Picture, ...]:
        """The images of a prompt.

        Raises:
            BadRequest: its token ids have another number of places for them.
        """
        if self.pictures is None or not session.images:
            return ()
        try:
            return self.pictures.of_prompt(session.images, prompt.messages, prompt.ids)
        except UsageError as error:
            raise BadRequest(str(error), param="content") from error

    def begin(self, sid: str, task: asyncio.Task[Any]) -> None:
        """Count a task as one of a session's until it ends: the session's end waits for it."""
        running = self.inflight.setdefault(sid, set())
        running.add(task)
        task.add_done_callback(lambda done: self._ended(sid, running, done))

    def _ended(self, sid: str, running: set[asyncio.Task[Any]], task: asyncio.Task[Any]) -> None:
        running.discard(task)
        if not running and self.inflight.get(sid) is running:
            del self.inflight[sid]

    def record(self, sid: str, session: Session, answer: Answer) -> bool:
        """Add a turn to its session once; returns whether that was done."""
        if answer.is_recorded or self.store.get(sid) is not session:
            return False  # It was finished meanwhile: a session that is opened again under its key must not get it.
        answer.is_recorded = True
        prompt, tools = answer.prompt, answer.tools
        turn = answer.turn = kept(prompt, answer.turn)
        answer.prompt = Prompt(turn.prompt_ids, prompt.messages, prompt.digest)  # answers are kept for a while
        message = answer.reply.manager_message if turn.output_ids else None
        metadata = {"sid": sid, "tools": tools}
        self.manager.record_turn(
            sid, turn=turn, prompt_messages=prompt.messages, response_message=message, metadata=metadata
        )
        if message is not None:
            session.history.add(prompt, message, turn)
        return True

    async def finish(
        self,
        sid: str,
        *,
        base_sample: Sample,
        reward: float | dict[str, Any] | None = 0.0,
        extra_metadata: dict[str, Any] | None = None,
        wait_timeout: float = 5.0,
    ) -> list[Sample]:
        """End a session and return its samples; see `BaseAdapter.finish_session`."""
        session = self.store.get(sid) or Session()
        await self.shutdown(sid, wait_timeout=wait_timeout)
        if (root := self.manager.trees.get(sid)) is not None:
            await rendering.run(self._measure_drift, [leaf for leaf in root.leaves() if leaf.turn])
        samples = self.manager.get_trajectory(
            sid,
            base_sample=base_sample,
            reward=reward,
            extra_metadata=extra_metadata,
            max_sample_tokens=session.max_context_tokens,
            args=self.args,
        )
        for sample in samples:
            end = len(sample.tokens) - sample.response_length
            num_shown = sum(length - 1 for start, length in sample.image_spans or () if start < end)
            ids = collapsed(sample)[end - num_shown :]
            sample.response = str(self.tokenizer.decode(ids, skip_special_tokens=False))
            sample.metadata["agent"]["ignored_fields"] = sorted(session.ignored)
        return samples

    def _measure_drift(self, leaves: list[Any]) -> None:
        for leaf in leaves:
            messages: list[Message] = [node.message for node in leaf.path_from_root() if node.message]
            ids = [*leaf.turn.prompt_ids, *leaf.turn.output_ids]
            leaf.metadata["template_drift"] = drift(self.tokenizer, messages, leaf.metadata.get("tools"), ids)

    async def drop(self, sid: str, *, wait_timeout: float = 5.0) -> None:
        """End a session and throw away what was recorded."""
        await self.shutdown(sid, wait_timeout=wait_timeout)
        self.manager.drop_session(sid)

    async def shutdown(self, sid: str, *, wait_timeout: float = 5.0) -> None:
        """Refuse further requests of a session, and wait for those that run; what is left then is cancelled."""
        loop = self.loop
        if loop is not None and loop.is_running():
            ending = asyncio.run_coroutine_threadsafe(self._end_turns(sid, wait_timeout), loop)
            try:
                await asyncio.wait_for(asyncio.wrap_future(ending), wait_timeout + 2 * _CANCEL_S)
                return
            except TimeoutError:
                logger.warning("the server did not end the turns of a session in time")
        self._refuse(sid)
        self._forget(sid)

    def _refuse(self, sid: str) -> None:
        if sid not in self.closed:
            self.closed.add(sid)
            self._closed_in_order.append(sid)
        while len(self._closed_in_order) > MAX_CLOSED:
            self.closed.discard(self._closed_in_order.popleft())

    def _forget(self, sid: str) -> None:
        self.inflight.pop(sid, None)
        self.store.pop(sid, None)

    async def _end_turns(self, sid: str, wait_timeout: float) -> None:
        """Wait for the turns of a session, on the loop that runs them: none begins or is recorded meanwhile."""
        self._refuse(sid)
        if (session := self.store.get(sid)) is not None:
            session.end()
        try:
            if tasks := self.inflight.get(sid, set()) - {asyncio.current_task()}:
                _, left = await asyncio.wait(tasks, timeout=wait_timeout)
                for task in left:
                    task.cancel()
                if left:
                    await asyncio.wait(left, timeout=_CANCEL_S)
        finally:
            self._forget(sid)
