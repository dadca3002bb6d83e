"""Programs in Python and bash, each in a fresh sandbox of `slime.agent`."""

from __future__ import annotations

from slime.agent.sandbox import SandboxTimeout, make_sandbox

INTERPRETERS = {"python": "python3 -I", "bash": "bash"}
MAX_OUTPUT_CHARS = 4000


class SubprocessInterpreter:
    """Runs programs that see nothing of the run: no network, no files, no environment variables.

    Args:
        execution_timeout: seconds of a program.
        memory_mb: of all its processes.
    """

    def __init__(self, *, execution_timeout: float = 60.0, memory_mb: int = 1024) -> None:
        self.execution_timeout, self.memory_mb = execution_timeout, memory_mb

    async def run(self, code: str, code_type: str = "python") -> str:
        """Run a program; return what it printed, and its error if it failed. The middle of a long text is left out.

        Raises:
            ValueError: there is no interpreter for this type.
            SandboxError: there could be no sandbox: no fault of the program.
        """
        if code_type not in INTERPRETERS:
            raise ValueError(f"there is {', '.join(INTERPRETERS)}, not {code_type!r}")
        async with make_sandbox("local", memory_mb=self.memory_mb) as sandbox:
            await sandbox.write_file("/tmp/program", code)
            command = f"cd /tmp && {INTERPRETERS[code_type]} program"
            try:
                status, output, errors = await sandbox.exec(command, timeout=self.execution_timeout)
            except SandboxTimeout:
                return f"error: the program took more than {self.execution_timeout:g} s"
        said = (output if status == 0 else f"{output}\nerror (exit code {status}): {errors}").strip()
        half = MAX_OUTPUT_CHARS // 2
        return said if len(said) <= 2 * half else f"{said[:half]}\n...\n{said[-half:]}"
