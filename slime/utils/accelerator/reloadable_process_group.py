"""Process groups that can be put away and made anew behind the objects that hold them.

A NCCL communicator keeps hundreds of MB on its GPU that torch_memory_saver does not manage: only destroying the group
frees them. Megatron, its optimizer and its gradient buffers hold groups, though, and would go on holding dead ones.
So `install` has `torch.distributed.new_group` hand out a `ReloadableProcessGroup`, which forwards to the real group:
`destroy_process_groups` ends the real ones, `reload_process_groups` makes them again with the same ranks and options.
The default group has no such shell: torch looks it up anew at every call.

It does not know who uses a group, nor when the trainer sleeps. Groups that `new_group` did not make (the one with the
engines) are not its business. While there is any, the default group stays: torch ends all groups with it.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from slime.utils import accelerator
from slime.utils.accelerator.memory_saver import outside_saver

logger = logging.getLogger(__name__)

OWN = ("rank", "size", "shutdown", "abort", "boxed", "unbox")
"""Methods that the shell has itself."""
TABLES = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "pg_to_tag")
"""Where torch looks up a group: its backend, name, ranks, ..."""


class ReloadableProcessGroup(dist.ProcessGroup):
    """A shell around a group that may be replaced.

    Args:
        group: the real one.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group.rank(), group.size())
        self.put_in(group)

    @property
    def live(self) -> dist.ProcessGroup:
        """The real group.

        Raises:
            RuntimeError: it is put away.
        """
        if self._group is None:
            raise RuntimeError("this process group is put away: the trainer sleeps, and must be woken up first")
        return self._group

    def put_in(self, group: dist.ProcessGroup) -> None:
        """Forward to `group` from now on; torch finds the shell where it finds the group."""
        self._group: dist.ProcessGroup | None = group
        for table in TABLES:
            entries = getattr(c10d._world, table)
            entries[self] = entries[group]

    def take_out(self) -> dist.ProcessGroup:
        """The real group, which the shell lets go of."""
        group, self._group = self.live, None
        for table in TABLES:
            getattr(c10d._world, table).pop(self, None)
        return group

    def shutdown(self) -> None:
        """Nothing: whoever ends all groups of torch's tables finds the real one there, too."""

    def abort(self) -> None:
        """Nothing, as `shutdown`."""


def _forward(name: str) -> property:
    return property(lambda shell: getattr(shell.live, name))


for _name, _member in inspect.getmembers(dist.ProcessGroup):
    is_forwarded = inspect.isroutine(_member) or inspect.isdatadescriptor(_member)
    if is_forwarded and not _name.startswith(("__", "_pybind11")) and _name not in OWN:
        setattr(ReloadableProcessGroup, _name, _forward(_name))


@dataclass
class _Groups:
    """What is needed to make every group of this process again.

    Attributes:
        default: keyword arguments of `init_process_group`, without the store.
        store: of the default group as it was first.
        new_group: torch's,
        batch_isend_irecv: likewise.
        made: (arguments of `new_group`, the shell or None where this rank is no member), in the order of the calls,
            which is the same on every rank.
        reloads: how often groups were made again; each time needs keys of its own in the store.
        are_away: they are destroyed at present.
        default_is_away: the default group was destroyed, too.
    """

    default: dict[str, Any]
    store: dist.Store
    new_group: Callable[..., Any]
    batch_isend_irecv: Callable[..., Any]
    made: list[tuple[dict[str, Any], ReloadableProcessGroup | None]] = field(default_factory=list)
    reloads: int = 0
    are_away: bool = False
    default_is_away: bool = False

    @property
    def shells(self) -> list[ReloadableProcessGroup]:
        return [shell for _, shell in self.made if shell is not None]


class _Installed:
    """The one owner of this process's groups; None where nothing is reloadable."""

    groups: _Groups | None = None


