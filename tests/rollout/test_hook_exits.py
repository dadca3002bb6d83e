"""SystemExit, KeyboardInterrupt and a stray CancelledError in user code: named errors, and the event loop lives on."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading

import pytest

from slime.rollout import fully_async_rollout
from slime.rollout.fully_async_rollout import generate_rollout_fully_async
from slime.rollout.hooks.errors import HookError
from slime.rollout.hooks.sample_errors import SampleError
from slime.rollout.sampling.scoring import score_each
from slime.rollout.sglang_rollout import generate_rollout
from slime.utils import async_utils
from slime.utils.async_utils import AsyncLoopThread
from slime.utils.misc import load_function
from slime.utils.types import Sample
from tests.unit.rollout_fakes import rollout_args

HERE = __file__
EXITS = (SystemExit, KeyboardInterrupt, asyncio.CancelledError)
ONE = {"rollout_batch_size": 1, "over_sampling_batch_size": 1, "n_samples_per_prompt": 2}
SAMPLE = r"sample [01] \(prompt 0: 'pd'\)"


class Raises:
    """What the hooks below raise; a test sets it."""

    kind: type[BaseException] = SystemExit


def hooks_raise(kind):
    load_function(f"{HERE}:Raises").kind = kind  # a file that is named as a hook is a module of its own


async def generate_exits(args, sample, sampling_params):
    raise Raises.kind(3)


async def generate_awaits_what_exits(args, sample, sampling_params):
    await asyncio.create_task(generate_exits(args, sample, sampling_params))


async def generate_cancels_itself(args, sample, sampling_params):
    asyncio.current_task().cancel()
    await asyncio.sleep(0)


def exits(*args, **kwargs):
    raise Raises.kind(3)


class ExitingSource:
    """A data source that fails whenever it is asked."""

    def __init__(self, args):
        pass

    get_samples = add_samples = save = load = exits

    def __len__(self):
        return 1


@pytest.mark.parametrize("kind", EXITS)
@pytest.mark.parametrize(
    ("flag", "function"),
    [
        ("custom_generate_function_path", "generate_exits"),
        ("custom_generate_function_path", "generate_awaits_what_exits"),
        ("rollout_sample_hook_path", "exits"),
        ("custom_rm_path", "exits"),
        ("dynamic_sampling_filter_path", "exits"),
    ],
)
def test_an_exit_in_a_hook_of_a_sample_names_hook_and_sample(make, flag, function, kind):
    path = f"{HERE}:{function}"
    hooks_raise(kind)
    args, source = make("d", **ONE, **{flag: [path] if flag == "rollout_sample_hook_path" else path})
    option = "--" + flag.replace("_", "-")
    with pytest.raises(SampleError, match=rf"^{option} {path} failed on {SAMPLE}: {kind.__name__}: 3?$"):
        generate_rollout(args, 0, source)


@pytest.mark.parametrize("kind", EXITS)
def test_an_exit_in_a_reward_of_a_group_names_hook_and_sample(make, kind):
    hooks_raise(kind)
    args, source = make("d", **ONE, custom_rm_path=f"{HERE}:exits", group_rm=True)
    with pytest.raises(SampleError, match=rf"--custom-rm-path {HERE}:exits failed on {SAMPLE}: {kind.__name__}"):
        generate_rollout(args, 0, source)


@pytest.mark.parametrize("kind", EXITS)
@pytest.mark.parametrize(
    ("flag", "name"),
    [
        ("buffer_filter_path", f"--buffer-filter-path {HERE}:exits"),
        ("rollout_sample_filter_path", f"--rollout-sample-filter-path {HERE}:exits"),
        ("rollout_all_samples_process_path", f"--rollout-all-samples-process-path {HERE}:exits"),
    ],
)
def test_an_exit_in_a_hook_of_a_rollout_names_the_hook(make, flag, name, kind):
    hooks_raise(kind)
    args, source = make("d", **ONE, **{flag: f"{HERE}:exits"})
    source.add_samples(source.get_samples(1))
    with pytest.raises(HookError, match=rf"^{name} failed: {kind.__name__}: 3$"):
        generate_rollout(args, 0, source)


@pytest.mark.parametrize("kind", EXITS)
@pytest.mark.parametrize("generate", [generate_rollout, generate_rollout_fully_async])
def test_an_exit_in_a_data_source_names_it(make, generate, kind):
    hooks_raise(kind)
    args, _ = make("d", **ONE)
    args.data_source_path = f"{HERE}:ExitingSource"
    name = f"--data-source-path {HERE}:ExitingSource"
    with pytest.raises(HookError, match=rf"^{name}: get_samples failed: {kind.__name__}: 3$"):
        generate(args, 0, load_function(args.data_source_path)(args))
    fully_async_rollout.stop_worker()
    fully_async_rollout.Workers.clear_instances()


def test_a_task_that_user_code_cancels_is_an_error_of_its_sample(make):
    path = f"{HERE}:generate_cancels_itself"
    args, source = make("d", **ONE, custom_generate_function_path=path)
    with pytest.raises(SampleError, match=r"the task of sample 0 \(prompt 0: 'pd'\) was cancelled by user code"):
        generate_rollout(args, 0, source)
    args.on_sample_error = "drop"
    with pytest.raises(RuntimeError, match="groups crashed during rollout 0.*was cancelled by user code"):
        generate_rollout_fully_async(args, 0, source)
    fully_async_rollout.stop_worker()
    fully_async_rollout.Workers.clear_instances()


async def nothing():
    return "alive"


async def leaves_a_task_that_exits():
    async def exit_later():
        raise SystemExit(3)

    await asyncio.wait([asyncio.ensure_future(exit_later())], timeout=5)
    asyncio.get_running_loop().stop()
    return await nothing()


def test_the_event_loop_outlives_a_task_that_exits_and_a_stop():
    assert async_utils.run(leaves_a_task_that_exits()) == "alive"
    assert async_utils.run(nothing()) == "alive"


async def exits_by_itself():
    raise SystemExit(3)


async def cancelled_by_nobody():
    raise asyncio.CancelledError


def test_an_exit_on_the_loop_does_not_end_the_thread_that_waits():
    with pytest.raises(RuntimeError, match="exits_by_itself was ended by SystemExit: 3"):
        async_utils.run(exits_by_itself())
    with pytest.raises(RuntimeError, match="cancelled_by_nobody was ended by CancelledError"):
        async_utils.run(cancelled_by_nobody())


def test_an_interrupt_of_the_thread_that_waits_is_its_own_and_cancels_the_work(request):
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what it runs behind
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, ignored))
    heard, waiting = threading.Event(), threading.main_thread().ident

    async def interrupted():
        try:
            while sys._current_frames()[waiting].f_code is not threading.Condition.wait.__code__:
                await asyncio.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            heard.set()
            raise

    with pytest.raises(KeyboardInterrupt):
        async_utils.run(interrupted())
    assert heard.wait(5)


def test_whoever_waits_hears_at_once_that_the_loop_has_ended(monkeypatch):
    """The selector's failure stands for one of the operating system, such as a descriptor that user code closed."""
    loop = AsyncLoopThread.__new__(AsyncLoopThread)
    AsyncLoopThread.__init__(loop)

    def fails(timeout):
        raise OSError("bad file descriptor")

    async def breaks_the_loop():
        loop.loop._selector.select = fails
        await asyncio.sleep(60)

    with pytest.raises(RuntimeError, match="the event loop of breaks_the_loop has ended") as caught:
        loop.run(breaks_the_loop())
    assert "OSError: bad file descriptor" in str(caught.value)
    with pytest.raises(RuntimeError, match="the event loop of nothing has ended"):
        loop.run(nothing())


