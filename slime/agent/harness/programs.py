"""The agents that have a harness: Claude Code, Codex, OpenCode, mini-swe-agent, and a small one of ours.

Deviation from the contract: Codex gets `wire_api = "responses"`, for it has removed "chat" in February 2026, and a
current one does not start with it. The sandbox is ours, so its own is off: else it may not edit files.
"""

from __future__ import annotations

import base64
import json
import shlex
from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar

from slime.agent.harness.base import HOME, BaseHarness, HarnessContext, prompt_argument, provide, run_agent
from slime.agent.sandbox import Sandbox

# Questions of a first start, which nobody would answer.
_ANSWERED = json.dumps({"hasCompletedOnboarding": True, "bypassPermissionsModeAccepted": True})
_CLAUDE_TOOLS = f"{HOME}/.mcp.json"
_CLAUDE_OPTIONS = (
    "--permission-mode bypassPermissions --output-format stream-json --include-partial-messages --include-hook-events"
    " --verbose"
)


class ProgramHarness(BaseHarness):
    """A program that is found, or installed as an npm package, and started by one command line.

    Attributes:
        remedy: how the program gets onto a host.
        tarball_env: names an environment variable with the path of its npm package; "": it is no npm package.
    """

    remedy: ClassVar[str]
    tarball_env: ClassVar[str] = ""

    @abstractmethod
    def start(self, ctx: HarnessContext, prompt: str) -> tuple[str, dict[str, str]]:
        """Return the command line and the environment for a task, whose prompt is quoted already."""

    async def install_cli(self, sb: Sandbox) -> None:
        """Give the sandbox the program."""
        await provide(sb, self.command, tarball_env=self.tarball_env, remedy=self.remedy)

    async def launch_and_wait(self, sb: Sandbox, ctx: HarnessContext, prompt: str, time_budget_sec: float) -> int:
        """Start it with the task."""
        command, env = self.start(ctx, prompt_argument(prompt))
        return await run_agent(
            sb,
            workdir=ctx.workdir,
            start_cmd=command,
            env=self.with_extra_envs(env),
            time_budget_sec=time_budget_sec,
        )


class ClaudeCodeHarness(ProgramHarness):
    """Runs `claude -p` over Anthropic's Messages; SLIME_AGENT_CC_TARBALL is its npm package."""

    name = "claude_code"
    command = "claude"
    env_prefix = "SLIME_AGENT_CC"
    remedy = "npm install -g @anthropic-ai/claude-code"
    tarball_env = "SLIME_AGENT_CC_TARBALL"

    async def write_config(self, sb: Sandbox, ctx: HarnessContext) -> None:
        """Answer the questions of a first start."""
        text = shlex.quote(_ANSWERED)
        files = f"{HOME}/.claude.json {HOME}/.claude/settings.json"
        await sb.exec(f"mkdir -p {HOME}/.claude && echo {text} | tee {files} > /dev/null", user="agent", check=True)
        if ctx.offers_tools:
            server = {"type": "http", "url": ctx.mcp_url, "headers": {"Authorization": f"Bearer {ctx.session_id}"}}
            await sb.write_file(_CLAUDE_TOOLS, json.dumps({"mcpServers": {"slime": server}}), user="agent")

    def start(self, ctx: HarnessContext, prompt: str) -> tuple[str, dict[str, str]]:
        env = {
            "ANTHROPIC_BASE_URL": ctx.adapter_url,
            "ANTHROPIC_AUTH_TOKEN": ctx.session_id,
            "ANTHROPIC_MODEL": ctx.model_label,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_DISABLE_EXPERIMENTAL_BETAS": "1",
            # It would put a text that changes into the system prompt, so that no turn continued the one before.
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        }
        options = _CLAUDE_OPTIONS + (f" --mcp-config {_CLAUDE_TOOLS} --strict-mcp-config" if ctx.offers_tools else "")
        return f"claude -p {prompt} {options}{self.extra_args()}", env


