#!/usr/bin/env python3
"""Write the types of Megatron's and SGLang's flags, for mypy: slime/config/megatron/values.pyi and sglang/values.pyi.

    python tools/make_args_stubs.py [--check]

They are what the installed packages' parsers say. `--check` writes nothing; its status is 1 where they are stale.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from slime.config.megatron.arguments import add_megatron_arguments  # noqa: E402
from slime.config.sglang.options import add_sglang_arguments, sglang_tables  # noqa: E402

CONFIG = ROOT / "slime" / "config"
# Functions that read a value -> its type. What is not here is text.
TYPES = {
    "int": "int",
    "float": "float",
    "human_readable_int": "int",
    "int_pair": "tuple[int, int]",
    "layer_pattern": "int | list[int]",
    "loads": "dict[str, object]",
    "json_list_type": "list[object]",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; end with status 1 where a stub is stale")
    options = parser.parse_args()
    stale = []
    for path, text in stubs().items():
        if path.is_file() and path.read_text() == text:
            continue
        stale.append(str(path.relative_to(ROOT)))
        if not options.check:
            path.write_text(text)
    if options.check and stale:
        sys.exit(f"stale: {', '.join(stale)}; run python tools/make_args_stubs.py")


def stubs() -> dict[Path, str]:
    """Return path -> text of each stub."""
    megatron, sglang = argparse.ArgumentParser(add_help=False), argparse.ArgumentParser(add_help=False)
    add_megatron_arguments(megatron)
    add_sglang_arguments(sglang, sglang_tables())
    return {
        CONFIG / "megatron" / "values.pyi": stub("MegatronValues", megatron),
        CONFIG / "sglang" / "values.pyi": stub("SglangValues", sglang),
    }


def stub(name: str, parser: argparse.ArgumentParser) -> str:
    """Return a class with one typed attribute for each option of `parser`."""
    actions: dict[str, list[argparse.Action]] = {}
    for action in parser._actions:
        if action.dest != argparse.SUPPRESS:
            actions.setdefault(action.dest, []).append(action)
    lines = [f"    {dest}: {annotation(several)}" for dest, several in actions.items()]
    return "\n".join(["# Written by tools/make_args_stubs.py.", "", f"class {name}:", *lines, ""])


def annotation(actions: list[argparse.Action]) -> str:
    """Return the type of an attribute that these options set."""
    kinds = {kind for action in actions for kind in _kinds(action)}
    if actions[0].default is None:
        kinds |= {"None"}
    return " | ".join(sorted(kinds, key=lambda kind: (kind == "None", kind)))


def _kinds(action: argparse.Action) -> list[str]:
    if action.nargs == 0:
        const = action.const if action.const is not None else True
        return [type(const).__name__]
    kind = TYPES.get(getattr(action.type, "__name__", "str"), "str")
    if action.nargs in ("+", "*"):
        return [f"list[{kind}]", *([kind] if isinstance(action.default, str | float) else [])]
    return [kind]


if __name__ == "__main__":
    main()