@pytest.mark.parametrize(
    ("reward", "text"),
    [
        (10**400, r"returned '10{79}' \(int\)"),
        (10**5000, r"returned 'a value that cannot be shown: Exceeds the limit.*' \(int\)"),
        (b"1", r"returned \"b'1'\" \(bytes\)"),
        (bytearray(b"1"), r"returned \"bytearray\(b'1'\)\" \(bytearray\)"),
    ],
    ids=["400 digits", "5000 digits", "bytes", "bytearray"],
)
@pytest.mark.parametrize("given", [False, True], ids=["scored", "set by the generate function"])
def test_a_reward_that_is_no_finite_number_is_named_with_a_short_value(monkeypatch, reward, text, given):
    sample = Sample(index=7, group_index=2, prompt="p", status=Sample.Status.COMPLETED)
    sample.reward = reward if given else None
    args = rollout_args(custom_rm_path="os:path", custom_generate_function_path="my:generate")
    monkeypatch.setattr("slime.rollout.rm_hub.load_function", lambda path: lambda args, sample: reward)
    name = "--custom-generate-function-path my:generate" if given else "--custom-rm-path os:path"
    with pytest.raises(SampleError, match=rf"^{name} {text} for sample 7 \(prompt 2: 'p'\); it must be a finite"):
        asyncio.run(score_each(args, [sample], evaluation=False))
