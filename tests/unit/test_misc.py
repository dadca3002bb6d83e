"""Hooks load in three notations, periods fall due when they should."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from slime.utils import async_utils
from slime.utils.misc import (
    Box,
    SingletonMeta,
    chunk_named_params_by_size,
    exec_command,
    get_free_port,
    group_by,
    is_port_available,
    listen_anywhere,
    load_function,
    should_run_periodic_action,
    stable_hash,
)


def test_a_hook_loads_by_dots_by_colon_and_by_file(tmp_path):
    file = tmp_path / "my-hooks.py"
    file.write_text("class Outer:\n    def inner(): return 5\n")
    assert load_function("os.path.join") is load_function("os.path:join")
    assert load_function(f"{file}:Outer.inner")() == 5
    assert load_function(f"{file}:Outer") is load_function(f"{file}:Outer")


def test_two_files_of_one_name_stay_two_modules(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "hook.py").write_text(f"value = {name!r}\n")
    assert [load_function(f"{tmp_path}/{name}/hook.py:value") for name in ("a", "b")] == ["a", "b"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_package.mod.fn", "no module 'no_such_package' is on the Python path"),
        ("os.no_such.fn", "no module 'os.no_such'"),
        ("os.path.no_such", "os.path was found, but it has no attribute 'no_such'"),
        ("missing/file.py:fn", "there is no file"),
        ("word", "is no hook path"),
    ],
)
def test_the_error_says_which_part_of_a_hook_path_was_not_found(path, message):
    with pytest.raises(ImportError, match=message):
        load_function(path)


def test_a_hook_whose_own_import_fails_names_that_import(tmp_path, monkeypatch):
    (tmp_path / "needs_more.py").write_text("import not_installed_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match="needs_more imports 'not_installed_at_all', which is not installed"):
        load_function("needs_more.fn")


@pytest.mark.parametrize(
    ("rollout_id", "interval", "epoch", "last", "due"),
    [(0, 1, None, None, True), (0, 2, None, None, False), (1, 2, None, None, True), (4, None, 5, 5, False)]
    + [(4, 10, 5, None, True), (6, 10, None, 7, True), (5, 10, None, 7, False)],
)
def test_a_periodic_action_is_due_at_intervals_epoch_ends_and_the_end(rollout_id, interval, epoch, last, due):
    assert should_run_periodic_action(rollout_id, interval, epoch, last) is due


def test_a_singleton_is_forgotten_only_by_its_own_class():
    class One(metaclass=SingletonMeta):
        pass

    class Two(metaclass=SingletonMeta):
        pass

    one, two = One(), Two()
    assert One() is one
    One.clear_instances()
    assert One() is not one
    assert Two() is two


def test_threads_that_ask_for_a_singleton_at_once_get_the_same_one():
    class Slow(metaclass=SingletonMeta):
        def __init__(self):
            time.sleep(0.05)

    with ThreadPoolExecutor(4) as threads:
        made = list(threads.map(lambda _: Slow(), range(4)))
    assert len(set(map(id, made))) == 1


def test_stable_hash_is_the_same_in_another_process():
    program = "from slime.utils.misc import stable_hash; print(stable_hash(1, 'x'))"
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(other.stdout) == stable_hash(1, "x") != stable_hash("1x")
    assert all(0 <= stable_hash(i) < 2**31 for i in range(1000))


def test_parameters_are_chunked_by_bytes_in_order():
    class Tensor:
        def __init__(self, size):
            self.size = size

        def numel(self):
            return self.size

        def element_size(self):
            return 4

    params = [(name, Tensor(size)) for name, size in [("a", 1), ("b", 1), ("c", 5), ("d", 1)]]
    chunks = chunk_named_params_by_size(params, chunk_size=8)
    assert [[name for name, _ in chunk] for chunk in chunks] == [["a", "b"], ["c"], ["d"]]


def test_small_helpers():
    assert Box(3).inner == 3
    assert group_by([3, 1, 4, 1], key=lambda n: n % 2) == {1: [3, 1, 1], 0: [4]}
    assert exec_command("echo hi", capture_output=True) == "hi\n"
    assert is_port_available(get_free_port(20000, consecutive=2))


def test_coroutines_run_on_one_background_loop():
    async def loop_id():
        import asyncio

        return id(asyncio.get_running_loop())

    assert async_utils.run(loop_id()) == async_utils.run(loop_id()) == id(async_utils.get_async_loop().loop)

    async def nested():
        async_utils.run(loop_id())

    with pytest.raises(RuntimeError, match="use await"):
        async_utils.run(nested())


def test_a_port_of_ones_own_is_listened_at_where_it_is_asked_for():
    with listen_anywhere("127.0.0.1") as local, listen_anywhere("198.51.100.7") as elsewhere:
        assert local.getsockname()[0] == "127.0.0.1"
        assert elsewhere.getsockname()[0] in ("0.0.0.0", "::"), "no interface has it: it is translated on the way"


def test_a_task_that_ignores_its_end_keeps_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(async_utils, "CANCEL_S", 0.2)

    async def ignores(end: asyncio.Event) -> None:
        while not end.is_set():
            with suppress(asyncio.CancelledError):
                await end.wait()

    async def fails() -> None:
        await asyncio.sleep(0.05)
        raise ValueError("the first error")

    async def both() -> float:
        end, begun = asyncio.Event(), time.monotonic()
        with pytest.raises(ValueError, match="the first error"):
            await async_utils.gather_or_cancel([ignores(end), fails()])
        took_s = time.monotonic() - begun
        end.set()
        await asyncio.sleep(0)
        return took_s

    assert asyncio.run(asyncio.wait_for(both(), 20)) < 5
    assert "still running 0 s after it was cancelled" in caplog.text and "ignores" in caplog.text
