"""OpenCode, which speaks OpenAI's Chat Completions."""

from __future__ import annotations

import json
import shlex
from typing import Any

from slime.agent.harness.base import HOME, BaseHarness, HarnessContext, prompt_argument, provide, run_agent
from slime.agent.sandbox import Sandbox


class OpenCodeHarness(BaseHarness):
    """Runs `opencode run`; SLIME_AGENT_OPENCODE_TARBALL is its npm package."""

    name = "opencode"
    command = "opencode"
    env_prefix = "SLIME_AGENT_OPENCODE"

    async def install_cli(self, sb: Sandbox) -> None:
        """Give the sandbox `opencode`."""
        remedy = "npm install -g opencode-ai"
        await provide(sb, self.command, tarball_env="SLIME_AGENT_OPENCODE_TARBALL", remedy=remedy)

    async def write_config(self, sb: Sandbox, ctx: HarnessContext) -> None:
        """Name our server as the only provider, allow every tool, and leave titles out: they are a request more."""
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "name": "slime",
            "options": {"baseURL": f"{ctx.adapter_url}/v1", "apiKey": "{env:OPENAI_API_KEY}"},
            "models": {ctx.model_label: {"name": ctx.model_label, "tool_call": True}},
        }
        config: dict[str, Any] = {
            "model": f"slime/{ctx.model_label}",
            "small_model": f"slime/{ctx.model_label}",
            "enabled_providers": ["slime"],
            "provider": {"slime": provider},
            "permission": {"edit": "allow", "bash": "allow", "webfetch": "deny", "external_directory": "allow"},
            "agent": {"title": {"disable": True}},
            "autoupdate": False,
            "share": "disabled",
        }
        if ctx.offers_tools:
            headers = {"Authorization": "Bearer {env:OPENAI_API_KEY}"}
            config["mcp"] = {"slime": {"type": "remote", "url": ctx.mcp_url, "headers": headers, "enabled": True}}
        folder = f"{HOME}/.config/opencode"
        text = shlex.quote(json.dumps(config))
        await sb.exec(f"mkdir -p {folder} && echo {text} > {folder}/opencode.json", user="agent", check=True)

    async def launch_and_wait(self, sb: Sandbox, ctx: HarnessContext, prompt: str, time_budget_sec: float) -> int:
        """Start it with the task."""
        env = {
            "OPENAI_API_KEY": ctx.session_id,
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        }
        return await run_agent(
            sb,
            workdir=ctx.workdir,
            start_cmd=f"opencode run {prompt_argument(prompt)} --format json{self.extra_args()}",
            env=self.with_extra_envs(env),
            time_budget_sec=time_budget_sec,
        )
