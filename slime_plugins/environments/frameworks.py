"""The frameworks that server.py serves, each as an environment with the same few verbs.

Runs in the framework's virtual environment: nothing of slime's is imported, and a framework only where it is used.

An environment has `num_tasks` (None: no end), `drives_model`, `prompt(task)` -> {messages, tools}, and either
`start(task)` -> an episode, or `play(task, run's endpoint)` -> a Future of {reward, metrics, error}. An episode has
`messages`, `tools`, `step(text, calls)` -> {messages, done} and `finish()` -> {reward, metrics}; `close()`, where it
has that, is called last, also when it failed or was forgotten. A class of your own that has these is served by
`--framework python --environment module:Class`.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import importlib.metadata
import itertools
import json
import os
import re
import secrets
import sys
import threading
import typing
from concurrent.futures import Future
from typing import Any

Message = dict[str, Any]
# framework, and distribution -> versions that this file was written for and tested with
VERSIONS = {"reasoning_gym": "0.1.", "openenv": "0.10.", "verifiers": "0.4."}


def installed_version(framework: str) -> str:
    """The framework's version in this virtual environment; "" for classes of one's own.

    Raises:
        ValueError: the framework is unknown, is not installed, or has another version.
    """
    if framework not in FRAMEWORKS:
        raise ValueError(f"there is no framework {framework}; there is {', '.join(FRAMEWORKS)}")
    if framework not in VERSIONS:
        return ""
    try:
        version = importlib.metadata.version(framework)
    except importlib.metadata.PackageNotFoundError:
        text = f"{sys.executable} has no {framework}; tools/prepare_environment.py makes a virtual environment with it"
        raise ValueError(text) from None
    if not version.startswith(VERSIONS[framework]):
        raise ValueError(f"{sys.executable} has {framework} {version}, and {VERSIONS[framework]}* is needed")
    return version


def load_class(path: str) -> Any:
    """The class that `module:Class` names.

    Raises:
        ValueError: the text has no colon, or the module no such class.
        ImportError: there is no such module.
    """
    module, _, name = path.partition(":")
    if not name:
        raise ValueError(f"{path!r} names no class; write module:Class")
    if (found := getattr(importlib.import_module(module), name, None)) is None:
        raise ValueError(f"the module {module} has no {name}")
    return found


def after_thought(text: str) -> str:
    """What the model says, without what it thinks."""
    return text.rpartition("</think>")[2].strip()


class ReasoningGym:
    """A data set of reasoning_gym: a question, and one answer in <answer> tags, which the data set scores.

    Args:
        name: as `reasoning_gym.create_dataset` takes it.
        arguments: of the data set (`size`, `seed`, ...); `datasets` of a "composite" as objects with name, weight and
            config. `system_prompt` is one of reasoning_gym's, or a text.
    """

    drives_model = False

    def __init__(self, name: str, arguments: dict[str, Any]) -> None:
        import reasoning_gym
        from reasoning_gym.utils import SYSTEM_PROMPTS, extract_answer

        self.extract = extract_answer
        system = arguments.pop("system_prompt", "default")
        self.system = SYSTEM_PROMPTS.get(system, system)
        if name == "composite":
            from reasoning_gym.composite import DatasetSpec

            arguments["datasets"] = [DatasetSpec(**one) for one in arguments.get("datasets", [])]
        self.data = reasoning_gym.create_dataset(name, **{"size": 1000, "seed": 0, **arguments})
        self.num_tasks = len(self.data)

    def prompt(self, task: int) -> dict[str, Any]:
        system = {"role": "system", "content": self.system}
        return {"messages": [system, {"role": "user", "content": self.data[task]["question"]}], "tools": None}

    def start(self, task: int) -> _Answer:
        return _Answer(self, task)


class _Answer:
    """An episode of one turn."""

    def __init__(self, environment: ReasoningGym, task: int) -> None:
        self.environment, self.entry = environment, environment.data[task]
        self.messages, self.tools = environment.prompt(task)["messages"], None
        self.reward, self.is_answered = 0.0, False

    def step(self, text: str, calls: list[Any]) -> dict[str, Any]:
        answer = self.environment.extract(after_thought(text))
        self.is_answered = answer is not None
        self.reward = float(self.environment.data.score_answer(answer, self.entry)) if answer is not None else 0.0
        return {"messages": [], "done": True}

    def finish(self) -> dict[str, Any]:
        return {"reward": self.reward, "metrics": {"answered": float(self.is_answered)}}


class OpenEnv:
    """An environment class of OpenEnv, run in this process: an instance per episode, without a server or docker.

    The model acts by text where the action has one required field that is a text; else by a tool: those of an
    MCPEnvironment, or one named `act` with the action's fields.

    Args:
        name: "module:Class".
        arguments: of the class. Beside them `action` ("module:Class", where `step` does not name its type), `prompt`
            (a system message), `num_tasks` (seeds 0 to N - 1; 1000), `split` (its tasks, where it has some), and
            `reward`: "sum" of the steps' rewards, or "last".
    """

    drives_model = False

    def __init__(self, name: str, arguments: dict[str, Any]) -> None:
        self.make = load_class(name)
        self.system, self.split = arguments.pop("prompt", None), arguments.pop("split", None)
        self.kind = arguments.pop("reward", "sum")
        if self.kind not in ("sum", "last"):
            raise ValueError(f"reward is {self.kind!r}; it must be sum or last")
        action, self.num_tasks = arguments.pop("action", None), int(arguments.pop("num_tasks", 1000))
        self.arguments = arguments
        trial = self.make(**arguments)
        if self.split is not None:
            self.num_tasks = int(trial.num_tasks(self.split))
        if not getattr(trial, "SUPPORTS_CONCURRENT_SESSIONS", False):
            self.max_episodes = 1
        self.is_mcp = hasattr(trial, "mcp_server")
        self.action: Any = None if self.is_mcp else self._action(action)
        self.field = None if self.is_mcp else self._text_field()
        self.tools = self._tools(trial)
        trial.close()

    def _action(self, named: str | None) -> Any:
        found = load_class(named) if named else typing.get_type_hints(self.make.step).get("action")
        if not hasattr(found, "model_json_schema"):
            raise ValueError(f"{self.make.__name__}.step does not name its Action; give `action`: module:Class")
        return found

    def _text_field(self) -> str | None:
        schema = self.action.model_json_schema()
        required = schema.get("required", [])
        is_text = len(required) == 1 and schema["properties"][required[0]].get("type") == "string"
        return str(required[0]) if is_text else None

    def _tools(self, trial: Any) -> list[dict[str, Any]] | None:
        if self.field is not None:
            return None
        if self.is_mcp:
            from openenv.core.env_server.mcp_types import ListToolsAction

            listed = trial.step(ListToolsAction()).tools
            return [_schema(tool.name, tool.description, tool.input_schema) for tool in listed]
        fields = self.action.model_json_schema()
        fields["properties"] = {name: field for name, field in fields["properties"].items() if name != "metadata"}
        return [_schema("act", (self.action.__doc__ or "Act.").strip(), fields)]

    def prompt(self, task: int) -> dict[str, Any]:
        episode = self.start(task)
        episode.close()
        return {"messages": episode.messages, "tools": self.tools}

    def start(self, task: int) -> OpenEnvEpisode:
        return OpenEnvEpisode(self, task)


class OpenEnvEpisode:
    def __init__(self, owner: OpenEnv, task: int) -> None:
        self.owner, self.tools = owner, owner.tools
        self.environment = owner.make(**owner.arguments)
        reset = {"seed": task} if owner.split is None else {"split": owner.split, "index": task}
        self._is_closed = False
        try:
            first = self.environment.reset(**reset)
        except BaseException:
            self.close()
            raise
        system = [{"role": "system", "content": owner.system}] if owner.system else []
        self.messages = [*system, {"role": "user", "content": _shown(first)}]
        self.rewards: list[float] = []
        self.is_done = bool(first.done)

    def step(self, text: str, calls: list[Any]) -> dict[str, Any]:
        """Act; a turn of a model with tools that calls none ends the episode."""
        if self.owner.field is not None:
            observation = self._act(self.owner.action(**{self.owner.field: after_thought(text)}))
            return {"messages": [{"role": "user", "content": _shown(observation)}], "done": self.is_done}
        answers = []
        for call in calls:
            answers.append({"role": "tool", "name": call["name"], "content": self._answer(call)})
            if self.is_done:
                break
        return {"messages": answers, "done": self.is_done or not calls}

    def _answer(self, call: dict[str, Any]) -> str:
        if call.get("problem"):
            return f"error: {call['problem']}"
        known = [tool["function"]["name"] for tool in self.tools or []]
        if call["name"] not in known:
            return f"error: no tool {call['name']}; there is {', '.join(known)}"
        try:
            action = self._action(call)
        except ValueError as error:  # pydantic's: the model's arguments are wrong
            parts = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in getattr(error, "errors", list)()]
            return f"error: {'; '.join(parts) or error}"
        return _shown(self._act(action))

    def _action(self, call: dict[str, Any]) -> Any:
        if not self.owner.is_mcp:
            return self.owner.action(**call["arguments"])
        from openenv.core.env_server.mcp_types import CallToolAction

        return CallToolAction(tool_name=call["name"], arguments=call["arguments"])

    def _act(self, action: Any) -> Any:
        observation = self.environment.step(action)
        if observation.reward is not None:
            self.rewards.append(float(observation.reward))
        self.is_done = bool(observation.done)
        return observation

    def close(self) -> None:
        """Close the environment, once."""
        if not self._is_closed:
            self._is_closed = True
            self.environment.close()

    def finish(self) -> dict[str, Any]:
        self.close()
        reward = sum(self.rewards) if self.owner.kind == "sum" else (self.rewards or [0.0])[-1]
        return {"reward": reward, "metrics": {"steps": float(len(self.rewards)), "done": float(self.is_done)}}


def _schema(name: str, description: str, parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _shown(observation: Any) -> str:
    """An observation as the model reads it: its only text, or JSON."""
    if (error := getattr(observation, "error", None)) is not None:
        return f"error: {getattr(error, 'message', error)}"
    result = getattr(observation, "result", None)
    if (content := getattr(result, "content", None)) is not None:
        return "\n".join(str(getattr(part, "text", part)) for part in content)
    fields = observation.model_dump(exclude={"done", "reward", "metadata", "tool_name", "error"}, exclude_none=True)
    only = next(iter(fields.values())) if len(fields) == 1 else fields
    return only if isinstance(only, str) else json.dumps(only, ensure_ascii=False, default=str)


class Verifiers:
    """A taskset of verifiers, and the environment that plays it; it asks the model itself.

    Args:
        name: of a taskset: an installed package, or a module on the path.
        arguments: verifiers' own `env` block: `taskset`, `agent`, `timeout`, ... Without more the model talks in the
            `null` harness (a chat with the taskset's tools), in processes of this host.
    """

    drives_model = True

    def __init__(self, name: str, arguments: dict[str, Any]) -> None:
        import verifiers.v1 as vf
        from verifiers.v1.runtimes import subprocess as local

        _run_programs_with_this_python(local.SubprocessRuntime)
        kind = vf.env_config_type(name, arguments.get("id", ""))
        if "agent" not in kind.model_fields:
            raise ValueError(f"{name} has several agents; environments with one agent are served")
        agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}, **arguments.get("agent", {})}
        block = {**arguments, "taskset": {"id": name, **arguments.get("taskset", {})}, "agent": agent}
        self.vf = vf
        self.environment = vf.load_environment(vf.resolve_env_config(block))
        taskset = self.environment.taskset
        self.num_tasks = sum(1 for _ in taskset) if taskset.bounded else None
        self._tasks, self._lock = iter(taskset), threading.Lock()
        self._read: list[Any] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    def task(self, number: int) -> Any:
        """A task by its place in the taskset."""
        with self._lock:
            self._read += itertools.islice(self._tasks, max(number + 1 - len(self._read), 0))
            return self._read[number]

    def prompt(self, task: int) -> dict[str, Any]:
        data = self.task(task).data
        system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
        if isinstance(data.prompt, str):
            return {"messages": [*system, {"role": "user", "content": data.prompt}], "tools": None}
        messages = [message.model_dump(mode="json", exclude_none=True) for message in data.prompt or []]
        return {"messages": [*system, *messages], "tools": None}

    def play(self, task: int, **endpoint: Any) -> Future[dict[str, Any]]:
        """Begin a whole episode, with the model behind an OpenAI endpoint: base_url, api_key, model, sampling."""
        with self._lock:
            if self._loop is None:
                self._loop = self._serve()
        return asyncio.run_coroutine_threadsafe(self._play(self.task(task), **endpoint), self._loop)

    def _serve(self) -> asyncio.AbstractEventLoop:
        """The loop of a thread in which the environment's own servers (tools, interception) run."""
        loop, ready = asyncio.new_event_loop(), Future[None]()

        async def serve() -> None:
            try:
                async with self.environment.serving():
                    ready.set_result(None)
                    await asyncio.Event().wait()
            except BaseException as error:
                if ready.done():
                    raise
                ready.set_exception(error)

        threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True).start()
        ready.result(timeout=300)
        return loop

    async def _play(
        self, task: Any, *, base_url: str, api_key: str, model: str, sampling: dict[str, Any]
    ) -> dict[str, Any]:
        vf = self.vf
        variable = f"SLIME_API_KEY_{secrets.token_hex(8)}"  # verifiers takes keys from variables, and passes none on
        os.environ[variable] = api_key
        try:
            client = vf.EvalClientConfig(base_url=base_url, api_key_var=variable)
            context = vf.ModelContext(client=client, model=model, sampling=vf.SamplingConfig(**sampling))
            (slot,) = self.environment.slots(task)
            episode = await self.environment.run_slot(slot, context)
        finally:
            del os.environ[variable]
        return self._result(episode, episode.traces)

    def _result(self, episode: Any, traces: list[Any]) -> dict[str, Any]:
        error = episode.last_error or next((trace.last_error for trace in traces if trace.last_error), None)
        if error is None and len(traces) != 1:
            raise ValueError(f"the episode has {len(traces)} traces; environments that make one are served")
        if error is not None or not episode.ok:
            text = f"{error.type}: {error.message}" if error else "the episode is not ok"
            return {"reward": 0.0, "metrics": {}, "error": text[-2000:]}
        rewards = {name: reward.value for name, reward in traces[0].rewards.items()}
        metrics = {**traces[0].metrics, **rewards, "turns": float(traces[0].num_turns)}
        return {"reward": float(traces[0].reward), "metrics": metrics, "error": None}


