"""Sixteen attacks on the local sandbox; each is contained twice, and each succeeds where nothing contains it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime.agent.sandbox.access import GatewayAccess
from slime.agent.sandbox.grading import Grade, grade_tests, take_diff
from slime.agent.sandbox.local import LocalSandbox
from slime.agent.sandbox.results import OUTPUT_BYTES, SandboxError, SandboxTimeout
from tests.unit.sandbox_fakes import gateway, without_sandbox

pytestmark = pytest.mark.processes

ATTACKS = 16
TWICE = range(2)
PYTHON = "/usr/bin/python3"
contained: set[str] = set()


@pytest.fixture(scope="module", autouse=True)
def kernel_allows_sandboxes() -> Iterator[None]:
    """Skip where no user namespace may be made, and only there; print how many attacks were contained."""
    if subprocess.run(["unshare", "-Ur", "true"], capture_output=True).returncode:
        pytest.skip("this kernel lets nobody make a user namespace (`unshare -Ur true` fails)")
    yield
    print(f"\n{len(contained)} of {ATTACKS} attacks contained: {', '.join(sorted(contained))}")


def python(program: str) -> str:
    """A command line for a program text."""
    return f"{PYTHON} -c {shlex.quote(program)}"


async def run_inside(cmd: str, *, timeout: float = 20, **options: object) -> tuple[int, str]:
    """Exit code and output in a fresh sandbox."""
    async with LocalSandbox(**options) as sandbox:  # type: ignore[arg-type]
        code, stdout, stderr = await sandbox.exec(cmd, timeout=timeout)
        return code, stdout + stderr


def inside(cmd: str, **options: object) -> tuple[int, str]:
    """Exit code and output in two fresh sandboxes, which must agree."""
    results = [asyncio.run(run_inside(cmd, **options)) for _ in TWICE]
    assert results[0] == results[1]
    return results[0]


def test_a_fork_bomb_gets_the_processes_of_its_limit_and_no_more(tmp_path: Path) -> None:
    bomb = python(
        "import os, sys, time\n"
        "born = 0\n"
        "for _ in range(100):\n"
        "    try:\n"
        "        if not os.fork(): time.sleep(2); os._exit(0)\n"
        "        born += 1\n"
        "    except BlockingIOError: pass\n"
        "print(born)"
    )

    async def attack() -> int:
        async with LocalSandbox(processes=20) as sandbox:
            _, stdout, _ = await sandbox.exec(bomb)
            with pytest.raises(SandboxTimeout):  # the classic; nothing of it is left afterwards
                await sandbox.exec("bomb() { bomb | bomb & }; bomb; sleep 9", timeout=0.5)
            await sandbox.kill_all()
            assert (await sandbox.exec("ls /proc | grep -c '^[0-9]'"))[1].split() <= ["5"]
            return int(stdout)

    born = [asyncio.run(attack()) for _ in TWICE]
    assert born[0] == born[1] < 20
    assert without_sandbox(bomb, cwd=str(tmp_path))[1].split() == ["100"]
    contained.add("fork bomb")


def test_one_big_file_ends_at_the_size_of_the_disk(tmp_path: Path) -> None:
    write = "head -c 48M /dev/zero > big; stat -c %s big"
    _, output = inside(write, disk_mb=16)
    assert int(output.split()[0]) <= 16 << 20
    assert without_sandbox(write, cwd=str(tmp_path))[1].split() == [str(48 << 20)]
    contained.add("one big file")


def test_many_small_files_end_at_their_limit(tmp_path: Path) -> None:
    write = python(
        "made = 0\n"
        "try:\n"
        "    for number in range(3000): open(f'f{number}', 'w').close(); made += 1\n"
        "except OSError: pass\n"
        "print(made)"
    )
    _, output = inside(write, disk_mb=16)
    assert int(output) < 16 * 64
    assert without_sandbox(write, cwd=str(tmp_path))[1].split() == ["3000"]
    contained.add("many small files")


def test_four_times_300_mb_are_too_much_together(tmp_path: Path) -> None:
    hold = python("import time; held = b'x' * (300 << 20); time.sleep(1.5); print('held')")
    together = f"for _ in 1 2 3 4; do {hold} & done; wait; exit 0"
    code, output = inside(together, memory_mb=512)
    assert code == 137 and "held more than 512 MiB" in output and "held\n" not in output
    code, output = without_sandbox(together, cwd=str(tmp_path))
    assert code == 0 and output.count("held") == 4  # lines of four processes may mix
    contained.add("4 x 300 MB of memory")


def test_neither_engines_nor_the_metadata_address_are_reached(tmp_path: Path) -> None:
    connect = "import socket, sys\ns = socket.create_connection((sys.argv[1], int(sys.argv[2])), 2); print('reached')"
    with socket.create_server(("0.0.0.0", 0)) as engine:
        port = engine.getsockname()[1]
        with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
            probe.connect(("192.0.2.1", 9))  # sends nothing; names the interface that leads outside
            outer = probe.getsockname()[0]
        for host in ("127.0.0.1", outer):
            code, output = inside(f"{python(connect)} {host} {port}")
            assert code == 1 and "reached" not in output, output
            assert without_sandbox(f"{python(connect)} {host} {port}", cwd=str(tmp_path))[1] == "reached\n"
    metadata = f"{python(connect)} 169.254.169.254 80"
    code, output = inside(metadata)
    assert code == 1 and "Network is unreachable" in output
    # The control needs such an address, in a network namespace that has it.
    serve = "import socket; socket.create_server(('169.254.169.254', 80)).accept()"
    with_address = (
        "ip addr add 169.254.169.254/32 dev lo && ip link set lo up && "
        f"({python(serve)} & for _ in $(seq 50); do {metadata} 2> /dev/null && exit 0; sleep 0.1; done)"
    )
    control = f"unshare -Urn bash -c {shlex.quote(with_address)}"
    assert without_sandbox(control, cwd=str(tmp_path))[1] == "reached\n"
    contained.add("network to engines and the metadata address")


def test_the_gateway_answers_for_the_key_of_the_own_session_alone(tmp_path: Path) -> None:
    def ask(url: str, key: str) -> str:
        return python(
            "import urllib.request, urllib.error\n"
            f"request = urllib.request.Request({url!r}, headers={{'Authorization': 'Bearer {key}'}})\n"
            "try: print(urllib.request.urlopen(request, timeout=5).read().decode())\n"
            "except urllib.error.HTTPError as error: print(error.code)"
        )

    with gateway() as url:
        access = GatewayAccess(url, "key-of-a")
        assert inside(ask(access.inside_url, "key-of-a"), gateway=access)[1] == "session a\n"
        assert inside(ask(access.inside_url, "key-of-b"), gateway=access)[1] == "401\n"
        assert "unreachable" in inside(ask(url, "key-of-b").replace("127.0.0.1", "192.0.2.1"), gateway=access)[1]
        assert "refused" in inside(ask(url, "key-of-b"), gateway=access)[1]  # the host's loopback is not this one
        assert without_sandbox(ask(url, "key-of-b"), cwd=str(tmp_path))[1] == "session b\n"
    contained.add("another session's key")


def test_no_process_outside_can_be_killed(tmp_path: Path) -> None:
    def victim() -> subprocess.Popen[bytes]:
        return subprocess.Popen(["sleep", "60"])

    async def attack(pid: int) -> tuple[int, str]:
        async with LocalSandbox() as sandbox:
            await sandbox.exec("kill -KILL 1; kill -STOP 1; kill -KILL -1 2> /dev/null; true")
            code, _, stderr = await sandbox.exec(f"kill -KILL {pid}")
            return code, stderr

    spared = victim()
    for _ in TWICE:
        code, output = asyncio.run(attack(spared.pid))
        assert code == 1 and "No such process" in output
    assert spared.poll() is None
    assert without_sandbox(f"kill -KILL {spared.pid}", cwd=str(tmp_path))[0] == 0
    assert spared.wait(10) == -signal.SIGKILL
    contained.add("kill the parent")


def test_keys_and_files_of_other_samples_are_not_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIME_API_KEY", "secret-of-the-run")
    other = tmp_path / "other-sample"
    other.mkdir()
    (other / "answer").write_text("secret-of-the-run")
    steal = (
        f"cat {other}/answer 2>/dev/null; env; cat /proc/*/environ 2>/dev/null | tr '\\0' '\\n' | grep SLIME;"
        " cat /etc/shadow 2>/dev/null; ls /workspace /var /run /srv /mnt 2>/dev/null; true"
    )

    async def attack() -> str:
        async with LocalSandbox() as neighbour, LocalSandbox() as sandbox:
            await neighbour.write_file("/workspace/answer", "secret-of-the-run")
            return (await sandbox.exec(steal))[1]

    seen = [asyncio.run(attack()) for _ in TWICE]
    assert seen[0] == seen[1] and "secret-of-the-run" not in seen[0] and "answer" not in seen[0]
    assert without_sandbox(steal, cwd=str(tmp_path))[1].count("secret-of-the-run") >= 2
    contained.add("keys and other samples' files")


def test_a_symbolic_link_leads_nowhere_outside(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("of the host")
    link = f"ln -s {secret} result; ln -s / root; mkfifo pipe; ln -s /proc/self/root magic"

    async def attack(path: str) -> str:
        async with LocalSandbox() as sandbox:
            await sandbox.exec(link, check=True)
            with pytest.raises(SandboxError) as raised:
                await sandbox.read_file(f"/workspace/{path}")
            return str(raised.value)

    for path, said in (
        ("result", "a symbolic link"),
        (f"root{secret}", "a symbolic link"),
        ("magic/etc/passwd", "a symbolic link"),
        ("pipe", "not a regular file"),
        ("../dev/zero", "not a regular file"),
        ("../../../etc/shadow", "a symbolic link"),
    ):
        errors = [asyncio.run(attack(path)) for _ in TWICE]
        assert errors[0] == errors[1] and said in errors[0], errors
    assert without_sandbox(f"{link}; cat result", cwd=str(tmp_path))[1].endswith("of the host")
    contained.add("symbolic link out")


def test_endless_output_is_cut_and_ends_at_the_timeout(tmp_path: Path) -> None:
    async def attack() -> str:
        async with LocalSandbox() as sandbox:
            _, stdout, _ = await sandbox.exec("yes | head -c 30M; echo end")
            assert OUTPUT_BYTES <= len(stdout) < OUTPUT_BYTES + 100 and stdout.endswith("end\n")
            with pytest.raises(SandboxTimeout) as raised:
                await sandbox.exec("yes", timeout=0.3)
            return str(raised.value)

    said = [asyncio.run(attack()) for _ in TWICE]
    assert said[0] == said[1] and len(said[0]) < 1000
    assert len(without_sandbox("yes | head -c 30M; echo end", cwd=str(tmp_path))[1]) > 30_000_000
    contained.add("endless output")


# ---- attacks on the grading ----

TEST = "from add import add\n\ndef test_two():\n    assert add(1, 1) == 2\n"
WRONG = "def add(a, b):\n    return a - b\n"
REPOSITORY = (
    "git init -q . && git config user.email a@b.c && git config user.name a && git add -A && git commit -q -m begin"
)


async def repository(sandbox: LocalSandbox) -> None:
    for name, text in {"add.py": WRONG, "test_add.py": TEST}.items():
        await sandbox.write_file(f"/workspace/{name}", text)
    await sandbox.exec(REPOSITORY, check=True)


async def graded(edit: str) -> Grade:
    """What an agent that runs `edit` is given."""
    async with LocalSandbox() as agent:
        await repository(agent)
        await agent.exec(edit, check=True)
        diff = await take_diff(agent, "/workspace")
    async with LocalSandbox(show=[sys.prefix, sys.base_prefix]) as grader:
        await repository(grader)
        return await grade_tests(
            grader,
            "/workspace",
            diff=diff,
            originals={"test_add.py": TEST},
            expected=["test_add.py::test_two"],
            python=sys.executable,
            env={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        )


def naive(edit: str, folder: Path) -> int:
    """Exit code of pytest in the agent's own directory, which is what a naive grader looks at."""
    folder.mkdir()
    (folder / "add.py").write_text(WRONG)
    (folder / "test_add.py").write_text(TEST)
    return without_sandbox(
        f"{edit}; PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 {sys.executable} -m pytest -q test_add.py", cwd=str(folder)
    )[0]


