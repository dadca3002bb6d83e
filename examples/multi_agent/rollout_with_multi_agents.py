"""--custom-generate-function-path examples.multi_agent.rollout_with_multi_agents.generate_with_multi_agents

`multi_agent: {...}` in the file of --custom-config-path overrides entries of `MULTI_AGENT_CONFIGS`.
"""

from __future__ import annotations

from typing import Any

from examples.multi_agent.agent_system import Aborted
from slime.utils.misc import load_function
from slime.utils.types import Sample

MULTI_AGENT_CONFIGS: dict[str, Any] = {
    "custom_multi_agent_function_path": "examples.multi_agent.agent_system.run_agent_system",
    "num_parallel": 5,  # solvers, and rewriters
    "incorrect_reward_weight": 0.8,
    "correct_reward_weight": 1.2,
    "templates": {},  # solver, rewriter, selector: other prompts than those of prompts.py
}


def config_of(args: Any) -> dict[str, Any]:
    """`MULTI_AGENT_CONFIGS` with what the run's `multi_agent` says.

    Raises:
        ValueError: `multi_agent` has an entry that there is not.
    """
    given = vars(args).get("multi_agent") or {}
    if unknown := given.keys() - MULTI_AGENT_CONFIGS.keys():
        known = list(MULTI_AGENT_CONFIGS)
        raise ValueError(f"multi_agent in --custom-config-path: {sorted(unknown)} unknown; there is {known}")
    return {**MULTI_AGENT_CONFIGS, **given}


async def generate_with_multi_agents(
    args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
) -> list[Sample]:
    """One execution as a fan-out: a sample per call of an agent, which share a rollout_id; the selector is the last.

    An evaluation's score is that of the last sample, so of the solution that the selector chose. An execution that was
    aborted begins anew.

    Returns:
        The samples, with rewards; or the untouched sample where the rollout ended.
    """
    config = config_of(args)
    run = load_function(config["custom_multi_agent_function_path"])
    try:
        return list(await run(args, sample, sampling_params, config=config, evaluation=evaluation))
    except Aborted:
        sample.status = Sample.Status.ABORTED
        return [sample]
