"""Small helpers that belong to no other module: loading hooks by path, periods, boxes, chunks."""

from __future__ import annotations

import base64
import contextlib
import copy
import functools
import gc
import hashlib
import importlib
import importlib.util
import inspect
import ipaddress
import logging
import math
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from slime.utils.errors import UsageError, refuse
from slime.utils.http.network import given_address

if TYPE_CHECKING:
    import torch

    from slime.config.args import Args


logger = logging.getLogger(__name__)
_FILE_MODULE = "slime_hook_"
_SHOWN_CHARS = 80
_PLAIN = frozenset({int, float, str, bool, type(None)})
T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


@functools.cache
def load_function(path: str) -> Any:
    """Load what a hook flag names: `pkg.mod.attr`, `pkg.mod:attr` or `path/to/file.py:attr`.

    `path/to/file.py` alone is the only public coroutine that the file defines.

    Raises:
        ImportError: a sentence that says which part was not found. An error of the module's own code passes through.
    """
    if path.endswith(".py"):
        return _only_coroutine(_load_file(path, asked=path), path)
    module_path, colon, attribute = path.rpartition(":")
    if not colon:
        module_path, _, attribute = path.rpartition(".")
    if not module_path or not attribute:
        raise ImportError(f"{path!r} is no hook path: write pkg.module.attr, pkg.module:attr or path/to/file.py:attr")
    if module_path.endswith(".py"):
        module = _load_file(module_path, asked=path)
    else:
        module = _load_module(module_path, asked=path)
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ImportError(f"cannot load {path!r}: {module_path} was found, but it has no attribute {part!r}")
        found = getattr(found, part)
    return found


def attempt(function: Callable[..., T], *args: Any, **kwargs: Any) -> tuple[T | None, Exception | SystemExit | None]:
    """Call what may raise anything (a user's code, another library's); return its result and error, one of them None.

    For callers to whom the error is an answer: they report it, or tell other ranks of it. An interrupt passes.
    """
    try:
        return function(*args, **kwargs), None
    except (Exception, SystemExit) as error:  # the boundary of code that is not ours; the caller gets the error
        return None, error


@contextmanager
def on_error(undo: Callable[[], Any]) -> Iterator[None]:
    """Call `undo` where the block ends by an error, an interrupt or a cancellation, which is then raised."""
    with contextlib.ExitStack() as stack:
        stack.callback(undo)
        yield
        stack.pop_all()


def try_to_load(path: str) -> tuple[Any, str | None]:
    """Return what `load_function` loads, or None and the end of a sentence that says why it cannot be loaded."""
    function, error = attempt(load_function, path)
    if isinstance(error, ImportError):
        return None, f": {error}"
    return function, f" {path}: loading it raised {type(error).__name__}: {error}" if error else None


def hook_args(args: Args) -> Any:
    """Return what hooks of this process get as `args`: one copy for all of them, which they may assign to.

    A later hook of the process sees what an earlier one assigned. Frozen `args` stay as they were parsed, and other
    processes have copies of their own. Anything else than frozen `Args` is returned as it is.
    """
    return getattr(args, "for_hooks", args)


def _only_coroutine(module: Any, path: str) -> Any:
    found = [
        value
        for name, value in vars(module).items()
        if inspect.iscoroutinefunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    ]
    if len(found) == 1:
        return found[0]
    there = " and ".join(function.__name__ for function in found)
    what = f"the public coroutines {there}" if found else "no public coroutine"
    raise ImportError(f"{path} names a file but no function in it, and has {what}; write {path}:function")


