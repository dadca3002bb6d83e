"""A small agent of ours, for tests and CPU examples: one Python file without packages, run in the sandbox.

It offers a shell and a tool that writes a file. SLIME_AGENT_SCRIPTED_EXTRA_ARGS sets its options, such as
`--protocol anthropic --max-turns 5`; `scripted_agent.py` is the program.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from slime.agent.harness.base import HOME, BaseHarness, HarnessContext, prompt_argument, provide, run_agent
from slime.agent.sandbox import Sandbox

_PROGRAM = f"{HOME}/.scripted_agent.py"


class ScriptedHarness(BaseHarness):
    """Runs `scripted_agent.py` with the sandbox's `python3`."""

    name = "scripted"
    command = "python3"
    env_prefix = "SLIME_AGENT_SCRIPTED"

    async def install_cli(self, sb: Sandbox) -> None:
        """See that there is a Python."""
        await provide(sb, self.command, remedy="install Python 3.8 or later")

    async def write_config(self, sb: Sandbox, ctx: HarnessContext) -> None:
        """Write the program."""
        await sb.write_file(_PROGRAM, Path(__file__).with_name("scripted_agent.py"), user="agent")

    async def launch_and_wait(self, sb: Sandbox, ctx: HarnessContext, prompt: str, time_budget_sec: float) -> int:
        """Start it with the task as its last argument."""
        options = f"--url {shlex.quote(ctx.adapter_url)} --model {shlex.quote(ctx.model_label)}"
        if ctx.offers_tools:
            options += f" --mcp {shlex.quote(ctx.mcp_url)}"
        return await run_agent(
            sb,
            workdir=ctx.workdir,
            start_cmd=f"python3 {_PROGRAM} {options}{self.extra_args()} -- {prompt_argument(prompt)}",
            env=self.with_extra_envs({"SLIME_API_KEY": ctx.session_id}),
            time_budget_sec=time_budget_sec,
        )
