"""Settings of `slime.agent.generate`: the key `agent` in the file of --custom-config-path, and two flags.

    agent:
      harness: scripted                        # a name, or a program of your own: my_agent:run
      sandbox: {backend: local, options: {memory_mb: 512}}
      budgets: {turns: 30, tokens: 8192, seconds: 600}
      grader: tests                            # command, or my_grader:grade; without one --rm-type scores

Everything is read before the run starts: a wrong key, name or value is a sentence of `check_args`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterator
from typing import Annotated, Any, Protocol

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from slime.agent.gateway import Budget
from slime.agent.harness import HARNESSES, make_harness
from slime.agent.sandbox import BACKENDS, SandboxError, make_sandbox
from slime.agent.sandbox.grading import GRADERS
from slime.config.args import Args
from slime.config.custom_config import FLAG
from slime.rollout.hooks.signatures import signature_problem
from slime.utils.errors import UsageError, refuse
from slime.utils.files.yaml_config import LocatedYaml, validate
from slime.utils.misc import try_to_load
from slime.utils.types import Sample

KEY = "agent"
AGENT_S = 1800.0


class AgentProgram(Protocol):
    """`harness: module:function`: an agent program that runs in this process; async or sync (in a thread).

    Called: once for each sample. `base_url` is what OpenAI clients take ("http://.../v1"; Anthropic clients take it
        without "/v1"), `api_key` the key of the session.
    Returns: the reward, or None where the grader or --rm-type gives it.
    """

    def __call__(self, base_url: str, api_key: str, sample: Sample) -> Awaitable[Any] | Any: ...


class AgentGrader(Protocol):
    """`grader: module:function`: score what an agent did; async or sync (in a thread).

    Called: once for each sample, when its agent and the agent's sandbox have ended. `diff` is the agent's patch; ""
        where it changed nothing, or ran without a sandbox.
    Returns: the reward.
    """

    def __call__(self, args: Args, sample: Sample, diff: str) -> Awaitable[Any] | Any: ...


Text = Annotated[str, Field(min_length=1)]
"""An empty one is a slip, such as a variable without a value in a template."""


class SandboxSettings(BaseModel):
    """`sandbox`: where the agent runs.

    Attributes:
        backend: one of `slime.agent.sandbox.BACKENDS`.
        options: of its class.
        gateway_url: of the gateway, as it is reached from the host of an http sandbox or from inside others.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    backend: Text = "local"
    options: dict[str, Any] = {}
    gateway_url: Text | None = None

    @property
    def opens_port(self) -> bool:
        """Whether the backend opens one port inside, which leads to the gateway."""
        return self.backend in ("local", "http")


class GraderSettings(BaseModel):
    """`grader`: how the agent's changes are scored; a text is short for its `kind`.

    Attributes:
        kind: "tests" runs the row's tests in a clean sandbox, "command" a command line; or "module:function".
        command: for "command"; None reads `eval_cmd` of the row's metadata.
        python: for "tests": a Python with pytest.
        seconds: that grading may take.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    kind: Text = ""
    command: Text | None = None
    python: Text = "python3"
    seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 600.0


class Settings(BaseModel):
    """All settings of a run.

    Attributes:
        harness: name of a harness, or a program's "module:function".
        budgets: what one execution may use; `seconds` are the agent's, without its sandbox's start and grading.
        at_a_time: agents that work together in this process; as many sandboxes are open.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    harness: Text = ""
    sandbox: SandboxSettings = SandboxSettings()
    budgets: Budget = Budget(seconds=AGENT_S)
    grader: Annotated[GraderSettings, BeforeValidator(lambda v: {"kind": v} if isinstance(v, str) else v)] = (
        GraderSettings()
    )
    at_a_time: Annotated[int, Field(ge=1)] = 64

    @property
    def is_program(self) -> bool:
        """Whether the agent is a function of this process, not a class of harness."""
        return ":" in self.harness and not isinstance(try_to_load(self.harness)[0], type)


def read_settings(args: Args) -> Settings:
    """Return the settings of a run.

    Args:
        args: `agent` of the custom config, `agent_harness`, `max_turns`, `sandbox_unsafe`.

    Raises:
        UsageError: with a sentence for each that is wrong.
    """
    settings = validate(Settings, LocatedYaml("", FLAG, {KEY: vars(args).get(KEY) or {}}), (KEY,))
    changes: dict[str, Any] = {"harness": args.agent_harness} if args.agent_harness else {}
    if args.sandbox_unsafe and settings.sandbox.backend == "local":
        options = {**settings.sandbox.options, "unsafe": True}
        changes["sandbox"] = settings.sandbox.model_copy(update={"options": options})
    limits = settings.budgets
    filled = {"turns": limits.turns or args.max_turns, "seconds": limits.seconds or AGENT_S}
    settings = settings.model_copy(update={**changes, "budgets": limits.model_copy(update=filled)})
    refuse([*_problems(settings)])
    return settings


def check_args(args: Args) -> Iterator[str]:
    """Yield a sentence for each setting that is wrong, before anything starts."""
    try:
        read_settings(args)
    except UsageError as error:
        yield from error.messages


def _problems(settings: Settings) -> Iterator[str]:
    """What is wrong with settings of the right types."""
    if not settings.harness:
        yield (
            "slime.agent.generate needs an agent: --agent-harness, or harness under the key agent in the file of "
            f"--custom-config-path: {', '.join(HARNESSES)}, or module:function of a program of your own."
        )
    elif settings.is_program:
        yield from _function_problem("harness", settings.harness, AgentProgram)
        if settings.grader.kind in GRADERS:
            yield (
                f"grader {settings.grader.kind} looks at the changes in a sandbox, and {settings.harness} runs "
                "without one; return the reward, or name a grader module:function."
            )
    elif (problem := _harness_problem(settings.harness, settings.sandbox.backend)) is not None:
        yield f"{problem}."
    kind = settings.grader.kind
    if ":" in kind:
        yield from _function_problem("grader", kind, AgentGrader)
    elif kind and kind not in GRADERS:
        yield f"there is no grader {kind}; there is {', '.join(GRADERS)}, or module:function."
    yield from _sandbox_problems(settings.sandbox) if not settings.is_program else ()


def _harness_problem(name: str, backend: str) -> str | None:
    try:
        harness = make_harness(name)
    except UsageError as error:
        return str(error)
    if backend == "local" and not harness.shown_paths():
        return f"harness {name} starts {harness.command}, which is not on this host's PATH: docs/agent_harness.md"
    return None


def _function_problem(name: str, path: str, protocol: type) -> Iterator[str]:
    function, problem = try_to_load(path)
    if problem:
        yield f"{name}{problem}."
    elif problem := signature_problem(function, protocol):
        yield f"{name} {path} does not fit: {problem}."


def _sandbox_problems(sandbox: SandboxSettings) -> Iterator[str]:
    backend = sandbox.backend
    if backend not in BACKENDS:
        yield f"there is no sandbox backend {backend}; there is {', '.join(BACKENDS)}."
        return
    try:  # makes nothing yet
        make_sandbox(backend, image="" if sandbox.opens_port else "an-image", **sandbox.options)
    except (TypeError, ValueError, SandboxError) as error:
        yield f"sandbox.options of a {backend} sandbox: {error}."
    if backend != "local" and not sandbox.gateway_url:
        yield (
            f"a {backend} sandbox is not on this host: give sandbox.gateway_url, the gateway's address as it is "
            "reached from there."
        )
