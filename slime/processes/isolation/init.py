"""The first process of a sandbox: makes the sandbox, starts commands in it, watches their memory, and ends with it.

Run as `python -I -S -c "...; main(CONTROL)"`, by `slime.agent.sandbox.local`. Two processes: the outer one waits
for the inner one, which is number 1 in a pid namespace, so that the kernel kills all others when it ends. It ends
when its control socket is closed, or when the process that started it is gone (a pidfd says so, also after SIGKILL).

Messages are JSON texts over a socket that keeps their borders; files travel beside them.

first: settings, see `LocalSandbox`
in:  {"op": "run", "id", "argv", "env", "cwd"} + stdin, stdout, stderr; {"op": "read", "id", "path", "limit"} + stdout;
     {"op": "kill", "id", "job"}: a command and its session; {"op": "kill_all", "id"};
     {"op": "listen", "id", "port"}
out: {"ready", "refused"}, {"id", "exit"} (+ the listening socket), {"id", "error"}, {"over_memory": MiB}, {"fatal"}
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys

from slime.processes.isolation import kernel

TYPE_CHECKING = False  # As typing's, whose import would take a third of the time that a sandbox takes to start.
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

WATCH_S = 0.05
_RESERVED = 4  # times the limit of memory: what a process may reserve
# Every file system of the sandbox that can be written is a part of one of bounded size.
_WRITABLE = {"tmp": "/tmp", "home": "/home", "shm": "/dev/shm"}  # nosec B108
_DEVICES = ("null", "zero", "full", "random", "urandom")
_FILES = {
    "/etc/passwd": "root:x:1000:1000::/home/root:/bin/bash\nagent:x:1000:1000::/home/agent:/bin/bash\n",
    "/etc/group": "root:x:1000:\nagent:x:1000:\n",
    "/etc/hosts": "127.0.0.1 localhost sandbox\n",
}
_LINKS = {"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2"}


class Refusals:
    """Parts of the isolation that this kernel refused."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def attempt(self, part: str, function: Callable[..., Any], *arguments: Any) -> None:
        """Call the function; note the part where the kernel refuses it."""
        try:
            function(*arguments)
        except OSError as error:
            self.texts.append(f"{part} ({error.strerror})")


def main(descriptor: int) -> None:
    """Make the sandbox that the first message describes, and serve it until its owner goes.

    Args:
        descriptor: of the control socket.
    """
    os.set_inheritable(descriptor, False)  # A command that held it could forge exit codes.
    control = socket.socket(fileno=descriptor)
    settings = json.loads(control.recv(kernel.MESSAGE_BYTES))
    try:
        _start(settings, control)
    except OSError as error:
        control.send(json.dumps({"fatal": f"{error}"}).encode())
        sys.exit(1)


def _start(settings: dict[str, Any], control: socket.socket) -> None:
    owner = os.pidfd_open(settings["owner"])
    kernel.enter_user_namespace()
    kernel.unshare(kernel.NEW_MOUNT | kernel.NEW_PID)
    # Opened with the rights of the starter: a plain user may not pass through /root to the Python below it.
    shown = [(path, os.open(path, os.O_PATH | os.O_CLOEXEC)) for path in settings["shown"]]
    devices = [(name, os.open(f"/dev/{name}", os.O_PATH | os.O_CLOEXEC)) for name in _DEVICES]
    kernel.become_user()
    refusals = Refusals()
    for name, flag in kernel.NAMESPACES.items():
        refusals.attempt(f"{name} namespace", kernel.unshare, flag)
    inner = os.fork()
    if inner:
        control.close()
        os.waitpid(inner, 0)
        os._exit(0)  # An interpreter that tidies up would take longer than the sandbox.
    kernel.die_with_parent()
    build_root(settings, shown, devices, refusals)
    for descriptor in (*(d for _, d in shown), *(d for _, d in devices)):
        os.close(descriptor)
    refusals.attempt("loopback", kernel.raise_loopback)
    lock_down(settings, refusals)
    null = os.open("/dev/null", os.O_RDWR)
    for descriptor in range(2):  # Its error output stays: what goes wrong in it would be seen nowhere else.
        os.dup2(null, descriptor)
    Init(control, owner, settings).serve(refusals.texts)


