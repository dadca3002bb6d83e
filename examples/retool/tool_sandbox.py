"""The tool of retool: Python programs, each in a fresh sandbox of `slime.agent`, never in a process of the run.

    tool_function_path: tool_sandbox.code_interpreter        (in the file of --custom-config-path)

A program has no network, nothing of the run's environment and files, and limits of time, processor time, memory,
processes and output. `retool: {...}` in the same file overrides entries of `TOOL_CONFIGS`.

Wait graph: a call waits for one of `tool_concurrency` slots, then for its sandbox and program, `python_timeout` each.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from slime.agent.sandbox import SandboxError, SandboxTimeout, make_sandbox
from slime.rollout.multi_turn import EnvError, ToolError
from slime.utils.misc import merged_settings

logger = logging.getLogger(__name__)
TOOL_CONFIGS: dict[str, Any] = {
    "max_tool_calls": 16,  # of a sample
    "tool_concurrency": 32,  # sandboxes at a time
    "python_timeout": 120.0,  # seconds
    "python_memory_mb": 4096,
    "max_output_chars": 4000,
    "backend": "local",  # of make_sandbox
    "sandbox_options": {},  # of the backend, for example {"show": ["/opt/python3.12"]}
    "python": "python3",  # as it is called in the sandbox
}
SCHEMA = {
    "type": "function",
    "function": {
        "name": "code_interpreter",
        "description": "Runs a Python program and returns what it prints.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "the program"}},
            "required": ["code"],
        },
    },
}
_slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


def config_of(args: Any) -> dict[str, Any]:
    """`TOOL_CONFIGS` with what the run's `retool` says.

    Raises:
        UsageError: `retool` has an entry that there is not, or a wrong value.
    """
    return merged_settings("retool", vars(args).get("retool"), TOOL_CONFIGS)


class PythonSandbox:
    """Runs programs.

    Args:
        config: as `TOOL_CONFIGS`.
    """

    def __init__(self, config: Mapping[str, Any] = TOOL_CONFIGS) -> None:
        self.config = config

    async def execute_code(self, code: str) -> str:
        """What a program prints; or the end of its error.

        Raises:
            SandboxError: there could be no sandbox: no fault of the program.
        """
        config = self.config
        options = {"memory_mb": config["python_memory_mb"]} if config["backend"] in ("local", "docker") else {}
        slots = _slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(config["tool_concurrency"]))
        async with slots, make_sandbox(config["backend"], **options, **config["sandbox_options"]) as sandbox:
            await sandbox.write_file("/tmp/main.py", code)
            command = f"ulimit -t {int(config['python_timeout']) + 1}; cd /tmp && {config['python']} -I main.py"
            try:
                status, output, errors = await sandbox.exec(command, timeout=config["python_timeout"])
            except SandboxTimeout:
                return f"error: the program took more than {config['python_timeout']:g} s"
        said = output if status == 0 else f"{output}\nerror (exit code {status}): {errors[-1000:]}"
        return _shortened(said.strip(), config["max_output_chars"])


def _shortened(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]}\n... {len(text) - limit} characters cut ...\n{text[-(limit // 2) :]}"


async def code_interpreter(args: Any, sample: Any, name: str, arguments: dict[str, Any]) -> str:
    """The tool function: runs `arguments["code"]`; without a sandbox the sample ends, its reward untrusted."""
    code = arguments.get("code")
    if not isinstance(code, str) or not code.strip():
        raise ToolError('the argument "code" must be a program, as a text')
    try:
        result = await PythonSandbox(config_of(args)).execute_code(code)
    except SandboxError as error:
        raise EnvError(f"the program could not be run: {error}") from error
    return f"<interpreter>\n{result}\n</interpreter>"
