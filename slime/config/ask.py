"""Questions about the command line that are answered instead of starting a run.

`--help [GROUP]`, `--explain FLAG`, `--list-unsupported`, `--completion SHELL`: each becomes a text. It reads the
parser and the classification of flags that it is given, and knows no flag by itself.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slime.config.parser import Parser
from slime.utils.errors import UsageError, nearest
from slime.utils.http.api_keys import without_secrets

HELP = ("-h", "--help")
SHELLS = ("bash", "zsh", "tcsh")

# What shtab writes completes the program called `train.py`; users call it through an interpreter or a run script.
_BASH_WRAPPER = """
_slime_interpreter() {
  case "${COMP_WORDS[1]}" in
    *train.py|*train_async.py|*run-*.sh)
      COMP_WORDS=("${COMP_WORDS[@]:1}"); COMP_CWORD=$((COMP_CWORD - 1)); _shtab_train_py ;;
  esac
}
complete -o filenames -o default -F _slime_interpreter python python3 bash
"""


@dataclass(frozen=True)
class FlagStatus:
    """What a flag does today.

    Attributes:
        kind: "works", "no effect here" or "not supported".
        why: the reason.
    """

    kind: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.kind} ({self.why})" if self.why else self.kind


def value_after(tokens: Sequence[str], *names: str) -> str | None:
    """The value of a question: what follows `=` or the next word; None where there is none."""
    for token, following in zip(tokens, [*tokens[1:], "--"], strict=True):
        name, equals, value = token.partition("=")
        if name in names:
            return value if equals else None if following.startswith("-") and name in HELP else following
    return None


def help_text(parser: Parser, group: str | None, *, own_titles: Sequence[str]) -> str:
    """The help of one group of flags, or the overview.

    Args:
        group: part of a group's title ("rollout", "megatron", "sglang", ...), else of names of flags ("wandb"); "all";
            or None for the overview.
        own_titles: titles of slime's own groups, which the overview has in full.

    Raises:
        UsageError: no group has such a title, and no flag such a name.
    """
    titled = [one for one in parser._action_groups if one.title and one._group_actions]
    if group == "all":
        return parser.format_help()
    if group is None:
        rest = [str(one.title) for one in titled if one.title not in own_titles]
        text = _format(parser, [one for one in titled if one.title in own_titles], with_usage=True)
        return (
            f"{text}\nMore flags, by group (--help GROUP; a part of its name or of a flag's is enough, --help all for "
            "everything):\n" + "".join(f"  {title}\n" for title in rest)
        )
    chosen = [one for one in titled if group.lower() in str(one.title).lower()]
    named = [one for one in parser._actions if any(group.lower() in name for name in one.option_strings)]
    if not chosen and named:
        formatter = parser._get_formatter()
        formatter.start_section(f"Flags with {group} in their names")
        formatter.add_arguments(named)
        formatter.end_section()
        return formatter.format_help()
    if not chosen:
        titles = {str(one.title).lower(): str(one.title) for one in titled}
        near = [titles[name] for name in nearest(group.lower(), titles)]
        hint = f"did you mean {' or '.join(near)}?" if near else "--help alone lists them."
        raise UsageError(f"--help {group}: no group of flags has such a name; {hint}")
    return _format(parser, chosen)


def _format(parser: Parser, groups: Iterable[argparse._ArgumentGroup], *, with_usage: bool = False) -> str:
    formatter = parser._get_formatter()
    if with_usage:
        formatter.add_usage(parser.usage, parser._actions, parser._mutually_exclusive_groups)
        formatter.add_text(parser.description)
    for group in groups:
        formatter.start_section(group.title)
        formatter.add_text(group.description)
        formatter.add_arguments(group._group_actions)
        formatter.end_section()
    if with_usage:
        formatter.add_text(parser.epilog)
    return formatter.format_help()


def refusals_text(rows: Iterable[tuple[Sequence[str], str]]) -> str:
    """The answer to `--list-unsupported`.

    Args:
        rows: (options, why a run refuses them).
    """
    lines = ["Every flag of slime works. A run refuses these flags of Megatron's:"]
    for options, reason in rows:
        lines += ["", textwrap.fill(", ".join(options), 110), textwrap.indent(textwrap.fill(reason, 106), "    ")]
    return "\n".join(lines) + "\n"


def explanation(
    parser: Parser,
    name: str,
    *,
    older_names: Mapping[str, str],
    status_of: Callable[[argparse.Action], FlagStatus],
    values: Mapping[str, Any],
    explicit: frozenset[str],
) -> str:
    """What one flag is, whether it works, and what it is on this command line.

    Args:
        name: the flag, with or without dashes, or its attribute.
        older_names: older name -> current name.
        status_of: what a flag does today.
        values: attribute -> value after derivation.
        explicit: attributes whose flags were given.

    Raises:
        UsageError: there is no such flag.
    """
    options = parser.options()
    flag = "--" + name.lstrip("-").replace("_", "-")
    flag = older_names.get(flag, flag)
    by_dest = {action.dest: action for action in parser._actions}
    action = options.get(flag) or by_dest.get(name.lstrip("-").replace("-", "_"))
    if action is None:
        raise UsageError(f"--explain: {parser.did_you_mean(flag)}")
    group = next((one.title for one in parser._action_groups if action in one._group_actions), "")
    older = [old for old, current in older_names.items() if current in action.option_strings]
    value = values.get(action.dest)
    shown = without_secrets({action.dest: value})[action.dest]
    source = "given" if action.dest in explicit else "the default" if value == action.default else "derived"
    rows = {
        "group": group,
        "meaning": " ".join((action.help or "").replace("%%", "%").split()).replace(
            "%(default)s", str(action.default)
        ),
        "type": type_of(action),
        "default": action.default,
        "attribute": f"args.{action.dest}",
        "older name": ", ".join(older),
        "status": status_of(action),
        "on this line": f"{shown} ({source})" if action.dest in values else "",
    }
    lines = [", ".join(action.option_strings)]
    lines += [f"  {title + ':':14} {text}" for title, text in rows.items() if str(text) != ""]
    return "\n".join(lines) + "\n"


def type_of(action: argparse.Action) -> str:
    """What values a flag takes, in a word or two."""
    if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
        return "switch"
    kind = getattr(action.type, "__name__", "str")
    text = "one of " + ", ".join(map(str, action.choices)) if action.choices else kind.replace("json_object", "JSON")
    return f"{text}, several" if action.nargs in ("+", "*") else text


def completion_script(parser: Parser, shell: str) -> str:
    """The completion script of a shell, made by shtab.

    Raises:
        UsageError: the shell is unknown, or shtab is not installed.
    """
    if shell not in SHELLS:
        raise UsageError(f"--completion {shell}: there are {', '.join(SHELLS)}.")
    try:
        import shtab
    except ImportError as error:
        raise UsageError("--completion needs the package shtab: pip install shtab.") from error
    # the name of a shell
    script = str(shtab.complete(parser, shell=shell))  # nosec B604
    return script + _BASH_WRAPPER if shell == "bash" else script