def _run_programs_with_this_python(runtime: Any) -> None:
    """verifiers makes an environment of its programs with uv, from the network. Run those whose packages are all in
    this virtual environment with its Python instead; `null` and `bash` are such programs."""
    prepare = runtime.prepare_uv_script

    async def prepare_here(
        self: Any, script: str | bytes, env: dict[str, str] | None = None, *, activate: bool = True
    ) -> list[str]:
        text = script.decode() if isinstance(script, bytes) else script
        if not _has_all(text):
            made: list[str] = await prepare(self, script, env, activate=activate)
            return made
        path = f"{self.scripts_dir}/{hashlib.sha256(text.encode()).hexdigest()}.py"
        if not os.path.exists(path):
            partial = f"{path}.{secrets.token_hex(8)}"
            await self.write(partial, text.encode())
            os.replace(partial, path)
        return [sys.executable, path]

    runtime.prepare_uv_script = prepare_here


def _has_all(script: str) -> bool:
    from packaging.requirements import Requirement

    declared = re.search(r"^# dependencies = (\[.*?\])$", script, re.MULTILINE)
    if declared is None:
        return False
    for wanted in map(Requirement, json.loads(declared[1])):
        try:
            installed = importlib.metadata.version(wanted.name)
        except importlib.metadata.PackageNotFoundError:
            return False
        if not wanted.specifier.contains(installed, prereleases=True):
            return False
    return True


FRAMEWORKS: dict[str, Any] = {
    "reasoning_gym": ReasoningGym,
    "openenv": OpenEnv,
    "verifiers": Verifiers,
    "python": lambda name, arguments: load_class(name)(**arguments),
}
