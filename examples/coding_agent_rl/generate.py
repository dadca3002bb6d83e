"""Claude Code or Codex on rows of software engineering data sets, in sandboxes of the E2B service.

    --custom-generate-function-path examples.coding_agent_rl.generate.generate

`slime.agent.generate` does the work; this adds what such rows are called, and settings by environment variables. A
sample that cannot be trained is ABORTED, with `abort_reason` in its metadata, and its prompt is drawn again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

from examples.coding_agent_rl import swe
from slime.agent.gateway import Budget, Gateway
from slime.agent.harness import make_harness
from slime.agent.rollout import Execution, Outcome
from slime.agent.sandbox import E2BSandbox, GatewayAccess, SandboxError
from slime.agent.sandbox.grading import Task
from slime.agent.settings import SandboxSettings, Settings
from slime.utils.errors import UsageError
from slime.utils.misc import SingletonMeta, is_finite_number
from slime.utils.processing_utils import load_tokenizer
from slime.utils.types import Sample

logger = logging.getLogger(__name__)


def _setting(name: str, default: str) -> str:
    return os.environ.get(name) or default


_PROBLEMS: list[str] = []  # of variables; they are said when the settings are used, not when they are imported


def _number(name: str, default: float, *, least: float = 0) -> Any:
    """A number of the default's type."""
    text, kind = _setting(name, str(default)), type(default)
    with contextlib.suppress(ValueError):
        if is_finite_number(value := kind(text)) and value >= least:
            return value
    wanted = "a whole number" if kind is int else "a number"
    _PROBLEMS.append(f"{name}={text!r} in the environment: {wanted} from {least:g} is needed, such as {default}.")
    return default


@dataclass
class SweConfig:
    """Settings, by environment variables: SWE_TRAIN_PROTOCOL, ADAPTER_PUBLIC_HOST and so on (docs/coding_agent.md)."""

    eval_protocol: str = _setting("SWE_EVAL_PROTOCOL", "scaleswe")
    train_protocol: str = _setting("SWE_TRAIN_PROTOCOL", "scaleswe")
    adapter_public_host: str = _setting("ADAPTER_PUBLIC_HOST", "")
    adapter_bind_host: str = _setting("ADAPTER_BIND_HOST", "0.0.0.0")  # nosec B104: sandboxes are elsewhere
    adapter_port: int = _number("ADAPTER_PORT", 18001)
    fork_merge_threshold: int | None = _number("SLIME_FORK_MERGE_MAX_RESPONSE_TOKENS", 0) or None
    agent_time_budget_sec: float = _number("SWE_AGENT_TIME_BUDGET_SEC", 1800.0, least=1)
    eval_timeout_sec: float = _number("SWE_EVAL_TIMEOUT_SEC", 600.0)
    rollout_guard_sec: float = _number("SWE_ROLLOUT_GUARD_SEC", 0.0)
    boot_concurrency: int = _number("SWE_BOOT_CONCURRENCY", 16) or 1
    boot_retries: int = _number("SWE_BOOT_RETRIES", 2)

    def __post_init__(self) -> None:
        self.rollout_guard_sec = self.rollout_guard_sec or self.agent_time_budget_sec + self.eval_timeout_sec + 180


CONFIG = SweConfig()


class AdapterService(metaclass=SingletonMeta):
    """The process's gateway, on the address that the service's sandboxes reach, and the places to boot them."""

    def __init__(self, args: Any) -> None:
        if _PROBLEMS:
            raise UsageError(_PROBLEMS)
        if not CONFIG.adapter_public_host:
            raise UsageError("ADAPTER_PUBLIC_HOST is not set: the name of this host as the sandboxes reach it")
        self.gateway = Gateway(
            tokenizer=load_tokenizer(args.hf_checkpoint, trust_remote_code=vars(args).get("trust_remote_code", False)),
            sglang_url=f"http://{args.sglang_router_ip}:{args.sglang_router_port}",
            tool_parser=args.sglang_tool_call_parser,
            reasoning_parser=args.sglang_reasoning_parser,
            host=CONFIG.adapter_bind_host,
            port=CONFIG.adapter_port,
            fork_threshold_tokens=CONFIG.fork_merge_threshold,
        ).start()
        port = self.gateway.url.rpartition(":")[2]
        self.url = f"http://{CONFIG.adapter_public_host}:{port}"
        self.booting = asyncio.Semaphore(CONFIG.boot_concurrency)

    @contextlib.asynccontextmanager
    async def boot(self, image: str) -> AsyncIterator[Any]:
        """An open sandbox of the service; one that does not start is tried again."""
        async with contextlib.AsyncExitStack() as stack:
            async with self.booting:
                for left in range(CONFIG.boot_retries, -1, -1):
                    try:
                        sandbox = await stack.enter_async_context(E2BSandbox(image))
                        break
                    except SandboxError as error:
                        if not left:
                            raise
                        logger.warning("a sandbox of %s did not start, %d tries are left: %s", image, left, error)
            yield sandbox