def twice_graded(edit: str) -> Grade:
    async def both() -> list[Grade]:
        return await asyncio.gather(*(graded(edit) for _ in TWICE))

    grades = asyncio.run(both())
    assert grades[0] == grades[1]
    return grades[0]


def test_edited_tests_are_not_those_that_are_run(tmp_path: Path) -> None:
    honest = "sed -i 's/a - b/a + b/' add.py"
    assert asyncio.run(graded(honest)) == Grade(True, "passed", {"test_add.py::test_two": "passed"})
    edit = "echo 'def test_two(): pass' > test_add.py"
    skip = "printf 'def pytest_runtest_setup(item):\\n    import pytest; pytest.skip()\\n' > conftest.py"
    for number, cheat in enumerate((edit, skip)):
        grade = twice_graded(cheat)
        assert not grade.solved and grade.outcomes == {"test_add.py::test_two": "failed"}
        assert naive(cheat, tmp_path / str(number)) == 0
    contained.add("tests edited")


def test_an_exit_code_of_zero_is_no_proof(tmp_path: Path) -> None:
    forge = "printf 'import os\\nprint(\"1 passed\", flush=True)\\nos._exit(0)\\n' > add.py"
    grade = twice_graded(forge)
    assert not grade.solved and "no report" in grade.reason
    assert naive(forge, tmp_path / "forge") == 0
    contained.add("exit 0 forged")


