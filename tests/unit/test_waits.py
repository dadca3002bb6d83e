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
    "init_process_group", "new_group", "TCPStore", "monitored_barrier",
    "asyncio.wait", "cf.wait", "futures.wait", "as_completed",
    *(f"{whose}.{verb}" for whose in ("requests", "Session()", "Client()")
      for verb in ("get", "post", "put", "patch", "delete", "head", "request", "stream")),
}  # fmt: skip
"""Calls that take a keyword with "timeout" in its name, and must be given it."""
BLOCK_WHEN_EMPTY = {"result", "join", "wait", "get", "acquire", "accept", "select"}
"""Methods that block for ever when they are called without any argument."""
BLOCK_ANYWAY = {
    "recv", "recv_into", "recvfrom", "recv_bytes", "readline", "readlines",
    "stdin.read", "stdout.read", "stderr.read", "poll.poll", "poller.poll",
}  # fmt: skip
"""Methods that block until somebody else writes, whatever they are given (a number of bytes); `poll` unless it is."""
DEADLINE_AT = {
    "wait": 0, "join": 0, "result": 0, "get": 1, "acquire": 1, "communicate": 1, "asyncio.timeout": 0, "wait_for": 1,
    "select.select": 3, "create_connection": 1, "urlopen": 2, "poll.poll": 0, "poller.poll": 0,
}  # fmt: skip
"""Which argument is the deadline, where it is given without its name."""
NEED_ARGUMENT = {"select.select", "wait_for"}
"""Of these: those that have to be given it, under its name or without."""
THREADS = ("pool", "threads", "executor")
"""What the variables of thread and process pools are called."""
NEVER = {
    "dist.barrier": "slime.utils.distributed_utils.barrier(what, deadline_s)",
    "distributed.barrier": "slime.utils.distributed_utils.barrier(what, deadline_s)",
}
"""Calls that take no deadline at all -> what does."""

