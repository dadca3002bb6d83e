"""--custom-generate-function-path examples.multi_agent.rollout_with_multi_agents.generate_with_multi_agents

`multi_agent: {...}` in the file of --custom-config-path overrides entries of `MULTI_AGENT_CONFIGS`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from examples.multi_agent.agent_system import Aborted
from slime.utils.errors import UsageError
from slime.utils.misc import load_function, merged_settings, try_to_load
from slime.utils.types import Sample

ROLES = ("solver", "rewriter", "selector")
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
        UsageError: `multi_agent` has an entry that there is not, or a wrong value.
    """
    return merged_settings("multi_agent", vars(args).get("multi_agent"), MULTI_AGENT_CONFIGS)


def check_args(args: Any) -> Iterator[str]:
    """A sentence for each setting that cannot be; slime asks before a run starts."""
    try:
        config = config_of(args)
    except UsageError as error:
        yield from error.messages
        return
    if problem := try_to_load(config["custom_multi_agent_function_path"])[1]:
        yield f"multi_agent in --custom-config-path: custom_multi_agent_function_path{problem}."
    for role, template in config["templates"].items():
        if role not in ROLES:
            yield f"multi_agent in --custom-config-path: templates: there is no {role!r}; there is {', '.join(ROLES)}."
        try:
            str(template).format(problem="", solutions="", count=0)
        except (KeyError, IndexError, ValueError) as error:
            yield (
                f"multi_agent in --custom-config-path: the template of {role} has braces around something else than "
                f"problem, solutions or count ({error!r}); write {{{{ and }}}} for braces."
            )


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


generate_with_multi_agents.check_args = check_args  # type: ignore[attr-defined]