_CODEX_CONFIG = """model = {model}
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
_CODEX_TOOLS = """
[mcp_servers.slime]
url = {url}
bearer_token_env_var = "OPENAI_API_KEY"
"""


class CodexHarness(ProgramHarness):
    """Runs `codex exec` over OpenAI's Responses; SLIME_AGENT_CODEX_TARBALL is its npm package."""

    name = "codex"
    command = "codex"
    env_prefix = "SLIME_AGENT_CODEX"
    remedy = "npm install -g @openai/codex"
    tarball_env = "SLIME_AGENT_CODEX_TARBALL"

    async def write_config(self, sb: Sandbox, ctx: HarnessContext) -> None:
        """Name our server as the model's provider."""
        # JSON's texts are TOML's.
        model, url = json.dumps(ctx.model_label), json.dumps(f"{ctx.adapter_url}/v1")
        config = _CODEX_CONFIG.format(model=model, url=url)
        config += _CODEX_TOOLS.format(url=json.dumps(ctx.mcp_url)) if ctx.offers_tools else ""
        text = base64.b64encode(config.encode()).decode()
        folder = f"{HOME}/.codex"
        write = f"mkdir -p {folder} && echo {text} | base64 -d > {folder}/config.toml"
        await sb.exec(write, user="agent", check=True)

    def start(self, ctx: HarnessContext, prompt: str) -> tuple[str, dict[str, str]]:
        env = {"OPENAI_API_KEY": ctx.session_id, "OPENAI_BASE_URL": f"{ctx.adapter_url}/v1"}
        return f"codex exec --skip-git-repo-check {prompt} --json{self.extra_args()}", env


class OpenCodeHarness(ProgramHarness):
    """Runs `opencode run` over OpenAI's Chat Completions; SLIME_AGENT_OPENCODE_TARBALL is its npm package."""

    name = "opencode"
    command = "opencode"
    env_prefix = "SLIME_AGENT_OPENCODE"
    remedy = "npm install -g opencode-ai"
    tarball_env = "SLIME_AGENT_OPENCODE_TARBALL"

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
        await sb.exec(f"mkdir -p {HOME}/.config/opencode", user="agent", check=True)
        await sb.write_file(f"{HOME}/.config/opencode/opencode.json", json.dumps(config), user="agent")

    def start(self, ctx: HarnessContext, prompt: str) -> tuple[str, dict[str, str]]:
        env = {
            "OPENAI_API_KEY": ctx.session_id,
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        }
        return f"opencode run {prompt} --format json{self.extra_args()}", env


class MiniSweAgentHarness(ProgramHarness):
    """Runs `mini`, a Python program that speaks OpenAI's Chat Completions through litellm.

    Install it into a virtual environment whose `bin` is on the PATH.
    """

    name = "mini_swe_agent"
    command = "mini"
    env_prefix = "SLIME_AGENT_MINI"
    remedy = "pip install mini-swe-agent in an environment of its own"
    takes_tools = False

    async def write_config(self, sb: Sandbox, ctx: HarnessContext) -> None:
        """Write nothing: the environment and the command line say all."""

    def start(self, ctx: HarnessContext, prompt: str) -> tuple[str, dict[str, str]]:
        env = {
            "OPENAI_API_KEY": ctx.session_id,
            "OPENAI_BASE_URL": f"{ctx.adapter_url}/v1",
            "OPENAI_API_BASE": f"{ctx.adapter_url}/v1",
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }
        options = f"--model openai/{ctx.model_label} --yolo --exit-immediately"
        return f"mini --task {prompt} {options}{self.extra_args()}", env


_PROGRAM = f"{HOME}/.scripted_agent.py"


class ScriptedHarness(ProgramHarness):
    """Runs `scripted_agent.py`, for tests and CPU examples: one Python file without packages, with a shell and a tool
    that writes a file. SLIME_AGENT_SCRIPTED_EXTRA_ARGS sets its options, as `--protocol anthropic --max-turns 5`.
    """

    name = "scripted"
    command = "python3"
    env_prefix = "SLIME_AGENT_SCRIPTED"
    remedy = "install Python 3.8 or later"

    async def write_config(self, sb: Sandbox, ctx: HarnessContext) -> None:
        """Write the program."""
        await sb.write_file(_PROGRAM, Path(__file__).with_name("scripted_agent.py"), user="agent")

    def start(self, ctx: HarnessContext, prompt: str) -> tuple[str, dict[str, str]]:
        options = f"--url {shlex.quote(ctx.adapter_url)} --model {shlex.quote(ctx.model_label)}"
        if ctx.offers_tools:
            options += f" --mcp {shlex.quote(ctx.mcp_url)}"
        return f"python3 {_PROGRAM} {options}{self.extra_args()} -- {prompt}", {"SLIME_API_KEY": ctx.session_id}
