"""No wait in slime is without a deadline: the calls that can block for ever are found in the source, by their shape.

A call passes when it names a deadline itself. What is left is in `ALLOWED`, each with the reason why it cannot hang.
Not looked at: `with lock:` (locks of one process, held for a few statements), collectives (each has the timeout of
its process group, which must be given where the group is made), and local work handed to threads (`pool.map`).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCES = [*sorted((ROOT / "slime").rglob("*.py")), *sorted((ROOT / "slime_plugins").rglob("*.py"))]

NEED_TIMEOUT = {
    "ray.get", "ray.wait",
    "subprocess.run", "subprocess.call", "subprocess.check_call", "subprocess.check_output", "communicate",
    "create_connection", "urlopen", "HTTPConnection", "HTTPSConnection", "ClientSession",
    "httpx.get", "httpx.post", "httpx.stream", "httpx.Client", "httpx.AsyncClient",
    "requests.get", "requests.post", "requests.put", "requests.delete", "requests.request",
    "init_process_group", "new_group", "TCPStore", "monitored_barrier",
    "asyncio.wait", "cf.wait", "futures.wait", "as_completed",
}  # fmt: skip
"""Calls that take a keyword with "timeout" in its name, and must be given it."""
BLOCK_WHEN_EMPTY = {"result", "join", "wait", "get", "acquire", "recv", "accept"}
"""Methods that block for ever when they are called without any argument."""
NEVER = {
    "dist.barrier": "slime.utils.distributed_utils.barrier(what, deadline_s)",
    "distributed.barrier": "slime.utils.distributed_utils.barrier(what, deadline_s)",
}
"""Calls that take no deadline at all -> what does."""

FINISHED = "of a task that has finished"
BOUNDED = "the driver waits for it with a deadline, and its watchdog notices that no sample finishes"
ALLOWED: dict[tuple[str, str, str], str] = {
    ("slime/backends/megatron_utils/update_weight/engine_group.py", "_Steps.wait", "mine.result"): FINISHED,
    ("slime/backends/megatron_utils/update_weight/engines.py", "_results", "call.result"): FINISHED,
    (
        "slime/backends/megatron_utils/update_weight/from_distributed.py",
        "CollectiveTransport.post.finish",
        "sending.wait",
    ): "a collective: it has the timeout of its group",
    ("slime/backends/sglang_utils/external.py", "discover_external_engines", "answer.result"): FINISHED,
    (
        "slime/backends/sglang_utils/local_checkpoint.py",
        "LocalCheckpoint._apply",
        "task.result",
    ): "reads and writes files",
    ("slime/rollout/collector.py", "Collector.take", "task.result"): FINISHED,
    ("slime/rollout/fully_async_rollout.py", "AsyncRolloutWorker._on_done", "task.result"): FINISHED,
    ("slime/rollout/sglang_rollout.py", "_result_of", "task.result"): FINISHED,
    ("slime/rollout/sglang_rollout.py", "generate_rollout_async", "state.finished.get"): BOUNDED,
    ("slime/rollout/sample_hooks.py", "apply_rollout_sample_hooks", "_rollout_id.get"): "a context variable",
    ("slime/utils/arguments/parse.py", "build_parser", "tables.result"): "of capture_elsewhere, which has a deadline",
    ("slime/utils/async_utils.py", "AsyncLoop.run", "future.result"): "of a coroutine, whose waits have deadlines",
    ("slime/utils/conversion/hf_output.py", "write_hf", "earlier.result"): "brings files to the disk",
    ("slime/utils/conversion/hf_output.py", "write_hf", "one.result"): "brings files to the disk",
    ("slime/utils/conversion/progress.py", "run_in_threads", "cf.wait"): "a tool's own work, with a progress bar",
    ("slime/utils/conversion/progress.py", "run_in_threads", "one.result"): FINISHED,
    ("slime/utils/external_utils/command_utils.py", "_finish", "process.wait"): "a command that a person started",
    ("slime/utils/misc.py", "exec_command", "subprocess.run"): "a command that a person started, of any length",
    ("slime/utils/plan/render.py", "render", "captured.get"): "rich's text",
    ("slime/utils/processes.py", "_Spawner.call", "result.result"): "of a thread that calls Popen and nothing else",
    ("slime/utils/processes.py", "_Spawner._run", "self._jobs.get"): "that thread: nobody waits for it",
    ("slime_plugins/rollout_buffer/generators/base_generator.py", "BaseGenerator._run", "self._stopped.wait"): BOUNDED,
    ("slime_plugins/rollout_buffer/generators/base_generator.py", "BaseGenerator._run", "asyncio.wait"): BOUNDED,
    ("slime_plugins/rollout_buffer/generators/base_generator.py", "BaseGenerator._run", "work.result"): FINISHED,
}


def name_of(node: ast.expr) -> str:
    """The dotted name of what is called, as far as it is one: `self.x.get` is "self.x.get"."""
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}".lstrip(".")
    return node.id if isinstance(node, ast.Name) else ""


def is_one_of(name: str, known: set[str] | dict[str, str]) -> bool:
    return any(name == one or name.endswith(f".{one}") for one in known)


def problem_of(call: ast.Call) -> str | None:
    """Why a call can block for ever; None if it cannot."""
    name, last = name_of(call.func), name_of(call.func).rpartition(".")[2]
    keywords = {keyword.arg for keyword in call.keywords}
    if is_one_of(name, NEVER):
        return f"takes no deadline; use {next(v for k, v in NEVER.items() if is_one_of(name, {k}))}"
    has_timeout = None in keywords or any("timeout" in (keyword or "") for keyword in keywords)
    if is_one_of(name, NEED_TIMEOUT) and not has_timeout:
        return "is given no timeout"
    is_method = isinstance(call.func, ast.Attribute)
    if is_method and last in BLOCK_WHEN_EMPTY and not call.args and not keywords:
        return "is called without a deadline"
    if last == "flock" and not any(
        isinstance(n, ast.Attribute) and n.attr in ("LOCK_NB", "LOCK_UN") for n in ast.walk(call)
    ):
        return "waits for another process: use slime.utils.wait.lock_file(what, deadline_s)"
    return None


def waits(tree: ast.AST) -> Iterator[tuple[str, ast.Call, str]]:
    """(function, call, problem) of every call that can block for ever."""

    def visit(node: ast.AST, where: str) -> Iterator[tuple[str, ast.Call, str]]:
        for child in ast.iter_child_nodes(node):
            inner = where
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                inner = f"{where}.{child.name}".lstrip(".")
            if isinstance(child, ast.Call):
                if is_one_of(name_of(child.func), {"asyncio.wait_for", "wait_for"}):
                    continue  # what is inside has its deadline
                if problem := problem_of(child):
                    yield where, child, problem
            yield from visit(child, inner)

    return visit(tree, "")


def found_in(path: Path) -> list[tuple[str, str, str, str]]:
    """(file, function, call, problem) of every wait without a deadline in a file."""
    tree = ast.parse(path.read_text())
    file = path.relative_to(ROOT).as_posix()
    return [
        (file, where, name_of(call.func), f"line {call.lineno}: {ast.unparse(call)[:90]} {problem}")
        for where, call, problem in waits(tree)
    ]


def test_every_wait_of_slime_has_a_deadline() -> None:
    found = [entry for path in SOURCES for entry in found_in(path)]
    problems = [
        f"{file} in {where}, {text}" for file, where, name, text in found if (file, where, name) not in ALLOWED
    ]
    assert not problems, "\n".join(["waits without a deadline:", *problems])
    unused = set(ALLOWED) - {(file, where, name) for file, where, name, _ in found}
    assert not unused, f"allowed, but not there any more: {sorted(unused)}"


@pytest.mark.parametrize(
    "line",
    [
        "ray.get(ref)",
        "ray.wait([ref], num_returns=1)",
        "future.result()",
        "thread.join()",
        "event.wait()",
        "self._queue.get()",
        "self._lock.acquire()",
        "subprocess.run(['true'])",
        "process.communicate()",
        "socket.create_connection((host, port))",
        "aiohttp.ClientSession()",
        "dist.init_process_group('gloo')",
        "dist.new_group(ranks)",
        "dist.barrier(group=group)",
        "torch.distributed.barrier()",
        "asyncio.wait(tasks)",
        "fcntl.flock(file, fcntl.LOCK_EX)",
    ],
)
def test_a_wait_without_a_deadline_is_found(line: str) -> None:
    assert len(list(waits(ast.parse(line)))) == 1


@pytest.mark.parametrize(
    "line",
    [
        "ray.get(ref, timeout=3)",
        "future.result(timeout=3)",
        "event.wait(3)",
        "mapping.get('key')",
        "', '.join(names)",
        "subprocess.run(['true'], timeout=3)",
        "asyncio.wait_for(queue.get(), 3)",
        "aiohttp.ClientSession(timeout=limits)",
        "dist.new_group(ranks, timeout=limit)",
        "fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "HTTPConnection(host, timeout=3)",
    ],
)
def test_a_wait_with_a_deadline_passes(line: str) -> None:
    assert not list(waits(ast.parse(line)))
