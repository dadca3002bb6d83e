"""Codex, which speaks OpenAI's Responses.

Deviation from the contract: `wire_api = "responses"`, for Codex has removed "chat" in February 2026, and a current
one does not start with it. The sandbox is ours, so Codex's own is off: else it may not edit files.
"""

from __future__ import annotations

import base64
import json

from slime.agent.harness.base import HOME, BaseHarness, HarnessContext, prompt_argument, provide, run_agent
from slime.agent.sandbox import Sandbox

_CONFIG = """model = {model}
model_provider = "slime"
approval_policy = "never"
sandbox_mode = "danger-full-access"
check_for_update_on_startup = false

[model_providers.slime]
name = "slime"
base_url = {url}
env_key = "OPENAI_API_KEY"
wire_api = "responses"
"""
_TOOLS = """
[mcp_servers.slime]
url = {url}
bearer_token_env_var = "OPENAI_API_KEY"
"""


class CodexHarness(BaseHarness):
    """Runs `codex exec`; SLIME_AGENT_CODEX_TARBALL is its npm package."""

    name = "codex"
    command = "codex"
    env_prefix = "SLIME_AGENT_CODEX"

    async def install_cli(self, sb: Sandbox) -> None:
        """Give the sandbox `codex`."""
        remedy = "npm install -g @openai/codex"
        await provide(sb, self.command, tarball_env="SLIME_AGENT_CODEX_TARBALL", remedy=remedy)

    async def write_config(self, sb: Sandbox, ctx: HarnessContext) -> None:
        """Name our server as the model's provider."""
        # JSON's texts are TOML's.
        model, url = json.dumps(ctx.model_label), json.dumps(f"{ctx.adapter_url}/v1")
        config = _CONFIG.format(model=model, url=url)
        config += _TOOLS.format(url=json.dumps(ctx.mcp_url)) if ctx.offers_tools else ""
        text = base64.b64encode(config.encode()).decode()
        folder = f"{HOME}/.codex"
        write = f"mkdir -p {folder} && echo {text} | base64 -d > {folder}/config.toml"
        await sb.exec(write, user="agent", check=True)

    async def launch_and_wait(self, sb: Sandbox, ctx: HarnessContext, prompt: str, time_budget_sec: float) -> int:
        """Start it with the task."""
        env = {"OPENAI_API_KEY": ctx.session_id, "OPENAI_BASE_URL": f"{ctx.adapter_url}/v1"}
        return await run_agent(
            sb,
            workdir=ctx.workdir,
            start_cmd=f"codex exec --skip-git-repo-check {prompt_argument(prompt)} --json{self.extra_args()}",
            env=self.with_extra_envs(env),
            time_budget_sec=time_budget_sec,
        )