class SweExecution(Execution):
    """An agent on one row."""

    def __init__(self, args: Any, sample: Sample, params: dict[str, Any], md: dict[str, Any], *, evaluation: bool):
        self.service, self.md = AdapterService(args), md
        settings = Settings(
            harness=_setting("SWE_AGENT", "claude_code"),
            sandbox=SandboxSettings(backend="e2b", gateway_url=self.service.url),
            budgets=Budget(seconds=CONFIG.agent_time_budget_sec),
        )
        super().__init__(args, sample, params, settings=settings, evaluation=evaluation)
        of_evaluation = vars(args).get("eval_max_context_len") if evaluation else None
        self.max_context_tokens = of_evaluation or args.rollout_max_context_len or 0

    async def gateway(self) -> Gateway:
        return self.service.gateway

    def is_aborted(self) -> bool:
        # Upstream's tests give six flags, from which no rollout can be made.
        return "rollout_batch_size" in vars(self.args) and super().is_aborted()

    def task(self) -> Task:
        prompt = _setting("SWE_CC_PROMPT", swe.SWE_PROMPT)
        return Task(prompt=prompt, image=self.md["image"], workdir=self.md["workdir"])

    def sandbox(self, task: Task, access: GatewayAccess | None) -> Any:
        return self.service.boot(task.image)

    async def prepare(self, sandbox: Any, task: Task) -> str:
        await swe.prepare_workspace(sandbox, task.workdir, self.md)
        return "HEAD"

    async def diff(self, sandbox: Any, task: Task, base: str) -> str:
        return await swe.git_diff(sandbox, task.workdir)

    async def grade(self, outcome: Outcome, diff: str) -> None:
        try:
            result = await swe.run_evaluation(self.md, diff_text=diff, timeout_sec=CONFIG.eval_timeout_sec)
        except SandboxError as error:
            outcome.end_reason, outcome.metadata["agent_error"] = "grader_error", str(error)[:500]
            return
        outcome.reward = result.reward
        outcome.metadata |= {"grading_solved": result.reward == 1.0, "applied_cleanly": result.applied_cleanly}


async def generate(
    args: Any, base_sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> list[Sample]:
    """Have an agent work on a row; returns the samples of its session, or one ABORTED sample."""
    md = swe.get_metadata(base_sample, CONFIG.eval_protocol if evaluation else CONFIG.train_protocol)
    if reason := swe.evaluability_check(md):
        return [_aborted(base_sample, reason)]
    execution = SweExecution(args, base_sample, sampling_params, md, evaluation=evaluation)
    try:
        found = await asyncio.wait_for(execution.run(), CONFIG.rollout_guard_sec)
    except TimeoutError:
        return [_aborted(base_sample, "wall_clock_timeout")]
    samples = found if isinstance(found, list) else [found]
    if samples[0].remove_sample:
        reason = samples[0].metadata.get("abort_reason") or "adapter_session_empty"
        return [_aborted(base_sample, reason, **samples[0].metadata)]
    return samples


def check_args(args: Any) -> Iterator[str]:
    """A sentence for each environment variable that cannot work; slime asks before a run starts."""
    yield from _PROBLEMS
    if not CONFIG.adapter_public_host:
        yield "ADAPTER_PUBLIC_HOST is not set: the name of this host as the sandboxes reach it."
    for name, protocol in (("TRAIN", CONFIG.train_protocol), ("EVAL", CONFIG.eval_protocol)):
        if protocol != swe.PROTOCOL:
            yield f"SWE_{name}_PROTOCOL={protocol}: rows of {swe.PROTOCOL} are evaluated here; all others are aborted."
    try:
        make_harness(_setting("SWE_AGENT", "claude_code"))
    except UsageError as error:
        yield f"SWE_AGENT: {error}."


generate.check_args = check_args  # type: ignore[attr-defined]


def _aborted(sample: Sample, reason: str, **metadata: Any) -> Sample:
    return Sample(
        group_index=sample.group_index,
        index=sample.index,
        prompt=sample.prompt,
        label=sample.label,
        tokens=[0, 0],
        response_length=1,
        loss_mask=[0],
        rollout_log_probs=[0.0],
        remove_sample=True,
        reward=0.0,
        reward_is_trusted=False,
        end_reason="env_error",
        status=Sample.Status.ABORTED,
        metadata={**sample.metadata, **metadata, "abort_reason": reason},
    )
