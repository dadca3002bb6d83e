"""An agent and its grader as a generate function: --custom-generate-function-path slime.agent.generate.

One execution: a session of the gateway, a sandbox in which the agent of a row works, its changes as a patch, a clean
sandbox in which they are graded, and the session's samples. Or, for a program of the user's, the session and the
function's reward. `slime.agent.settings` says what is set; docs/agents.md is the page.

Every way in which an execution ends is in `Sample.end_reason`. A sandbox, a grader or a gateway that failed says
nothing about the policy: `Sample.reward_is_trusted` is false then.

Wait graph: an execution waits for one of `at_a_time` places, twice where it is graded in a sandbox, and holds none
while it waits for the other; then for the agent (`budgets.seconds`) and the grader (`grader.seconds`). All inside the
semaphore of generate_and_rm. A rollout that ends meanwhile ends the agent within `_LOOK_S`.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from slime.agent.gateway import Budget, Gateway, shared_gateway
from slime.agent.harness import BaseHarness, make_harness
from slime.agent.mcp_endpoint import McpEndpoint
from slime.agent.sandbox import EXIT_TIME_BUDGET_EXCEEDED, GatewayAccess, make_sandbox
from slime.agent.sandbox.grading import Grade, Task, grade_command, grade_tests, prepare, take_diff
from slime.agent.sandbox.results import SandboxError
from slime.agent.settings import AGENT_S, Settings, read_settings
from slime.config.args import Args
from slime.processes.wait import DaemonThreads
from slime.rollout.hooks.signatures import is_async
from slime.rollout.sampling.generation import GenerateState
from slime.utils.async_utils import cancel_all
from slime.utils.misc import SingletonMeta, load_function
from slime.utils.types import Sample

logger = logging.getLogger(__name__)
Status = Sample.Status
Reward = float | dict[str, Any] | None
_LOOK_S = 0.2
_UNTRUSTED = ("env_error", "grader_error", "transport", "aborted")
_CUT_OFF = ("max_turns", "length", "budget")
_HARNESS_FILES = (".harness/**",)
_NOT_KEPT = ("files", "tests")  # of a row's metadata, for its samples: the row has them


class Places(metaclass=SingletonMeta):
    """How many agents and graders work at a time in this process, and the threads of plain functions."""

    def __init__(self, limit: int) -> None:
        self.semaphore = asyncio.Semaphore(limit)
        self.threads = DaemonThreads("agent", limit, kills_processes=True)


@dataclass
class Outcome:
    """How an execution ended.

    Attributes:
        end_reason: one of `slime.utils.types.END_REASONS`.
        reward: None where --rm-type or --custom-rm-path is to give it.
        metadata: for its samples.
    """

    end_reason: str = "done"
    reward: Reward = None
    metadata: dict[str, Any] = field(default_factory=dict)


async def generate(
    args: Args, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample | list[Sample]:
    """Complete one sample by an agent's execution.

    Args:
        args: reads `agent` of the custom config, `agent_harness`, `sandbox_unsafe` and the limits of the context.
        sample: its metadata is a `slime.agent.sandbox.grading.Task`; one that was aborted begins anew.
        sampling_params: of every turn, whatever the agent asks for.
        evaluation: it is not aborted.

    Returns:
        The sample of the session, or the list of them where the agent's conversation branched; the sample itself, as
        it came, where the rollout ended first.

    Raises:
        ValueError: the row's metadata is no task.
    """
    limit = args.eval_max_context_len if evaluation else args.rollout_max_context_len
    execution = Execution(args, sample, sampling_params, settings=read_settings(args), evaluation=evaluation)
    execution.max_context_tokens, execution.has_reward_key = limit or 0, args.reward_key is not None
    return await execution.run()


class Execution:
    """One execution of an agent for one sample. Methods without an underscore may be replaced by a subclass.

    Args:
        settings: what the agent is, and where it runs.
        evaluation: it is not aborted.

    Attributes:
        max_context_tokens: of prompt and answer of a turn together; 0 is no limit.
        has_reward_key: the reward is a dict with what --reward-key and --eval-reward-key name.
    """

    def __init__(
        self,
        args: Args,
        sample: Sample,
        sampling_params: dict[str, Any],
        *,
        settings: Settings,
        evaluation: bool = False,
    ) -> None:
        self.args, self.sample, self.settings, self.evaluation = args, sample, settings, evaluation
        self.sampling = {name: value for name, value in sampling_params.items() if value is not None}
        self.places = Places(settings.at_a_time)
        self.seconds = settings.budgets.seconds or AGENT_S
        self.max_context_tokens, self.key = 0, ""
        self.has_reward_key = self.offers_tools = False

    @functools.cached_property
    def harness(self) -> BaseHarness:
        """The harness, where the agent is one."""
        return make_harness(self.settings.harness)

    async def gateway(self) -> Gateway:
        """Return the server that the agent asks."""
        return await shared_gateway(self.args)

    def is_aborted(self) -> bool:
        """Return whether the rollout has ended meanwhile."""
        return GenerateState(self.args).aborted and not self.evaluation

    def task(self) -> Task:
        """Return what the sample asks for."""
        return Task.of(self.sample)

    async def run(self) -> Sample | list[Sample]:
        """Run it, and make its samples."""
        budgets, gateway = self.settings.budgets, await self.gateway()
        await self._offer_tools(gateway)
        self.key = gateway.open_session(
            sampling=self.sampling,
            max_context_tokens=self.max_context_tokens,
            budget=Budget(turns=budgets.turns, tokens=budgets.tokens),
            evaluation=self.evaluation,
        )
        try:
            outcome = await self._until_aborted(self._work(gateway))
            if outcome is None or outcome.end_reason == "aborted":
                self.sample.status, self.sample.end_reason = Status.ABORTED, "aborted"
                return self.sample
            return await self._samples(gateway, outcome)
        finally:
            await gateway.drop_session(self.key)

    async def _offer_tools(self, gateway: Gateway) -> None:
        """Connect the MCP servers of the run for its agents, at the first execution."""
        if gateway.mcp is None:
            gateway.mcp = await McpEndpoint.of(self.args)
            if gateway.mcp and not self.settings.is_program and not self.harness.takes_tools:
                logger.warning("mcp of --custom-config-path has no effect: %s uses no tools of MCP", self.harness.name)
        self.offers_tools = gateway.mcp is not None

    async def _until_aborted(self, work: Any) -> Outcome | None:
        """The outcome; None where the rollout ended first. Then agent and sandbox have ended, too."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                await asyncio.wait([task], timeout=_LOOK_S)
                if not task.done() and self.is_aborted():
                    return None
            outcome: Outcome = await task
            return outcome
        finally:
            if not task.done():
                await cancel_all([task])

    async def _work(self, gateway: Gateway) -> Outcome:
        """Run the agent, and grade it."""
        run = self._run_program if self.settings.is_program else self._run_harness
        outcome, diff = await run(gateway)
        ended = gateway.end_reason(self.key)
        if ended and outcome.end_reason not in _UNTRUSTED:
            outcome.end_reason = ended
        if outcome.end_reason not in _UNTRUSTED and outcome.reward is None:
            await self.grade(outcome, diff)
        return outcome

    async def _run_program(self, gateway: Gateway) -> tuple[Outcome, str]:
        """Call the user's program; an error of its own is raised, but not one that the end of its session caused."""
        begin, seconds = time.monotonic(), self.seconds
        program = load_function(self.settings.harness)
        async with self.places.semaphore:
            reward, error = await self._attempt(program, f"{gateway.url}/v1", self.key, self.sample, seconds=seconds)
        if error is None:
            return Outcome(reward=reward), ""
        is_over = isinstance(error, TimeoutError) and time.monotonic() - begin >= seconds
        if not is_over and gateway.end_reason(self.key) is None:
            raise error
        return Outcome("budget", metadata={"agent_error": f"{type(error).__name__}: {error}"[:500]}), ""

    async def _run_harness(self, gateway: Gateway) -> tuple[Outcome, str]:
        """Run a harness in a sandbox; returns how it ended, and the agent's changes."""
        task = self.task()
        if self.settings.grader.kind == "tests" and not task.expected:
            raise ValueError("grader: tests needs metadata['expected'], the names of the tests that must pass")
        outcome = Outcome()
        try:
            diff = await self._run_in_sandbox(gateway, task, outcome)
        except SandboxError as error:
            logger.warning("sample %s: the agent's sandbox failed: %s", self.sample.index, error)
            outcome.end_reason = "env_error"
            outcome.metadata["agent_error"] = str(error)[:500]
            return outcome, ""
        if outcome.metadata["agent_exit_code"] == EXIT_TIME_BUDGET_EXCEEDED:
            outcome.end_reason = "budget"
        return outcome, diff

    async def _run_in_sandbox(self, gateway: Gateway, task: Task, outcome: Outcome) -> str:
        where = self.settings.sandbox
        access = GatewayAccess(where.gateway_url or gateway.url, self.key)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.places.semaphore)
            sandbox: Any = await stack.enter_async_context(self.sandbox(task, access))
            await self.harness.install_cli(sandbox)
            base = await self.prepare(sandbox, task)
            outcome.metadata["agent_exit_code"] = await self.harness.run(
                sandbox,
                workdir=task.workdir,
                session_id=self.key,
                adapter_url=access.inside_url if where.opens_port else access.url,
                time_budget_sec=self.seconds,
                prompt=task.prompt,
                **({"offers_tools": True} if self.offers_tools else {}),
            )
            try:
                return await self.diff(sandbox, task, base)
            except SandboxError as error:
                await sandbox.exec("true", check=True)  # raises where it was the sandbox that failed
                outcome.reward = self._number(0.0)
                outcome.metadata["agent_grade"] = f"the agent left no repository: {error}"[:500]
                return ""

    def sandbox(self, task: Task, access: GatewayAccess | None) -> Any:
        """Make a sandbox that is not open yet: the agent's, or without access to the gateway the grader's."""
        where = self.settings.sandbox
        options = dict(where.options)
        if where.backend != "e2b":
            options["workdir"] = task.workdir
        if where.opens_port and access is not None:
            options["gateway"] = access
        if where.backend == "local" and access is not None:
            options["show"] = [*options.get("show", ()), *self.harness.shown_paths()]
        return make_sandbox(where.backend, image="" if where.opens_port else task.image, **options)

    async def prepare(self, sandbox: Any, task: Task) -> str:
        """Make the work directory; returns the commit that the agent begins with."""
        return await prepare(sandbox, task)

    async def diff(self, sandbox: Any, task: Task, base: str) -> str:
        """End the agent, and return its changes."""
        return await take_diff(sandbox, task.workdir, base=base, exclude=_HARNESS_FILES)

    async def grade(self, outcome: Outcome, diff: str) -> None:
        """Add the reward, unless --rm-type is to give it; a grader that fails makes the outcome untrusted."""
        kind, seconds = self.settings.grader.kind, self.settings.grader.seconds
        if not kind:
            return
        if ":" not in kind:
            try:
                grade = await self._grade_in_sandbox(diff)
                outcome.reward, outcome.metadata["agent_grade"] = self._number(float(grade.solved)), grade.reason
                return
            except SandboxError as failure:
                error: BaseException | None = failure
        else:
            async with self.places.semaphore:
                given = self.args, self.sample, diff
                outcome.reward, error = await self._attempt(load_function(kind), *given, seconds=seconds)
        if error is not None:
            logger.warning("sample %s: the grader failed: %s: %s", self.sample.index, type(error).__name__, error)
            outcome.end_reason = "grader_error"
            outcome.metadata["agent_error"] = f"{type(error).__name__}: {error}"[:500]

    async def _grade_in_sandbox(self, diff: str) -> Grade:
        task, grader = self.task(), self.settings.grader
        if grader.kind == "tests" and not diff:
            return Grade(False, "nothing was changed")  # a test that passes all the same says nothing of the agent
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.places.semaphore)
            sandbox: Any = await stack.enter_async_context(self.sandbox(task, None))
            await self.prepare(sandbox, task)
            if grader.kind == "command":
                command = grader.command or task.eval_cmd
                if not command:
                    raise ValueError("grader: command needs grader.command, or metadata['eval_cmd'] of the row")
                return await grade_command(sandbox, task.workdir, diff=diff, command=command, timeout=grader.seconds)
            return await grade_tests(
                sandbox,
                task.workdir,
                diff=diff,
                originals=task.tests,
                expected=task.expected,
                python=grader.python,
                env={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
                timeout=grader.seconds,
            )

    async def _attempt(self, function: Any, *given: Any, seconds: float) -> tuple[Any, BaseException | None]:
        """What a function of the user's returned, or its error."""
        plain = functools.partial(self.places.threads.run, function)
        task = asyncio.ensure_future((function if is_async(function) else plain)(*given))
        try:
            await asyncio.wait([task], timeout=seconds)
        finally:
            if not task.done():
                await cancel_all([task])
        if not task.done() or task.cancelled():
            return None, TimeoutError(f"it was cancelled after at most {seconds:g} s")
        error = task.exception()
        return (None, error) if error else (task.result(), None)

    def _number(self, value: float) -> Reward:
        return Sample.reward_of(self.args, value) if self.has_reward_key else value

    async def _samples(self, gateway: Gateway, outcome: Outcome) -> Sample | list[Sample]:
        """The session's samples, with how they ended; one that trains nothing where the agent made no call."""
        sample, reason = self.sample, outcome.end_reason
        left_out = () if vars(self.args).get("partial_rollout") else _NOT_KEPT  # it may begin anew
        kept = {name: value for name, value in sample.metadata.items() if name not in left_out}
        samples = await gateway.finish_session(
            self.key, base_sample=sample, reward=outcome.reward, extra_metadata=kept | outcome.metadata
        )
        if not samples:
            reason = reason if reason in (*_UNTRUSTED, "length") else "env_error"
            error = "no turn of the agent's can be trained: it made none, or tool_choice forced each"
            samples = [_without_turns(sample, kept | {"agent_error": error} | outcome.metadata)]
        for one in samples:
            if reason != "done" or one.end_reason is None:  # else the gateway's: how the last turn ended
                one.end_reason, one.status = reason, Status.TRUNCATED if reason in _CUT_OFF else Status.COMPLETED
            one.reward_is_trusted = one.end_reason not in _UNTRUSTED
            one.custom_rm_path, one.train_metadata = sample.custom_rm_path, sample.train_metadata
            if not one.reward_is_trusted:
                one.reward = self._number(0.0)
        return samples[0] if len(samples) == 1 else samples


def _without_turns(sample: Sample, metadata: dict[str, Any]) -> Sample:
    """A sample that counts and trains nothing."""
    return Sample(
        group_index=sample.group_index,
        index=sample.index,
        rollout_id=sample.rollout_id,
        prompt=sample.prompt,
        label=sample.label,
        tokens=[0, 0],
        response_length=1,
        loss_mask=[0],
        rollout_log_probs=[0.0],
        remove_sample=True,
        metadata=metadata,
    )