def test_ptrace_is_refused(tmp_path: Path) -> None:
    trace = python(
        "import ctypes, os, time\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "child = os.fork()\n"
        "if not child: time.sleep(5); os._exit(0)\n"
        "print(libc.ptrace(16, child, 0, 0), end=' ')\n"  # PTRACE_ATTACH
        "os.kill(child, 9)\n"
        "try: open('/proc/1/mem', 'rb'); print('open')\n"
        "except OSError: print('closed')"
    )
    assert inside(trace) == (0, "-1 closed\n")
    code, output = without_sandbox(trace, cwd=str(tmp_path))
    assert code == 0 and output.startswith("0 ")
    contained.add("ptrace")


def test_a_command_inherits_no_socket_over_which_exit_codes_are_sent(tmp_path: Path) -> None:
    look = python("import os; print(sorted(int(name) for name in os.listdir('/proc/self/fd')))")
    assert inside(look) == (0, "[0, 1, 2, 3]\n")  # the last is the listing's own
    # Writing to whatever it has inherited, in the words of the first process, it does not become a success.
    forge = python(
        "import contextlib, os, sys\n"
        "for number in range(3, 256):\n"
        "    with contextlib.suppress(OSError):\n"
        '        for request in range(1, 9): os.write(number, b\'{"id": %d, "exit": 0}\' % request)\n'
        "sys.exit(7)"
    )
    assert inside(forge) == (7, "")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        subprocess.run(["bash", "-c", forge], pass_fds=[theirs.fileno()], cwd=tmp_path, timeout=60, check=False)
        assert ours.recv(100) == b'{"id": 1, "exit": 0}'
    contained.add("exit code forged over an inherited socket")