FINISHED = "of a task that has finished"
BOUNDED = "the driver waits for it with a deadline, and its watchdog notices that no sample finishes"
ALLOWED: dict[tuple[str, str, str], str] = {
    (
        "slime/backends/megatron_utils/layers/rounded_linear.py",
        "_RoundedLinear.backward",
        "handle.wait",
    ): "a collective: it has the timeout of its group",
    ("slime/agent/sandbox/http.py", "HttpSandbox.__aenter__", "aiohttp.ClientTimeout"): "each request has its own",
    ("slime/agent/rollout.py", "Execution._attempt", "task.result"): FINISHED,
    ("slime/agent/sandbox/pool.py", "SandboxPool._discard", "task.result"): FINISHED,
    ("slime/agent/sandbox_server.py", "SandboxServer._close", "held.opening.result"): FINISHED,
    ("slime/backends/megatron_utils/update_weight/from_distributed.py", "_Steps.wait", "mine.result"): FINISHED,
    ("slime/backends/megatron_utils/update_weight/engines.py", "_results", "call.result"): FINISHED,
    (
        "slime/backends/megatron_utils/update_weight/from_distributed.py",
        "CollectiveTransport.post.finish",
        "sending.wait",
    ): "a collective: it has the timeout of its group",
    ("slime/backends/sglang_utils/external.py", "discover_external_engines", "answer.result"): FINISHED,
    (
        "slime/backends/sglang_utils/disk_weights.py",
        "LocalCheckpoint._apply",
        "task.result",
    ): "reads and writes files",
    (
        "slime/backends/megatron_utils/update_weight/from_disk.py",
        "DeltaWriter.add",
        "task.result",
    ): "compares and compresses what is in memory",
    (
        "slime/backends/megatron_utils/update_weight/from_disk.py",
        "DeltaWriter._write_deltas",
        "task.result",
    ): "sums up what is in memory",
    (
        "slime/backends/megatron_utils/update_weight/from_disk.py",
        "DeltaWriter.finish",
        "self._threads.shutdown",
    ): "reads and writes files",
    (
        "slime/backends/megatron_utils/update_weight/from_disk.py",
        "DeltaWriter.discard",
        "self._threads.shutdown",
    ): "reads and writes files",
    (
        "slime/backends/sglang_utils/weight_transfer.py",
        "main",
        "sys.stdin.read",
    ): "of its parent, which ends it in time",
    (
        "slime/observability/wandb_utils.py",
        "WandbAdapter.finish",
        "self.run.finish",
    ): "in a thread with a deadline, and W&B has its own",
    (
        "slime/observability/trackers/writer.py",
        "_listen",
        "sys.stdin.readline",
    ): "in a thread of its own; the file ends with the driver",
    ("slime/rollout/sglang_rollout.py", "_abort_engines", "asyncio.gather"): "of requests with ABORT_TIMEOUT_S",
    ("slime/rollout/collector.py", "Collector.take", "task.result"): FINISHED,
    ("slime/rollout/fully_async_rollout.py", "AsyncRolloutWorker._on_done", "task.result"): FINISHED,
    ("slime/rollout/sglang_rollout.py", "_result_of", "task.result"): FINISHED,
    ("slime/rollout/tool_calls.py", "_in_time", "task.result"): FINISHED,
    ("slime/rollout/mcp_tools.py", "_Connection._serve", "self._stop.wait"): "a session, until it is told to end",
    ("slime/processes/wait.py", "DaemonThreads.run", "call.result.result"): FINISHED,
    ("slime/rollout/sglang_rollout.py", "generate_rollout_async", "state.finished.get"): BOUNDED,
    ("slime/backends/megatron_utils/cp_utils.py", "slice_log_prob_with_cp", "keeps_whole.get"): "a ContextVar",
    ("slime/config/parse.py", "build_parser", "tables.result"): "of capture_elsewhere, which has a deadline",
    ("slime/utils/async_utils.py", "gather_or_cancel", "asyncio.gather"): "of coroutines, whose waits have deadlines",
    ("slime/utils/async_utils.py", "AsyncLoopThread.run", "cf.wait"): "for a coroutine, whose waits have deadlines",
    ("slime/utils/async_utils.py", "AsyncLoopThread.run", "future.result"): FINISHED,
    ("slime/conversion/writer.py", "run_in_threads", "cf.as_completed"): "a tool's own work, with a progress bar",
    ("slime/conversion/writer.py", "run_in_threads", "one.result"): FINISHED,
    ("slime/utils/external_utils/command_utils.py", "_finish", "process.wait"): "a command that a person started",
    ("slime/utils/misc.py", "exec_command", "subprocess.run"): "a command that a person started, of any length",
    ("slime/dashboard/app.py", "_tokenizer", "read.result"): FINISHED,
    ("slime/plan/render.py", "render", "captured.get"): "rich's text",
    ("slime/processes/isolation/init.py", "main", "control.recv"): "the socket closes when its owner ends",
    ("slime/processes/isolation/init.py", "_start", "os.waitpid"): "for a process that ends with the owner",
    ("slime/processes/isolation/init.py", "Init.serve", "awake.recv"): "it does not block",
    ("slime/processes/isolation/init.py", "Init.kill_all", "os.waitid"): "for processes that were killed",
    (
        "slime/processes/isolation/kernel.py",
        "enter_user_namespace",
        "os.waitpid",
    ): "for a helper that writes two files",
    ("slime/processes/registry.py", "_Spawner.call", "result.result"): "of a thread that calls Popen and nothing else",
    ("slime/processes/registry.py", "_Spawner._run", "self._jobs.get"): "that thread: nobody waits for it",
    (
        "slime_plugins/environments/frameworks.py",
        "Verifiers._serve.serve",
        "asyncio.Event().wait",
    ): "nobody waits for it",
    ("slime_plugins/environments/process.py", "Environments.place", "self._places.wait"): BOUNDED,
    ("slime_plugins/environments/server.py", "Worker._run", "self._jobs.get"): "nobody waits for that thread",
    ("slime_plugins/rollout_buffer/generators/base_generator.py", "BaseGenerator._run", "self._stopped.wait"): BOUNDED,
    ("slime_plugins/rollout_buffer/generators/base_generator.py", "BaseGenerator._run", "asyncio.wait"): BOUNDED,
    ("slime_plugins/rollout_buffer/generators/base_generator.py", "BaseGenerator._run", "work.result"): FINISHED,
    ("slime_plugins/environments/server.py", "_is_gone", "connection.recv"): "poll() has said that there is something",
}