def build_root(
    settings: dict[str, Any], shown: list[tuple[str, int]], devices: list[tuple[str, int]], refusals: Refusals
) -> None:
    """Make a root directory of read-only views and one writable file system of bounded size, and enter it."""
    root = "/tmp"  # nosec B108: any directory: it is covered in this mount namespace alone.
    kernel.mount_private_tmpfs(root, "size=4m,mode=755")
    own = tuple(f"{path}/" for path in _WRITABLE.values())
    for path, descriptor in shown:
        if not path.startswith(own):
            _show(path, descriptor, root)
    for name, descriptor in devices:
        _show(f"/dev/{name}", descriptor, root)
    for name, target in _LINKS.items():
        os.symlink(target, f"{root}/dev/{name}")
    for path, text in _FILES.items():
        os.makedirs(os.path.dirname(root + path), exist_ok=True)
        with open(root + path, "w") as file:
            file.write(text)
    os.makedirs(f"{root}/data")
    kernel.mount_tmpfs(f"{root}/data", f"size={settings['disk_mb']}m,nr_inodes={settings['files']},mode=755")
    for name, path in {**_WRITABLE, "work": settings["workdir"]}.items():
        os.makedirs(f"{root}/data/{name}")
        os.makedirs(root + path, exist_ok=True)
        kernel.bind(f"{root}/data/{name}", root + path)
    for user in ("agent", "root"):
        os.makedirs(f"{root}/home/{user}")
    for path, descriptor in shown:
        if path.startswith(own):  # on top of the writable file system, which would hide it
            _show(path, descriptor, root)
    os.chmod(f"{root}/tmp", 0o1777)  # nosec B103 B108: as on every host
    kernel.unmount(f"{root}/data")
    os.rmdir(f"{root}/data")
    os.makedirs(f"{root}/proc")
    refusals.attempt("/proc of its own", kernel.mount_proc, f"{root}/proc")
    kernel.change_root(root)
    kernel.make_read_only("/", below=False)


def _show(path: str, descriptor: int, root: str) -> None:
    """Show a path of the host under the same name; a symbolic link (/bin -> usr/bin) as one."""
    source, target = f"/proc/self/fd/{descriptor}", root + path
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.lexists(target):
        return  # It lies in what is shown already.
    if os.path.isdir(source):
        os.mkdir(target)
    else:
        open(target, "w").close()
    kernel.bind(source, target)
    kernel.make_read_only(target, is_device=path.startswith("/dev/"))


def lock_down(settings: dict[str, Any], refusals: Refusals) -> None:
    """Give up rights for good: limits, capabilities, files, system calls. What is started later inherits it."""
    # Where the host runs out of memory, the kernel takes a sandbox first, not a trainer.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    refusals.attempt("host name", socket.sethostname, "sandbox")
    memory, disk = settings["memory_mb"] << 20, settings["disk_mb"] << 20
    limits = {"CORE": 0, "MSGQUEUE": 0, "NOFILE": 1024, "NPROC": settings["processes"] + 2, "FSIZE": disk}
    # Runtimes such as Bun and V8 reserve far more than they use: the watch counts what is used, this limit only stops
    # a process that would take the host's memory between two looks of the watch.
    for name, value in {**limits, "DATA": _RESERVED * memory}.items():
        kernel.limit(name, value)
    kernel.drop_capabilities()
    kernel.set_readable_by_peers(False)
    os.chdir("/")
    refusals.attempt("landlock", kernel.restrict_files, [*_WRITABLE.values(), settings["workdir"]])
    refusals.attempt("seccomp", lambda: kernel.restrict_system_calls(kernel.filter_program()))