def _load_module(name: str, *, asked: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            raise ImportError(f"cannot load {asked!r}: no module {error.name!r} is on the Python path") from error
        raise ImportError(f"cannot load {asked!r}: {name} imports {error.name!r}, which is not installed") from error


def _load_file(file: str, *, asked: str) -> Any:
    location = Path(file).expanduser().resolve()
    if not location.is_file():
        raise ImportError(f"cannot load {asked!r}: there is no file {location}")
    # Named after the whole path, so that two files of the same name stay two modules.
    name = f"{_FILE_MODULE}{location.stem}_{hashlib.sha256(str(location).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, location)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {asked!r}: {location} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with on_error(lambda: sys.modules.pop(name)):
        spec.loader.exec_module(module)
    return module


def function_name(fn: Any) -> str:
    """A function for an error sentence: module:name, or file.py:name where `load_function` read it from a file."""
    fn = fn.func if isinstance(fn, functools.partial) else fn
    owner = fn if hasattr(fn, "__qualname__") else type(fn)
    module = sys.modules.get(owner.__module__)
    is_file = module is not None and owner.__module__.startswith(_FILE_MODULE)
    return f"{module.__file__ if module and is_file else owner.__module__}:{owner.__qualname__}"


def kind_of(value: Any) -> str:
    """What a value is, for an error sentence: None, or "a str"."""
    return "None" if value is None else f"a {type(value).__name__}"


def shown(value: Any) -> str:
    """The head of a value's text, for an error sentence; Python shows no int of more than 4300 digits."""
    text, error = attempt(str, value)  # the value is a user's: its own `__str__` may raise anything
    return (f"a value that cannot be shown: {error}" if text is None else text)[:_SHOWN_CHARS]


def is_finite_number(value: Any) -> bool:
    """Whether `float` makes a finite number of a value that is no text: of tensors and arrays of one element, too."""
    if isinstance(value, str | bytes | bytearray | memoryview | None):
        return False  # float(b"1") is 1.0, and fails later where the value is added to a number
    number, _ = attempt(float, value)  # the value is a user's: its own `__float__` may raise anything
    return number is not None and math.isfinite(number)


class SingletonMeta(type):
    """Metaclass of a class with one instance per process; `Cls.clear_instances()` forgets it (tests, a new run)."""

    _instances: dict[type, Any] = {}
    _lock = threading.RLock()  # a constructor may ask for another singleton

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls not in SingletonMeta._instances:
            with SingletonMeta._lock:
                if cls not in SingletonMeta._instances:
                    SingletonMeta._instances[cls] = super().__call__(*args, **kwargs)
        return SingletonMeta._instances[cls]

    def clear_instances(cls) -> None:
        """Forget the instance of this class; the next call makes a new one."""
        SingletonMeta._instances.pop(cls, None)


class Box:
    """Holds one value, so that Ray passes a reference on instead of fetching it."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    @property
    def inner(self) -> Any:
        """The value."""
        return self._inner


def should_run_periodic_action(
    rollout_id: int,
    interval: int | None,
    num_rollout_per_epoch: int | None = None,
    num_rollout: int | None = None,
) -> bool:
    """Whether something done every `interval` rollouts is due; also at epoch ends and, if given, after the last."""
    if interval is None:
        return False
    step = rollout_id + 1
    if num_rollout is not None and step == num_rollout:
        return True
    return step % interval == 0 or bool(num_rollout_per_epoch and step % num_rollout_per_epoch == 0)


def num_weight_versions(rollouts_ahead: int, interval: int) -> int:
    """Versions of the weights, the engines' newest among them, that rollouts which are still to be trained may be of.

    The next one to be trained was begun no earlier than `rollouts_ahead` rollouts ago (--async-buffer-size), and there
    was a weight sync after every `interval`-th of these.
    """
    return 1 + math.ceil(rollouts_ahead / interval)


def stable_hash(*parts: int | str) -> int:
    """A 31-bit hash that is the same in every process and on every machine (Python's `hash` is neither)."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") & 0x7FFFFFFF


def group_by(iterable: Iterable[T], key: Callable[[T], Hashable] | None = None) -> dict[Hashable, list[T]]:
    """Lists of the items that share a key, in the order of first appearance. Without `key` items are their own key."""
    groups: dict[Hashable, list[T]] = {}
    for item in iterable:
        groups.setdefault(key(item) if key else item, []).append(item)
    return groups


def chunks_of_size(items: Iterable[T], most: int, size_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Split items, in order, into lists of at most `most` together; a larger one stands alone."""
    chunk: list[T] = []
    used = 0
    for item in items:
        size = size_of(item)
        if chunk and used + size > most:
            yield chunk
            chunk, used = [], 0
        chunk.append(item)
        used += size
    if chunk:
        yield chunk


def chunk_named_params_by_size(
    named_params: Iterable[tuple[str, Any]], chunk_size: int
) -> Iterator[list[tuple[str, Any]]]:
    """Split (name, tensor) pairs, in order, into lists of at most `chunk_size` bytes; a larger tensor stands alone."""
    return chunks_of_size(named_params, chunk_size, lambda named: named[1].numel() * named[1].element_size())


def decode_int32_meta_array(meta_info: dict[str, Any], keys: str | Iterable[str]) -> torch.Tensor | None:
    """The first of `keys` (or the one) that the engine's `meta_info` has, as a flat int32 tensor; None without any.

    Engines send int32 arrays as base64 text, raw bytes, (nested) lists or arrays.

    Raises:
        ValueError: the value is none of them.
    """
    for key in [keys] if isinstance(keys, str) else keys:
        value = meta_info.get(key)
        if value is None:
            continue
        import numpy as np
        import torch

        try:
            if isinstance(value, str):
                value = base64.b64decode(value, validate=True)
            if isinstance(value, bytes | bytearray):
                value = np.frombuffer(value, dtype=np.int32)
            return torch.from_numpy(np.asarray(value, dtype=np.int32).reshape(-1).copy())  # it may be written to
        except (ValueError, TypeError, OverflowError) as error:
            raise ValueError(f"meta_info[{key!r}] is no int32 array: {error}") from error
    return None


def exec_command(cmd: str, capture_output: bool = False) -> str | None:
    """Run a shell command, echoing it to the log.

    Returns:
        Its standard output when `capture_output`, else None.

    Raises:
        subprocess.CalledProcessError: it did not exit with 0.
    """
    logger.info("exec: %s", cmd)
    done = subprocess.run(["bash", "-c", cmd], check=True, capture_output=capture_output, text=True)
    return done.stdout if capture_output else None


def get_free_port(start_port: int = 10000, consecutive: int = 1) -> int:
    """The first port >= `start_port` such that it and the next `consecutive - 1` ports are free on this host."""
    for port in range(start_port, 65536 - consecutive):
        if all(is_port_available(port + i) for i in range(consecutive)):
            return port
    raise RuntimeError(f"no {consecutive} consecutive free ports from {start_port} up")


def is_port_available(port: int) -> bool:
    """Whether a server could listen on this port of this host now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
        return True


def listen_anywhere(host: str | None = None) -> socket.socket:
    """A socket that listens on a port which the kernel chose: nobody else gets it.

    Args:
        host: the address at which others reach this host, which alone is listened at; where it is none of the host's
            interfaces (behind a translated address), and with None, every address is.
    """
    if host is not None:
        with contextlib.suppress(OSError):
            return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def merged_settings(name: str, given: Any, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return `defaults` with what the entry `name` of the --custom-config-path file says in their place.

    Args:
        given: the entry, a mapping; None where the file has none. A mapping that is in it is merged too.
        defaults: every entry that there is. An empty mapping takes any entries.

    Raises:
        UsageError: an entry is unknown, has another type than its default, or is a number below 1 (a whole one) or 0.
    """
    where = f"{name} in --custom-config-path"
    if given is not None and not isinstance(given, Mapping):
        raise UsageError(f"{where} must be a mapping, not {shown(given)}.")
    merged, problems = dict(defaults), []
    for key, value in (given or {}).items():
        default = defaults.get(key)
        if key not in defaults:
            problems.append(f"{where}: {key!r} is unknown; there is {', '.join(defaults)}.")
        elif isinstance(default, Mapping) and default and isinstance(value, Mapping):
            merged[key] = merged_settings(f"{name}: {key}", value, default)
        elif default is not None and not _is_like(value, default):
            problems.append(
                f"{where}: {key} is {shown(value)}, of another kind than the default {default!r}, or too small."
            )
        else:
            merged[key] = value
    refuse(problems)
    return merged


def _is_like(value: Any, default: Any) -> bool:
    if isinstance(default, bool) or not isinstance(default, int | float):
        return isinstance(value, Mapping if isinstance(default, Mapping) else type(default))
    is_whole = isinstance(default, int)
    return is_finite_number(value) and value >= is_whole and (isinstance(value, int) or not is_whole)


def with_attributes(cls: type[T], attributes: dict[str, Any]) -> T:
    """An object without a call of its `__init__`, which would take every value one by one."""
    made = cls.__new__(cls)
    made.__dict__ = attributes
    return made


def deep_copied(value: Any, memo: dict[int, Any]) -> Any:
    """As copy.deepcopy; a list of numbers or texts, such as tokens, is copied whole, at a twentieth of its time."""
    if type(value) is not list or id(value) in memo or not _PLAIN.issuperset(map(type, value)):
        return copy.deepcopy(value, memo)
    memo[id(value)] = value.copy()
    return memo[id(value)]


def needed(value: T | None) -> T:
    """Return the value of a flag that has one here: a rule of the command line has made sure of it."""
    assert value is not None
    return value


def url_host(host: str) -> str:
    """A host as a URL has it: an IPv6 address in brackets, everything else unchanged."""
    try:
        return f"[{host}]" if ipaddress.ip_address(host).version == 6 else host
    except ValueError:
        return host  # a name, or in brackets already


def get_current_node_ip() -> str:
    """This host's address as other nodes see it: `given_address`, else that of the interface which leads outside.

    127.0.0.1 on a host without a network.

    Raises:
        UsageError: SLIME_HOST_IP is no address of this host.
    """
    if given := given_address(os.environ):
        return given
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 1))  # sends nothing: it only picks the outgoing interface
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def spare_garbage_collector() -> None:
    """Leave what there is now out of garbage collections, and collect less often."""
    gc.collect()
    gc.freeze()  # the imports' million objects and the prompts stay: collections need not look through them again
    # With Python's 700 a rollout of 40,000 samples in flight is looked through so often that it takes twice its time,
    # and each full collection stops the event loop for as long as all samples take: one in 20 million new objects.
    gc.set_threshold(20_000, 20, 50)


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """Let stdout's reader close its end (`| head`): what is left of the block is not done, and nothing is said."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes stdout once more at its end; what is left has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
