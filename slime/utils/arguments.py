"""Public path of `parse_args`, and of what drivers of upstream call next to it."""

from __future__ import annotations

import argparse
from typing import Any

from slime.config import roles
from slime.config.args import Args
from slime.config.parse import parse_args
from slime.utils.errors import UsageError

__all__ = ["parse_args", "parse_megatron_role_args", "reset_arg", "slime_validate_args"]


def reset_arg(parser: argparse.ArgumentParser, name: str, **kwargs: Any) -> None:
    """Add a flag, or change the default of the one that the parser has; for `parse_args(add_custom_arguments)`.

    Args:
        parser: as `add_custom_arguments` gets it: it has Megatron's flags. slime's own are added later and win.
        name: option string, "--lr-decay-style".
        kwargs: as for `add_argument`; of a flag that is there only `default` is read.
    """
    known = parser._option_string_actions.get(name)
    if known is None:
        parser.add_argument(name, **kwargs)
    else:
        parser.set_defaults(**{known.dest: kwargs.get("default", known.default)})


def slime_validate_args(args: Args) -> None:
    """Accept args of `parse_args`, which has derived and validated them before it froze them.

    Raises:
        UsageError: they come from elsewhere, so nothing has checked them.
    """
    if not (isinstance(args, Args) and args.is_frozen):
        raise UsageError("slime_validate_args takes what parse_args returns; give changes as flags, in its argv")


def parse_megatron_role_args(base_args: Args, megatron_config_path: str | None, role: roles.Role) -> Args:
    """`slime.config.roles.parse_megatron_role_args`; the file is the one that `base_args` were made with.

    Raises:
        UsageError: it is another file, which was not checked.
    """
    if megatron_config_path != base_args.megatron_config_path:
        raise UsageError(f"give {roles.FLAG} {megatron_config_path} to parse_args, which checks it")
    return roles.parse_megatron_role_args(base_args, role)