class Init:
    """Number 1 of the sandbox's processes.

    Args:
        control: the socket of the sandbox's owner.
        owner: a pidfd of it.
        settings: of the sandbox.
    """

    def __init__(self, control: socket.socket, owner: int, settings: dict[str, Any]) -> None:
        self.control, self.owner, self.settings = control, owner, settings
        self.jobs: dict[int, int] = {}  # process -> id of the request
        self.page = os.sysconf("SC_PAGE_SIZE")

    def serve(self, refused: list[str]) -> None:
        """Answer requests until the owner goes."""
        awake, wake = socket.socketpair()
        awake.setblocking(False)
        wake.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        self.say(ready=True, refused=refused)
        poll = select.poll()
        for descriptor in (self.control.fileno(), self.owner, awake.fileno()):
            poll.register(descriptor, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poll.poll(WATCH_S * 1000 if self.has_others() else None)}
            if awake.fileno() in ready:
                awake.recv(4096)
            if self.owner in ready or (self.control.fileno() in ready and not self.answer()):
                os._exit(0)  # The kernel kills all other processes of the namespace with this one.
            self.reap()
            self.watch_memory()

    def has_others(self) -> bool:
        """Whether any process but this one is left."""
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            return True
        return False

    def say(self, **message: Any) -> None:
        """Send a message to the owner; one that is gone gets none."""
        with contextlib.suppress(OSError):
            self.control.send(json.dumps(message).encode())

    def answer(self) -> bool:
        """Do what the next message asks; False: there is none, the owner has closed the socket."""
        data, files, _, _ = socket.recv_fds(self.control, kernel.MESSAGE_BYTES, 3)
        for file in files:
            os.set_inheritable(file, False)
        if not data:
            return False
        message = json.loads(data)
        try:
            self._handle(message, files)
        except OSError as error:
            self.say(id=message["id"], error=error.strerror or str(error))
        finally:
            for file in files:
                os.close(file)
        return True

    def _handle(self, message: dict[str, Any], files: list[int]) -> None:
        if message["op"] == "kill":
            self.kill_job(message["job"])
            self.say(id=message["id"], exit=0)
        elif message["op"] == "kill_all":
            self.kill_all()
            self.say(id=message["id"], exit=0)
        elif message["op"] == "listen":
            # A socket stays in the network in which it was made, whoever holds it.
            with socket.create_server(("127.0.0.1", message["port"]), backlog=128) as listener:
                answer = json.dumps({"id": message["id"], "exit": 0}).encode()
                socket.send_fds(self.control, [answer], [listener.fileno()])
        elif child := os.fork():
            self.jobs[child] = message["id"]
        else:
            self._become(message, files)

    def _become(self, message: dict[str, Any], files: list[int]) -> None:
        """In a new process: become the command, or read the file."""
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            os.setsid()
            if message["op"] == "read":
                os._exit(send_file(message["path"], files[0], message["limit"]))
            for number, file in enumerate(files):
                os.dup2(file, number)  # The only descriptors that the command inherits.
            os.chdir(message["cwd"])
            os.execve(message["argv"][0], message["argv"], message["env"])
        except OSError as error:
            os.write(2 if message["op"] == "run" else files[0], f"{error.filename or ''}: {error.strerror}\n".encode())
            os._exit(126)

    def reap(self) -> None:
        """Report commands that have ended, and take leave of orphans."""
        while True:
            try:
                process, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not process:
                return
            if (request := self.jobs.pop(process, None)) is not None:
                code = os.waitstatus_to_exitcode(status)
                self.say(id=request, exit=code if code >= 0 else 128 - code)

    def kill_job(self, request: int) -> None:
        """Kill a command with its descendants and all of its session; first stop all, so that none forks meanwhile."""
        leaders = {process for process, job in self.jobs.items() if job == request}
        stopped: set[int] = set()
        while fresh := self._members(leaders) - stopped:
            for process in fresh:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGSTOP)
            stopped |= fresh
        for process in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def _members(self, leaders: set[int]) -> set[int]:
        members, rows = set(leaders), processes()
        size = -1
        while size != len(members):
            size = len(members)
            members |= {pid for pid, (parent, session) in rows.items() if parent in members or session in leaders}
        return members & rows.keys()

    def kill_all(self) -> None:
        """Kill every process but this one, at one moment, as the kernel does it for -1."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        while self.has_others():  # Until all are gone: what reads files next must find nobody who writes.
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
            self.reap()

    def watch_memory(self) -> None:
        """Kill everything when all processes together hold more memory than the limit."""
        limit = self.settings["memory_mb"]
        # Pages that processes share count once: the exact figure takes longer, so it comes second.
        if self.has_others() and self.memory(resident) > limit and (used := self.memory(proportional)) > limit:
            self.say(over_memory=used)
            self.kill_all()

    def memory(self, measure: Callable[[int, int], int]) -> int:
        """MiB that all processes but this one hold."""
        return sum(measure(pid, self.page) for pid in processes()) >> 20


def processes() -> dict[int, tuple[int, int]]:
    """Process -> (parent, session), of all in this namespace but the first."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                _, parent, _, session = file.read().rpartition(b")")[2].split()[:4]
                found[int(name)] = (int(parent), int(session))
    return found


def resident(pid: int, page: int) -> int:
    """Bytes of memory that a process holds, those that it shares included."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/statm", "rb") as file:
        return int(file.read().split()[1]) * page
    return 0


def proportional(pid: int, page: int) -> int:
    """Bytes of memory that a process holds, shared ones divided by their holders; what cannot be read counts whole."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/smaps_rollup", "rb") as file:
        for line in file:
            if line.startswith(b"Pss:"):
                return int(line.split()[1]) << 10
    return resident(pid, page)


def send_file(path: str, target: int, most: int) -> int:
    """Write a regular file's bytes, `most` + 1 of them at the most, to a descriptor; the exit code is 0."""
    source = kernel.open_regular(path)
    left = most + 1
    while left and (data := os.read(source, min(left, 1 << 16))):
        left -= len(data)
        while data:
            data = data[os.write(target, data) :]
    return 0
