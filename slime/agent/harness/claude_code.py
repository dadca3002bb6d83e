"""Claude Code, which speaks Anthropic's Messages."""

from __future__ import annotations

import json
import shlex

from slime.agent.harness.base import HOME, BaseHarness, HarnessContext, prompt_argument, provide, run_agent
from slime.agent.sandbox import Sandbox

# Questions of a first start, which nobody would answer.
_ANSWERED = json.dumps({"hasCompletedOnboarding": True, "bypassPermissionsModeAccepted": True})
_TOOLS = f"{HOME}/.mcp.json"
_OPTIONS = (
    "--permission-mode bypassPermissions --output-format stream-json --include-partial-messages --include-hook-events"
    " --verbose"
)


class ClaudeCodeHarness(BaseHarness):
    """Runs `claude -p`; SLIME_AGENT_CC_TARBALL is its npm package."""

    name = "claude_code"
    command = "claude"
    env_prefix = "SLIME_AGENT_CC"

    async def install_cli(self, sb: Sandbox) -> None:
        """Give the sandbox `claude`."""
        remedy = "npm install -g @anthropic-ai/claude-code"
        await provide(sb, self.command, tarball_env="SLIME_AGENT_CC_TARBALL", remedy=remedy)

    async def write_config(self, sb: Sandbox, ctx: HarnessContext) -> None:
        """Answer the questions of a first start."""
        text = shlex.quote(_ANSWERED)
        files = f"{HOME}/.claude.json {HOME}/.claude/settings.json"
        await sb.exec(f"mkdir -p {HOME}/.claude && echo {text} | tee {files} > /dev/null", user="agent", check=True)
        if ctx.offers_tools:
            server = {"type": "http", "url": ctx.mcp_url, "headers": {"Authorization": f"Bearer {ctx.session_id}"}}
            await sb.write_file(_TOOLS, json.dumps({"mcpServers": {"slime": server}}), user="agent")

    async def launch_and_wait(self, sb: Sandbox, ctx: HarnessContext, prompt: str, time_budget_sec: float) -> int:
        """Start it with the task."""
        env = {
            "ANTHROPIC_BASE_URL": ctx.adapter_url,
            "ANTHROPIC_AUTH_TOKEN": ctx.session_id,
            "ANTHROPIC_MODEL": ctx.model_label,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS": "1",
            # It would put a text that changes into the system prompt, so that no turn continued the one before.
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        }
        options = _OPTIONS + (f" --mcp-config {_TOOLS} --strict-mcp-config" if ctx.offers_tools else "")
        return await run_agent(
            sb,
            workdir=ctx.workdir,
            start_cmd=f"claude -p {prompt_argument(prompt)} {options}{self.extra_args()}",
            env=self.with_extra_envs(env),
            time_budget_sec=time_budget_sec,
        )
