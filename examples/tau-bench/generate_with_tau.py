"""tau-bench: a model that serves customers with tools, while a user talks to it.

    --custom-generate-function-path generate_with_tau.generate --custom-config-path tau.yaml --max-turns 30

A row of the data names a task: its prompt is the task's number (tau1_mock.py writes such rows). The policy and the
user's first message become the prompt, the environment gives the reward. `tau: {...}` in the file of
--custom-config-path overrides entries of `TAU_CONFIGS`.

Wait graph: a turn waits for the router's /generate, then for the environment, `step_timeout_s` at most.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
from collections.abc import Iterator
from typing import Any

from tau_environments import SHOP, Episode, make_episode
from trainable_agents import InteractionResult, Status, agent_factory

from slime.rollout.multi_turn import EnvError
from slime.utils.errors import UsageError
from slime.utils.misc import merged_settings
from slime.utils.types import Sample

logger = logging.getLogger(__name__)
TAU_CONFIGS: dict[str, Any] = {
    "env": "retail",  # a domain of tau2, or "shop": the one of shop.py
    "task_split": "train",  # where a row does not say its own
    "agent_strategy": "tool-calling",
    "user_strategy": "llm",  # of the shop: "script" or "llm"; tau2's user is a language model
    "user_model": "gemini-2.5-flash-lite",
    "user_model_provider": "gemini",  # tau2 asks litellm for PROVIDER/MODEL; its key is where litellm looks for it
    "user_url": "http://127.0.0.1:8001/v1",  # of the shop's user: any OpenAI-compatible server
    "user_api_key": "",
    "max_user_tokens": 256,
    "step_timeout_s": 120.0,
    "max_observation_chars": 8000,
    "tool_parser": "qwen25",  # SGLang's name of the format of calls
}


def config_of(args: Any) -> dict[str, Any]:
    """`TAU_CONFIGS` with what the run's `tau` says.

    Raises:
        UsageError: `tau` has an entry that there is not, or a wrong value.
    """
    return merged_settings("tau", vars(args).get("tau"), TAU_CONFIGS)


def check_args(args: Any) -> Iterator[str]:
    """A sentence for each setting that cannot be; slime asks before a run starts."""
    try:
        config = config_of(args)
    except UsageError as error:
        yield from error.messages
        return
    where = "tau in --custom-config-path"
    if config["env"] != SHOP and importlib.util.find_spec("tau2") is None:
        yield (
            f"{where}: env {config['env']} is a domain of tau2, which is not installed "
            "(https://github.com/sierra-research/tau2-bench); env: shop needs nothing."
        )
    if config["user_strategy"] not in ("llm", "script") or (
        config["user_strategy"] == "script" and config["env"] != SHOP
    ):
        yield f"{where}: user_strategy {config['user_strategy']}: it is llm, or script with env: shop."
    if config["agent_strategy"] != "tool-calling":
        yield f"{where}: agent_strategy {config['agent_strategy']!r}: there is tool-calling."


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False) -> Sample:
    """Serve the user of one task.

    Args:
        args: `tau`, `max_turns`, and what the default generate function reads.
        sample: its prompt is the task's number. An aborted one is continued where the environment can be, else it
            begins anew.
        sampling_params: SGLang's; `max_new_tokens` is of a turn.
        evaluation: whose limit of the context holds; an evaluation is not aborted.

    Returns:
        The sample with the environment's reward; 0 where turns or tokens were used up, and an untrusted one where the
        environment failed (`end_reason` "env_error").
    """
    config, untouched = config_of(args), sample.snapshot()
    task = sample.metadata.get("task_index", sample.prompt)
    if not isinstance(task, str) or not task.isdigit():
        raise UsageError(f"the prompt must be the number of a task, not {str(task)[:80]!r}; tau1_mock.py writes them")
    split = sample.metadata.get("split", config["task_split"])
    env = make_episode(args, config | {"task_split": split}, int(task))
    try:
        if not sample.response_length:
            await _begin(sample, env, task)
        agent = agent_factory(args, sample, env, config)
        if sample.response_length:
            calls = await asyncio.to_thread(agent.calls_made)
            await env.resume([*agent.prompt[1:], *agent.messages], calls)
        result = await agent.asolve(sampling_params, evaluation)
    except EnvError as error:
        return _failed(args, sample, error)
    finally:
        await env.close()
    if result.status is Status.ABORTED and not env.is_resumable:
        untouched.status = Status.ABORTED
        return untouched
    return res_to_sample(result, int(task))


async def _begin(sample: Sample, env: Episode, task: str) -> None:
    """Make the prompt of policy and the user's first message."""
    said = await env.start()
    sample.prompt = [{"role": "system", "content": env.policy}, {"role": "user", "content": said}]
    sample.metadata = sample.metadata | {"task_index": task, "tools": env.tools}


def res_to_sample(res: InteractionResult, task_index: int) -> Sample:
    """The sample of a conversation, with its reward unless it was aborted."""
    sample = res.sample
    sample.metadata["task_index"] = str(task_index)
    if res.status is not Status.ABORTED:
        sample.reward = res.reward
    return sample


def _failed(args: Any, sample: Sample, error: EnvError) -> Sample:
    """A sample whose environment failed before the model said anything: it trains nothing."""
    logger.warning("sample %s: %s", sample.index, error)
    sample.tokens, sample.response_length, sample.rollout_log_probs, sample.loss_mask = [0, 0], 1, [0.0], [0]
    sample.status, sample.remove_sample = Status.COMPLETED, True
    sample.end_reason, sample.reward_is_trusted = "env_error", False
    sample.reward, sample.metadata = Sample.reward_of(args, 0.0), sample.metadata | {"tau_error": str(error)[:500]}
    return sample


generate.check_args = check_args  # type: ignore[attr-defined]
