"""mini-swe-agent, which speaks OpenAI's Chat Completions through litellm."""

from __future__ import annotations

from slime.agent.harness.base import BaseHarness, HarnessContext, prompt_argument, provide, run_agent
from slime.agent.sandbox import Sandbox


class MiniSweAgentHarness(BaseHarness):
    """Runs `mini`, a Python program: install it into a virtual environment whose `bin` is on the PATH."""

    name = "mini_swe_agent"
    command = "mini"
    env_prefix = "SLIME_AGENT_MINI"
    takes_tools = False

    async def install_cli(self, sb: Sandbox) -> None:
        """Give the sandbox `mini`."""
        await provide(sb, self.command, remedy="pip install mini-swe-agent in an environment of its own")

    async def write_config(self, sb: Sandbox, ctx: HarnessContext) -> None:
        """Write nothing: the environment and the command line say all."""

    async def launch_and_wait(self, sb: Sandbox, ctx: HarnessContext, prompt: str, time_budget_sec: float) -> int:
        """Start it with the task, without questions and without a price list."""
        env = {
            "OPENAI_API_KEY": ctx.session_id,
            "OPENAI_BASE_URL": f"{ctx.adapter_url}/v1",
            "OPENAI_API_BASE": f"{ctx.adapter_url}/v1",
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }
        options = f"--model openai/{ctx.model_label} --yolo --exit-immediately"
        return await run_agent(
            sb,
            workdir=ctx.workdir,
            start_cmd=f"mini --task {prompt_argument(prompt)} {options}{self.extra_args()}",
            env=self.with_extra_envs(env),
            time_budget_sec=time_budget_sec,
        )