def test_proc_shows_nothing_of_the_host(tmp_path: Path) -> None:
    look = f"cat /proc/{os.getpid()}/cmdline; ls /proc | grep -c '^[0-9]'"
    code, output = inside(look)
    assert code == 0 and "No such file" in output and "pytest" not in output and int(output.split()[0]) <= 5
    for setting in ("kernel/core_pattern", "kernel/hostname", "vm/overcommit_memory"):
        assert inside(f"echo 1 > /proc/sys/{setting}")[0] == 1
    assert inside("echo b > /proc/sysrq-trigger")[0] == 1
    assert "pytest" in without_sandbox(look, cwd=str(tmp_path))[1]
    contained.add("/proc of the host")


def test_a_time_bomb_does_not_go_off_after_the_end(tmp_path: Path) -> None:
    # A daemon: another session, its parent gone.
    bomb = "(setsid bash -c '(sleep 0.6; echo late > result) &' &); echo early > result"

    async def attack() -> str:
        async with LocalSandbox() as sandbox:
            await sandbox.exec(bomb, check=True)
            await sandbox.kill_all()
            await asyncio.sleep(1.0)
            text = await sandbox.read_file("/workspace/result")
            await sandbox.exec(bomb, check=True)
        return text

    results = [asyncio.run(attack()) for _ in TWICE]
    assert results == ["early\n", "early\n"]
    assert not [line for line in running() if "sleep 0.6" in line]
    without_sandbox(f"{bomb}; exec > /dev/null 2>&1", cwd=str(tmp_path))
    end = time.monotonic() + 10
    while (tmp_path / "result").read_text() != "late\n":
        assert time.monotonic() < end
        time.sleep(0.05)
    contained.add("time bomb after the end")


def running() -> list[str]:
    return subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout.splitlines()


def test_every_attack_was_made() -> None:
    assert shutil.which("unshare") and len(contained) == ATTACKS, sorted(contained)
