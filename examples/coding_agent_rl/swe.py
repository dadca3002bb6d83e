"""Rows of software engineering data sets: what they ask for, the agent's patch, and its evaluation.

A row's metadata has `instance_id`, `image`, `workdir`, `problem_statement`, `pre_commands` and `eval_cmd`, or the same
under `remote_env_info` with `image_url` and `f2p_script`. A patch is worth 1 where it applies in a fresh sandbox and
the command succeeds; where the row has FAIL_TO_PASS or PASS_TO_PASS, where the command's output says of each of these
tests that it has passed, as `pytest -rA` ("PASSED name") and unittest ("name ... ok") do.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from typing import Any

from slime.agent.sandbox import E2BSandbox, Sandbox, SandboxError
from slime.agent.sandbox.results import END_AGENT, OUTPUT_BYTES, SandboxTimeout
from slime.utils.types import Sample

PROTOCOL = "scaleswe"
STATEMENT = "PROBLEM_STATEMENT.md"
SWE_PROMPT = (
    f"Read {STATEMENT} and make the change that it asks for. Edit the sources, and leave the tests as they are. "
    "Run the tests. Do not commit. When you are done, say in one line what you have changed."
)
PATCH, LOG = "/tmp/change.patch", "/tmp/evaluation.log"  # of the sandbox
_PREPARE_S = 600
_TESTS = ("FAIL_TO_PASS", "PASS_TO_PASS", "fail_to_pass", "pass_to_pass")


@dataclass(frozen=True)
class EvalResult:
    """Result of an evaluation: the reward, 1.0 or 0.0, and whether the patch applied."""

    reward: float
    applied_cleanly: bool


def get_metadata(sample: Sample, protocol: str) -> dict[str, Any]:
    """The row's entries under one set of names; missing ones are empty.

    Args:
        protocol: "scaleswe"; rows of other kinds are not evaluated here.
    """
    row = sample.metadata
    remote = row.get("remote_env_info") or {}
    commands = row.get("pre_commands") or remote.get("pre_commands") or []
    return {
        "protocol": protocol,
        "instance_id": row.get("instance_id") or remote.get("instance_id") or f"{sample.group_index}-{sample.index}",
        "image": row.get("image") or remote.get("image_url") or remote.get("image") or "",
        "workdir": row.get("workdir") or remote.get("workdir") or "",
        "problem_statement": row.get("problem_statement") or str(sample.prompt),
        "pre_commands": [commands] if isinstance(commands, str) else list(commands),
        "eval_cmd": row.get("eval_cmd") or remote.get("f2p_script") or "",
        "expected": [name for key in _TESTS for name in _names(row.get(key) or remote.get(key))],
        "is_swepro": bool(row.get("swepro") or remote.get("swepro")),
    }


def _names(value: Any) -> list[str]:
    """The tests of a list; the published data sets have it as JSON text."""
    return [str(name) for name in (json.loads(value) if isinstance(value, str) else value or ())]


def evaluability_check(md: dict[str, Any]) -> str | None:
    """Why a row cannot be worked on; None where it can."""
    if not md["image"] or not md["workdir"]:
        return "missing_image_or_workdir"
    if md["protocol"] != PROTOCOL:
        return f"unevaluatable:protocol {md['protocol']}"
    if md["is_swepro"] and not md["eval_cmd"]:
        return "unevaluatable:swepro rows bring a run_script.sh and a parser.py, which are not run here; give eval_cmd"
    return None if md["eval_cmd"] else "unevaluatable:no eval_cmd or f2p_script"


async def prepare_workspace(sb: Sandbox, workdir: str, md: dict[str, Any]) -> None:
    """Run the row's commands, and write the problem statement."""
    for command in md["pre_commands"]:
        await sb.exec(f"cd {shlex.quote(workdir)} && {command}", timeout=_PREPARE_S, check=True)
    await sb.write_file(f"{workdir}/{STATEMENT}", md["problem_statement"])


async def git_diff(sb: Sandbox, workdir: str) -> str:
    """End what the agent has started, then return its changes as a patch.

    Raises:
        SandboxError: the patch is too long to be read whole.
    """
    await sb.exec(END_AGENT, check=True)
    show = f"git add -N . && git diff --no-ext-diff --binary HEAD -- . ':(exclude){STATEMENT}' ':(exclude).harness'"
    _, diff, _ = await sb.exec(f"cd {shlex.quote(workdir)} && {show}", check=True)
    if len(diff.encode()) >= OUTPUT_BYTES:
        raise SandboxError(f"the agent's patch has more than {OUTPUT_BYTES} bytes")
    return diff


async def run_evaluation(md: dict[str, Any], *, diff_text: str, timeout_sec: float) -> EvalResult:
    """Apply a patch in a fresh sandbox, and run the row's command there.

    Raises:
        SandboxError: the sandbox failed, which says nothing about the patch.
    """
    at = shlex.quote(md["workdir"])
    async with E2BSandbox(md["image"]) as sb:
        await prepare_workspace(sb, md["workdir"], md)
        if diff_text.strip():
            await sb.write_file(PATCH, diff_text)
            ways = (f"git apply --3way {PATCH}", f"git apply {PATCH}", f"patch -p1 < {PATCH}")
            code, _, _ = await sb.exec(f"cd {at} && ({' || '.join(ways)})")
            if code != 0:
                return EvalResult(0.0, applied_cleanly=False)
        command = f"cd {at} && {md['eval_cmd']}"
        if md["expected"]:
            command = f"( {command}\n) > {LOG} 2>&1"
        try:
            code, _, _ = await sb.exec(command, timeout=timeout_sec)
        except SandboxTimeout:
            return EvalResult(0.0, applied_cleanly=True)
        if md["expected"]:
            _, said, _ = await sb.exec(f"grep -aE '^PASSED |[.]{{3}} ok$' {LOG}")
            passed = {line.removeprefix("PASSED ").removesuffix(" ... ok") for line in said.splitlines()}
            return EvalResult(float(passed.issuperset(md["expected"])), applied_cleanly=True)
        return EvalResult(float(code == 0), applied_cleanly=True)
