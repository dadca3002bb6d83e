"""An agent of the Strands SDK that solves problems with Python, trained on the tokens that the engine wrote.

    --custom-generate-function-path examples.strands_sglang.generate_with_strands.generate
    --custom-rm-path examples.strands_sglang.generate_with_strands.reward_func

The agent talks to the gateway of `slime.agent` as to OpenAI; the gateway keeps the tokens, sees aborts, and bounds
turns and seconds. It needs `pip install 'strands-agents[openai]'`, which no other part of slime needs.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from examples.strands_sglang.subprocess_interpreter import SubprocessInterpreter
from slime.agent.gateway import Budget
from slime.agent.rollout import Execution
from slime.agent.sandbox import SandboxError
from slime.agent.settings import Settings
from slime.rollout.rm_hub import compute_score_dapo
from slime.utils.types import Sample

logger = logging.getLogger(__name__)
MAX_TOOL_ITERS = 5
SYSTEM_PROMPT = (
    "You solve mathematical problems. Use the tool execute_python_code for every computation; print what you want to "
    "see. End with your final answer in \\boxed{}."
)
SETTINGS = Settings(
    harness="examples.strands_sglang.generate_with_strands:solve",
    budgets=Budget(turns=MAX_TOOL_ITERS + 1, seconds=900.0),
    at_a_time=256,
)


async def execute_python_code(code: str) -> str:
    """Run a Python program and return what it prints.

    Args:
        code: The program.
    """
    return await SubprocessInterpreter().run(code)


def conversation_of(sample: Sample) -> tuple[str, list[dict[str, Any]]]:
    """Return the system prompt and all other messages of a sample's prompt, as Strands has them.

    System messages of the prompt follow `SYSTEM_PROMPT`.
    """
    prompt = sample.prompt
    given = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    system = [SYSTEM_PROMPT, *(message["content"] for message in given if message["role"] == "system")]
    others = [message for message in given if message["role"] != "system"]
    return "\n\n".join(system), [{"role": m["role"], "content": [{"text": m["content"]}]} for m in others]


async def solve(base_url: str, api_key: str, sample: Sample) -> None:
    """Let an agent of Strands work on a sample's problem; the reward is --custom-rm-path's.

    Raises:
        SandboxError: a program could not be run. Strands would tell the model so, as if the program were wrong.
    """
    from strands import Agent, tool
    from strands.models.openai import OpenAIModel
    from strands.types.exceptions import MaxTokensReachedException

    failures: list[SandboxError] = []

    async def guarded(code: str) -> str:
        try:
            return await execute_python_code(code)
        except SandboxError as error:
            failures.append(error)
            raise

    model = OpenAIModel(
        client_args={"base_url": base_url, "api_key": api_key, "max_retries": 0}, model_id="slime-actor"
    )
    named = tool(name="execute_python_code", description=(execute_python_code.__doc__ or "").split("\n")[0])(guarded)
    system, messages = conversation_of(sample)
    agent = Agent(model=model, tools=[named], system_prompt=system, callback_handler=None, retry_strategy=None)
    try:
        # an answer that was cut off by its length is the agent's last: the session's samples say so
        with suppress(MaxTokensReachedException):
            await agent.invoke_async(messages)
    finally:
        if failures:
            raise failures[0]


async def generate(
    args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Sample | list[Sample]:
    """Complete one sample by the agent; arguments and limits as `slime.agent.generate`.

    Returns:
        The sample, or the list of them where the conversation branched. Without a sandbox its `end_reason` is
        "env_error" and its reward not trusted.
    """
    limits = dataclasses.replace(SETTINGS.budgets, turns=args.max_turns or MAX_TOOL_ITERS + 1)
    settings = dataclasses.replace(SETTINGS, budgets=limits)
    execution = Execution(args, sample, sampling_params, settings=settings, evaluation=evaluation)
    limit = args.eval_max_context_len if evaluation else args.rollout_max_context_len
    execution.max_context_tokens = limit or 0
    try:
        return await execution.run()
    except SandboxError as error:
        logger.warning("sample %s: its program could not be run: %s", sample.index, error)
        sample.tokens, sample.response_length, sample.rollout_log_probs, sample.loss_mask = [0, 0], 1, [0.0], [0]
        sample.status, sample.remove_sample = Sample.Status.COMPLETED, True
        sample.end_reason, sample.reward_is_trusted = "env_error", False
        sample.reward = Sample.reward_of(args, 0.0)
        return sample


def check_args(args: Any) -> Iterator[str]:
    """A sentence where Strands is not installed; slime asks before a run starts."""
    if importlib.util.find_spec("strands") is None:
        yield "examples.strands_sglang needs Strands: pip install 'strands-agents[openai]'."


generate.check_args = check_args  # type: ignore[attr-defined]


async def reward_func(args: Any, sample: Sample, **kwargs: Any) -> float:
    r"""1 for the right answer, else -1 to -0.6 by the number of turns with tools, and -1.1 without one.

    The answer is read after "Answer:", or else from the last \boxed{}.
    """
    result = compute_score_dapo(sample.response, sample.label, strict_box_verify=False)
    if result["pred"] == "[INVALID]":
        result = compute_score_dapo(sample.response, sample.label, strict_box_verify=True)
    score = float(result["score"])
    tool_turns = max(sample.metadata.get("agent", {}).get("turns", 1) - 1, 0)
    return score if score >= 0 else min(-0.6, score + (tool_turns - 2) / 2 * 0.1)
