"""Write docs/reference/flags.md, the page of every flag, from the parser itself.

    python tools/make_flag_reference.py                 write the page
    python tools/make_flag_reference.py --output FILE   write it somewhere else

A test compares the page with what this makes. Names, types, defaults and meanings come from the parser, and what
works from the classification that a run uses. SGLang's and the router's options belong to the
installed packages and are not listed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from slime.config.ask import type_of  # noqa: E402
from slime.config.parse import CommandLine  # noqa: E402
from slime.config.parser import OLDER_NAMES  # noqa: E402
from slime.config.sglang.options import OWNED, ROUTER_OWNED  # noqa: E402

DEFAULT_OUTPUT = ROOT / "docs" / "reference" / "flags.md"
INTRODUCTION = """# Flags

Made by `python tools/make_flag_reference.py`; do not edit.

A flag that is unknown, has a wrong value or contradicts another ends the command line with status 2 before anything
starts; one that has no effect with the others is named in a warning (`--strict-flags` makes that an error). On
the command line: `python train.py --help GROUP`, `--explain FLAG`, `--list-unsupported`.

*Status* is **works**; **no effect here** (accepted, named in one warning, with the reason); **not supported** (a run
that gives it another value than its default is refused; `--dry-run` plans it all the same).
"""
FIRST = {  # the ten that a first run of one's own sets, and the page about each
    "--hf-checkpoint": "[your own data](../start/own_data.md)",
    "--prompt-data": "[your own data](../start/own_data.md)",
    "--custom-rm-path": "[your own reward](../start/own_reward.md)",
    "--rollout-batch-size": "[choosing](../choosing.md#batch-and-train-steps-per-rollout)",
    "--n-samples-per-prompt": "[choosing](../choosing.md#group-size)",
    "--global-batch-size": "[choosing](../choosing.md#batch-and-train-steps-per-rollout)",
    "--rollout-max-response-len": "[choosing](../choosing.md#length)",
    "--lr": "[choosing](../choosing.md#learning-rate)",
    "--num-rollout": "[first run](../quick_start.md)",
    "--output-dir": "[files written](files.md)",
}
TEN = """## The ten that matter first

Nearly every command line sets these. Next come `--colocate` or `--rollout-num-gpus` (where a run is placed:
[several GPUs](../start/several_gpus.md)) and `--max-tokens-per-gpu` (memory: [cut memory](../cut_memory.md)).
"""
ENGINES = """## Engines (`--sglang-*`) and router (`--router-*`)

Every option of the installed SGLang server is there with `--sglang-` in front, every option of the installed router
with `--router-`: `python train.py --help sglang`, `--help router`. These are set by slime and refused:
"""


def render() -> str:
    """The whole page, as Markdown."""
    command_line = CommandLine()
    options = command_line.parser.options()
    first = ((f"`{name}`", _default(options[name]), _meaning(options[name]), page) for name, page in FIRST.items())
    parts = [INTRODUCTION, TEN, _table(("flag", "default", "meaning", "page"), first)]
    for group in command_line.parser._action_groups:
        if group._group_actions and not str(group.title).startswith(("SGLang", "Router")):
            parts += [f"## {group.title}\n", *([f"{group.description}\n"] if group.description else [])]
            parts.append(_table(("flag", "type", "default", "meaning", "status"), _rows(command_line, group)))
    parts += [ENGINES, _table(("option", "instead"), _owned())]
    parts += [
        "## Older names\n",
        _table(("older name", "name"), ((f"`{a}`", f"`{b}`") for a, b in OLDER_NAMES.items())),
    ]
    return "\n".join(parts)


def _rows(command_line: CommandLine, group: argparse._ArgumentGroup) -> Iterator[tuple[str, ...]]:
    for action in group._group_actions:
        names = ", ".join(f"`{name}`" for name in action.option_strings)
        yield names, type_of(action), _default(action), _meaning(action), str(command_line.status_of(action))


def _default(action: argparse.Action) -> str:
    return "" if action.default in (None, False, argparse.SUPPRESS, [], {}) else f"`{action.default}`"


def _meaning(action: argparse.Action) -> str:
    return " ".join((action.help or "").replace("%%", "%").split()).replace("%(default)s", str(action.default))


def _owned() -> Iterator[tuple[str, str]]:
    for name, remedy in OWNED.items():
        yield f"`--sglang-{name.replace('_', '-')}`", remedy
    for name, remedy in ROUTER_OWNED.items():
        yield f"`--{name.replace('_', '-')}`", remedy


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def main() -> None:
    """Command line of this tool."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, help="file to write")
    output = parser.parse_args().output
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(render())
    print(f"wrote {output}")


if __name__ == "__main__":
    main()
