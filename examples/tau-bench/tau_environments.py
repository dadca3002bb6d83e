"""Episodes of tau-bench: the environments of tau2 where it is installed, and the shop of `shop.py` anywhere.

Both are an `Episode`: it has a policy, tools and a user who speaks first; a step is one call of a tool or one text for
the user. What can wait is bounded: a step of tau2 runs in one of --tool-concurrency threads, and a user of the shop
who is a language model is asked over HTTP, `step_timeout_s` each.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import shop

from slime.processes.wait import CallTimeout
from slime.rollout.multi_turn import EnvError
from slime.rollout.tool_calls import ToolCall, ToolThreads
from slime.utils.http_utils import HttpError, post

SHOP = "shop"
Message = dict[str, Any]


@dataclass(frozen=True)
class Step:
    """What an environment answers: a message for the model, of the user or a tool; the reward once it is done."""

    role: str
    text: str
    is_done: bool = False
    reward: float = 0.0


class Episode(Protocol):
    """One conversation with a user about one task.

    `is_resumable`: it can be continued from its messages alone, in another process too.
    """

    policy: str
    tools: list[dict[str, Any]]
    is_resumable: bool

    async def start(self) -> str:
        """What the user says first."""

    async def resume(self, messages: list[Message], calls: list[ToolCall]) -> None:
        """Continue after `messages` (all after the system's), in which these calls were made."""

    async def step(self, action: ToolCall | str) -> Step:
        """Make a call, or say something to the user.

        Raises:
            EnvError: the environment failed.
        """

    async def close(self) -> None:
        """The episode is over."""


def make_episode(args: Any, config: dict[str, Any], task: int) -> Episode:
    """An episode of the environment that the run's `tau` names."""
    return ShopEpisode(config, task) if config["env"] == SHOP else Tau2Episode(args, config, task)


class ShopEpisode:
    """A customer of the shop; scripted, or a language model behind an OpenAI-compatible server."""

    policy, tools, is_resumable = shop.POLICY, shop.TOOLS, True

    def __init__(self, config: dict[str, Any], task: int) -> None:
        self.config, self.task, self.shop = config, task, shop.Shop()
        self.messages: list[Message] = []

    async def start(self) -> str:
        """What the customer says first."""
        self.messages = [{"role": "user", "content": shop.opening(self.task)}]
        return str(self.messages[0]["content"])

    async def resume(self, messages: list[Message], calls: list[ToolCall]) -> None:
        """Make the calls again, which changes the database as they did."""
        self.messages = _of_user_and_model(messages)
        for call in calls:
            self._call(call)

    async def step(self, action: ToolCall | str) -> Step:
        """Make a call, or say something to the customer."""
        if isinstance(action, ToolCall):
            return Step("tool", self._call(action))
        self.messages.append({"role": "assistant", "content": action})
        reply = (
            shop.scripted_reply(self.task, action) if self.config["user_strategy"] == "script" else await self._ask()
        )
        self.messages.append({"role": "user", "content": reply})
        return Step("user", reply, shop.STOP in reply, float(self.shop.is_right(self.task)))

    async def close(self) -> None:
        """There is nothing to close."""

    def _call(self, call: ToolCall) -> str:
        try:
            return self.shop.call(call.name, call.arguments)
        except shop.ShopError as error:
            return f"error: {error}"

    async def _ask(self) -> str:
        """The next message of the language model that plays the customer; to it the roles are the other way round."""
        config, other = self.config, {"user": "assistant", "assistant": "user"}
        told = [{"role": other[m["role"]], "content": m["content"]} for m in self.messages]
        system = {"role": "system", "content": shop.instruction(self.task)}
        body = {"model": config["user_model"], "messages": [system, *told], "max_tokens": config["max_user_tokens"]}
        url = f"{config['user_url'].rstrip('/')}/chat/completions"
        headers = {"Authorization": f"Bearer {config['user_api_key']}"} if config["user_api_key"] else None
        try:
            answer = await post(url, body, max_retries=3, headers=headers, timeout_s=config["step_timeout_s"])
            said = str(answer["choices"][0]["message"]["content"] or "")
        except (HttpError, KeyError, IndexError, TypeError) as error:
            raise EnvError(f"the user at {url}: {type(error).__name__}: {error}") from error
        if not said.strip():  # one that only thought, say: the model cannot answer it, and would be graded for it
            raise EnvError(f"the user at {url} said nothing; max_user_tokens is {config['max_user_tokens']}")
        return said


def _of_user_and_model(messages: list[Message]) -> list[Message]:
    """What user and model said to each other: without calls and what tools answered."""
    kept = [{"role": "user", "content": m["content"]} for m in messages[:1]]
    for before, message in zip(messages[1:], messages[2:], strict=False):
        if message["role"] == "user":
            kept += [
                {"role": "assistant", "content": said_to_user(before["content"])},
                {"role": "user", "content": message["content"]},
            ]
    return kept


def said_to_user(text: str) -> str:
    """What a user hears of a turn: not what the model thought before `</think>`."""
    return text.rpartition("</think>")[2].strip()


class Tau2Episode:
    """A task of tau2 through its gymnasium environment, whose user and orchestrator are threads of tau2.

    An aborted one begins anew: its state is in those threads.
    """

    policy: str = ""
    tools: list[dict[str, Any]]
    is_resumable = False

    def __init__(self, args: Any, config: dict[str, Any], task: int) -> None:
        self.args, self.config, self.tools = args, config, []
        model = "/".join(part for part in (config["user_model_provider"], config["user_model"]) if part)
        self.build = lambda: importlib.import_module("tau2.gym.gym_agent").AgentGymEnv(
            domain=config["env"], task_id=tau2_task_ids(config["env"], config["task_split"])[task], user_llm=model
        )
        self.env: Any = None

    async def start(self) -> str:
        """What the user says first."""
        self.env = await self._in_thread(self.build)
        said, info = await self._in_thread(self.env.reset)
        if not said:
            raise EnvError("tau2's simulation ended before its first message; its log says why")
        self.policy = info["policy"]
        self.tools = [tool.openai_schema for tool in info["tools"]]
        return _without_role(said)[1]

    async def resume(self, messages: list[Message], calls: list[ToolCall]) -> None:
        """It cannot be continued."""
        raise ValueError("an episode of tau2 begins anew")

    async def step(self, action: ToolCall | str) -> Step:
        """Make a call, or say something to the user."""
        is_call, text = isinstance(action, ToolCall), action
        if isinstance(action, ToolCall):
            text = json.dumps({"name": action.name, "arguments": action.arguments})
        said, reward, is_done, _, info = await self._in_thread(lambda: self.env.step(text))
        if is_done:
            _check_end(json.loads(info["simulation_run"]))
        role, said = _without_role(said)
        return Step(role or ("tool" if is_call else "user"), said, bool(is_done), float(reward))

    async def close(self) -> None:
        """Let go of the environment; its threads end with their conversation."""
        self.env = None

    async def _in_thread(self, function: Callable[[], Any]) -> Any:
        threads, limit = ToolThreads(self.args).threads, self.config["step_timeout_s"]
        try:
            return await threads.run(function, timeout_s=limit)
        except CallTimeout as error:
            raise EnvError(f"tau2 took more than {limit:g} s") from error
        except (RuntimeError, ValueError, OSError) as error:
            raise EnvError(f"tau2: {type(error).__name__}: {error}") from error


def _check_end(run: dict[str, Any]) -> None:
    """Raise where not the model but tau2 or its user failed: tau2 itself calls that a reward of 0."""
    if not run:  # its thread failed
        raise EnvError("tau2's simulation ended without a result; its log says why")
    if run.get("termination_reason") == "user_error":
        raise EnvError("tau2's user wrote an empty or a mixed message")


def tau2_task_ids(domain: str, split: str) -> list[str]:
    """The ids of a domain's tasks, in order: a task's number is its place here."""
    loader = importlib.import_module("tau2.registry").registry.get_tasks_loader(domain)
    return [str(task.id) for task in loader(split)]


def _without_role(said: str) -> tuple[str, str]:
    """(role, text) of an observation of tau2, "user: hello"; the role is "" where it names none."""
    role, colon, text = said.partition(": ")
    return (role, text) if colon and role in ("user", "tool") else ("", said)
