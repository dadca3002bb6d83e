"""`Args`: the parsed flags, read-only once they are checked, and the copy of them that hooks may assign to."""

from __future__ import annotations

import argparse
from typing import Any

from slime.utils.api_keys import make_keys
from slime.utils.misc import hook_args


class Args(argparse.Namespace):
    """A Namespace that can be frozen. Copies and pickles (Ray sends it to every actor) stay frozen."""

    __slots__ = ("_copy", "_frozen")

    @property
    def is_frozen(self) -> bool:
        """Whether setting an attribute is an error."""
        try:
            return bool(object.__getattribute__(self, "_frozen"))
        except AttributeError:
            return False

    @property
    def for_hooks(self) -> Args:
        """The copy that hooks of this process get as `args` (`slime.utils.misc.hook_args`); not frozen."""
        if not self.is_frozen:
            return self
        copy: Args = object.__getattribute__(self, "_copy")
        return copy

    def freeze(self) -> Args:
        """Make every later change an error; returns itself."""
        if not self.is_frozen:
            # Before anyone else has the object: threads that asked for it at the same time would get two.
            object.__setattr__(self, "_copy", self.replace())
            object.__setattr__(self, "_frozen", True)
        return self

    def replace(self, **changes: Any) -> Args:
        """A copy with other values (and new attributes), frozen if this is."""
        changed = Args()
        vars(changed).update(vars(self) | changes)  # not one by one through __setattr__
        return changed.freeze() if self.is_frozen else changed

    def __setattr__(self, name: str, value: Any) -> None:
        if self.is_frozen:
            raise AttributeError(
                f"args.{name} cannot be set: flags do not change after parse_args; use args.replace({name}=...)"
            )
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if self.is_frozen:
            raise AttributeError(f"args.{name} cannot be deleted: flags do not change after parse_args")
        super().__delattr__(name)

    def __getstate__(self) -> tuple[dict[str, Any], bool]:
        return dict(vars(self)), self.is_frozen

    def __setstate__(self, state: tuple[dict[str, Any], bool]) -> None:
        values, is_frozen = state
        vars(self).update(values)
        if is_frozen:
            self.freeze()


def with_run_keys(args: Args) -> Args:
    """The flags with the keys of the run's servers as `run_keys`, whose text shows none of them.

    Args:
        args: reads `api_key_per_run`, `sglang_overrides` and `router_overrides`; without engines it stays as it is.
    """
    if args.debug_train_only:
        return args
    router, engine = args.router_overrides.get("api_key"), args.sglang_overrides.get("api_key")
    return args.replace(run_keys=make_keys(is_wanted=args.api_key_per_run, router=router, engine=engine))


def publish_runtime(
    args: argparse.Namespace,
    *,
    sglang_router_ip: str,
    sglang_router_port: int,
    sglang_model_routers: dict[str, tuple[str, int]],
) -> None:
    """Write what exists only once the engines run into `args`, for generate and reward functions that read it there.

    The only place that changes frozen args; RolloutManager calls it once, on its own copy.
    """
    for values in (args, hook_args(args)):
        vars(values).update(
            sglang_router_ip=sglang_router_ip,
            sglang_router_port=sglang_router_port,
            sglang_model_routers=sglang_model_routers,
        )
