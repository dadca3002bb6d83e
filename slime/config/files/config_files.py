"""The files that stand for flags: what `--custom-config-path` and `--megatron-config-path` set goes into args.

It reads no other file and derives nothing.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Mapping

from slime.config.args import Args
from slime.config.files import roles
from slime.config.files.custom_config import FileValues, apply_known, custom_config_values
from slime.config.problems import Problems, read_file

logger = logging.getLogger(__name__)


def apply_config_files(
    args: Args,
    explicit: set[str],
    problems: Problems,
    *,
    options: Mapping[str, argparse.Action],
    explain_unknown: Callable[[str], str | None],
) -> tuple[FileValues, dict[roles.Role, FileValues]]:
    """Set what the files say, as if it were on the command line; warnings are logged.

    Args:
        args: the parsed flags; changed. `megatron_role_values` is added: role -> attribute -> value.
        explicit: attributes whose flags are given; changed.
        problems: gets what is wrong with the files.
        options: option string -> action, of the parser.
        explain_unknown: gives the sentence for an option that deserves another than "did you mean".

    Returns:
        What the custom config sets, whose `extra` goes into args by `apply_extra` once everything is derived; and what
        the entries of roles set.
    """

    def read_custom(path: str) -> FileValues:
        return custom_config_values(path, options, explain_unknown=explain_unknown)

    path = args.custom_config_path
    custom = (read_file(problems, read_custom, path) if path else None) or FileValues()
    warnings = [*custom.warnings, *apply_known(args, explicit, custom)]
    path = args.megatron_config_path
    by_role = (read_file(problems, roles.role_overrides, path, options) if path else None) or {}
    vars(args)["megatron_role_values"] = roles.role_values(args, by_role)
    if "actor" in by_role:
        warnings += apply_known(args, explicit, by_role["actor"])
    for values in (custom, *by_role.values()):
        problems.wrong += values.problems
    for warning in [*warnings, *(text for values in by_role.values() for text in values.warnings)]:
        logger.warning("%s", warning)
    problems.wrong += roles.critic_problems(by_role, args.advantage_estimator)
    problems.environment += roles.missing_critic(by_role)
    return custom, by_role