def name_of(node: ast.expr) -> str:
    """The dotted name of what is called, as far as it is one: `self.x.get` is "self.x.get", `X().get` "X().get"."""
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}".lstrip(".")
    if isinstance(node, ast.Call):
        return f"{name_of(node.func)}()"
    return node.id if isinstance(node, ast.Name) else ""


def is_one_of(name: str, known: set[str] | dict[str, str]) -> bool:
    return any(name == one or name.endswith(f".{one}") for one in known)


def is_constant(node: ast.expr | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def mentions(call: ast.Call, *names: str) -> bool:
    return any(isinstance(node, ast.Attribute) and node.attr in names for node in ast.walk(call))


def deadline_of(call: ast.Call) -> ast.expr | None:
    """The deadline that a call is given, under a name or at its place; None if it is given none."""
    for keyword in call.keywords:
        if "timeout" in (keyword.arg or ""):
            return keyword.value
    places = [place for name, place in DEADLINE_AT.items() if is_one_of(name_of(call.func), {name})]
    return next((call.args[place] for place in places if len(call.args) > place), None)


def is_without_limit(call: ast.Call, name: str, last: str) -> bool:
    """Whether a call says itself that it has no deadline: None for one, or that it blocks."""
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    if last == "ClientTimeout":  # its other limits are of connecting
        has_total = "total" not in keywords or not is_constant(keywords["total"], None)
        return not has_total and is_constant(keywords.get("sock_read", ast.Constant(None)), None)
    if any("timeout" in (keyword or "") and is_constant(value, None) for keyword, value in keywords.items()):
        return True
    deadline = deadline_of(call)
    if last in ("get", "acquire"):  # `mapping.get(key, None)` waits for nobody
        blocks = keywords.get("block", keywords.get("blocking", call.args[0] if call.args else None))
        return is_constant(blocks, True) and (deadline is None or is_constant(deadline, None))
    return is_constant(deadline, None)


def waits_for_others(call: ast.Call, name: str, last: str) -> str | None:
    """Why a call waits for another process or thread, where it takes no deadline or is to be told not to wait."""
    owner = name.rpartition(".")[0].rpartition(".")[2].lower()
    if last == "flock" and not mentions(call, "LOCK_NB", "LOCK_UN"):
        return "waits for another process: use slime.processes.wait.lock_file(what, deadline_s)"
    if last in ("waitpid", "waitid") and not mentions(call, "WNOHANG"):
        return "waits for another process: os.WNOHANG"
    is_told_not_to = any(keyword.arg == "wait" and is_constant(keyword.value, False) for keyword in call.keywords)
    is_told_not_to |= bool(call.args) and is_constant(call.args[0], False)
    if last == "shutdown" and any(word in owner for word in THREADS) and not is_told_not_to:
        return "waits for what its threads do: wait=False"
    if last == "finish" and owner in ("run", "wandb"):
        return "uploads for as long as it takes"
    if name == "asyncio.gather":
        return "waits for each of its tasks: asyncio.timeout(deadline_s) around it"
    return None


def problem_of(call: ast.Call) -> str | None:
    """Why a call can block for ever; None if it cannot."""
    name, last = name_of(call.func), name_of(call.func).rpartition(".")[2]
    keywords = {keyword.arg for keyword in call.keywords}
    if is_one_of(name, NEVER):
        return f"takes no deadline; use {next(v for k, v in NEVER.items() if is_one_of(name, {k}))}"
    if is_without_limit(call, name, last):
        return "is told to wait without a deadline"
    has_timeout = None in keywords or any("timeout" in (keyword or "") for keyword in keywords)
    if is_one_of(name, NEED_TIMEOUT) and not has_timeout:
        return "is given no timeout"
    if is_one_of(name, NEED_ARGUMENT) and not has_timeout and deadline_of(call) is None:
        return "is given no timeout"
    is_method = isinstance(call.func, ast.Attribute)
    if is_method and last in BLOCK_WHEN_EMPTY and not call.args and not keywords:
        return "is called without a deadline"
    is_collective = is_one_of(name, {"dist.recv", "distributed.recv"})
    if is_method and is_one_of(name, BLOCK_ANYWAY) and deadline_of(call) is None and not is_collective:
        return "waits until somebody writes: use select.poll() with a deadline before it"
    return waits_for_others(call, name, last)


def sessions_of(tree: ast.AST) -> set[str]:
    """Names that stand for a session of requests, whose calls each need a timeout."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            found += [(target, node.value) for target in node.targets]
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            found.append((node.optional_vars, node.context_expr))
    return {name_of(target) for target, value in found if name_of(value) == "requests.Session()"}


def is_timed_block(node: ast.AST) -> bool:
    """Whether what is awaited inside has its deadline: `async with asyncio.timeout(3)`."""
    items = node.items if isinstance(node, ast.AsyncWith) else []
    calls = [item.context_expr for item in items if isinstance(item.context_expr, ast.Call)]
    return any(name_of(call.func) == "asyncio.timeout" and not problem_of(call) for call in calls)


def waits(tree: ast.AST) -> Iterator[tuple[str, ast.Call, str]]:
    """(function, call, problem) of every call that can block for ever."""
    sessions = sessions_of(tree)

    def problem_in(call: ast.Call) -> str | None:
        whose, _, verb = name_of(call.func).rpartition(".")
        if whose in sessions and verb != "close" and deadline_of(call) is None:
            return "is given no timeout"
        return problem_of(call)

    def visit(node: ast.AST, where: str, is_timed: bool) -> Iterator[tuple[str, ast.Call, str]]:
        for child in ast.iter_child_nodes(node):
            inner, timed = where, is_timed or is_timed_block(child)
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                inner, timed = f"{where}.{child.name}".lstrip("."), False
            if isinstance(child, ast.Call) and not (is_timed and isinstance(node, ast.Await)):
                problem = problem_in(child)
                if problem is None and is_one_of(name_of(child.func), {"wait_for"}):
                    continue  # what is inside has its deadline
                if problem:
                    yield where, child, problem
            yield from visit(child, inner, timed)

    return visit(tree, "", False)


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
        "future.result(timeout=None)",
        "ray.get(ref, timeout=None)",
        "event.wait(None)",
        "thread.join(None)",
        "aiohttp.ClientTimeout(total=None)",
        "aiohttp.ClientTimeout(total=None, sock_connect=3)",
        "queue.get(True)",
        "queue.get(block=True)",
        "queue.get(True, None)",
        "lock.acquire(True)",
        "sock.recv(4096)",
        "sock.recv_into(buffer)",
        "child.stdout.readline()",
        "child.stdout.read()",
        "select.select([source], [], [])",
        "select.select([source], [], [], None)",
        "selector.select()",
        "poll.poll()",
        "poll.poll(None)",
        "os.waitpid(pid, 0)",
        "requests.Session().get(url)",
        "session = requests.Session()\nsession.get(url)",
        "with requests.Session() as s: s.post(url)",
        "pool.shutdown()",
        "self._threads.shutdown(wait=True)",
        "condition.wait_for(is_there)",
        "condition.wait_for(is_there, None)",
        "asyncio.wait_for(task, None)",
        "self.run.finish()",
        "wandb.finish()",
        "asyncio.gather(*tasks)",
        "async def f():\n async with asyncio.timeout(None): pass",
        "async def f():\n async with asyncio.timeout(3): thread.join()",
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
        "aiohttp.ClientTimeout(total=3)",
        "aiohttp.ClientTimeout(total=None, sock_read=3)",
        "queue.get(True, 3)",
        "queue.get(False)",
        "queue.get(timeout=left_s)",
        "lock.acquire(timeout=3)",
        "mapping.get('key', None)",
        "select.select([source], [], [], 3)",
        "poll.poll(0)",
        "process.poll()",
        "os.waitpid(pid, os.WNOHANG)",
        "requests.Session().get(url, timeout=3)",
        "session = requests.Session()\nsession.get(url, timeout=3)",
        "pool.shutdown(wait=False)",
        "ray.shutdown()",
        "condition.wait_for(is_there, 3)",
        "stream.finish()",
        "torch.gather(values, 1, index)",
        "dist.recv(tensor, src=0)",
        "asyncio.wait_for(asyncio.gather(*tasks), 3)",
        "async def f():\n async with asyncio.timeout(3): await asyncio.gather(*tasks)",
    ],
)
def test_a_wait_with_a_deadline_passes(line: str) -> None:
    assert not list(waits(ast.parse(line)))