def install(*, backend: str, timeout: timedelta) -> None:
    """Make every group reloadable that is made from now on; to be called once, right after `init_process_group`.

    Args:
        backend: of the default group, as given to `init_process_group`.
        timeout: likewise.
    """
    if _Installed.groups is not None:
        raise RuntimeError("process groups are reloadable already")
    place = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    default = {"backend": backend, "timeout": timeout, **place}
    groups = _Groups(default, c10d._get_default_store(), dist.new_group, dist.batch_isend_irecv)
    _Installed.groups = groups
    signature = inspect.signature(dist.new_group)

    @functools.wraps(dist.new_group)
    def new_group(*args: Any, **kwargs: Any) -> Any:
        given = dict(signature.bind(*args, **kwargs).arguments)
        found = groups.new_group(**given)
        shell = ReloadableProcessGroup(found) if isinstance(found, dist.ProcessGroup) else None
        groups.made.append((given, shell))
        return found if shell is None else shell

    dist.new_group = new_group
    dist.batch_isend_irecv = functools.partial(_batch_isend_irecv, groups.batch_isend_irecv)


def uninstall() -> None:
    """Forget all groups, which have ended, and undo `install`; nothing happens where nothing is installed."""
    if _Installed.groups is not None:
        dist.new_group = _Installed.groups.new_group
        dist.batch_isend_irecv = _Installed.groups.batch_isend_irecv
        _Installed.groups = None


def _batch_isend_irecv(of_torch: Callable[..., Any], p2p_op_list: Sequence[dist.P2POp]) -> Any:
    """torch's, given real groups: for any other class it does not batch, and unbatched NCCL sends can deadlock."""
    for op in p2p_op_list:
        if isinstance(op.group, ReloadableProcessGroup):
            op.group = op.group.live
    return of_torch(p2p_op_list)


def destroy_process_groups(*, default_too: bool = True) -> None:
    """End every reloadable group (collective: every rank calls it, with nothing in flight).

    A world of one rank keeps its groups: their communicators can be small, and ending one takes NCCL half a second.
    Those of a larger world end side by side, for the same reason.

    Args:
        default_too: also the default group, unless a group is there that is not reloadable.

    Raises:
        RuntimeError: nothing is installed, or they are destroyed already.
    """
    groups = _installed()
    if dist.get_world_size() == 1:
        return
    groups.are_away = True
    away = [shell.take_out() for shell in groups.shells]
    default = c10d._get_default_group()
    others = set(c10d._world.pg_names) - set(away) - {default}
    groups.default_is_away = default_too and not others
    _shut_down([*away, default] if groups.default_is_away else away)
    if groups.default_is_away:
        dist.destroy_process_group()
        return
    for group in reversed(away):
        dist.destroy_process_group(group)


def _shut_down(ended: Sequence[dist.ProcessGroup]) -> None:
    """End the NCCL communicators of these groups; torch, asked to destroy them, would end one after another."""
    nccl = [group for group in ended if dist.get_backend(group) == "nccl"]
    if nccl:
        device = accelerator.current_device().index
        with ThreadPoolExecutor(len(nccl), initializer=accelerator.set_device, initargs=(device,)) as pool:
            list(pool.map(lambda group: group.shutdown(), nccl))


def reload_process_groups() -> None:
    """Make again what `destroy_process_groups` ended (collective).

    Raises:
        RuntimeError: nothing is installed.
    """
    groups = _installed()
    if not groups.are_away:
        return
    groups.are_away = False
    groups.reloads += 1
    with outside_saver():
        if groups.default_is_away:
            store = dist.PrefixStore(f"reload_{groups.reloads}", groups.store)
            dist.init_process_group(store=store, **groups.default)
            groups.default_is_away = False
        for given, shell in groups.made:
            made = groups.new_group(**given)
            if shell is not None:
                shell.put_in(made)


def _installed() -> _Groups:
    if _Installed.groups is None:
        raise RuntimeError("no process group is reloadable: install() was not called")
    return _Installed.groups
