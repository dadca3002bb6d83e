"""Write docs/reference/hooks.md, the page of every hook, from the Protocols of slime.rollout.base_types.

    python tools/make_hook_reference.py                 write the page
    python tools/make_hook_reference.py --output FILE   write it somewhere else

A test compares the page with what this makes. It knows no hook: calls, moments and returns come from the Protocols,
defaults and what is not built yet from the flags. Only what stands in for a hook that is not given is said here.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from slime.config.parse import FLAG_CLASSES  # noqa: E402
from slime.rollout.base_types import HOOKS  # noqa: E402
from slime.rollout.hooks.signatures import OPTIONAL_KEYWORDS  # noqa: E402
from slime.rollout.tool_calls import ToolFn  # noqa: E402
from slime.utils.misc import load_function  # noqa: E402

DEFAULT_OUTPUT = ROOT / "docs" / "reference" / "hooks.md"
WITHOUT = {
    "eval_function_path": "that of `--rollout-function-path`",
    "custom_generate_function_path": "one call to the engine's /generate (`slime.rollout.sglang_rollout.generate`)",
    "custom_rm_path": "the reward that `--rm-type`, or `rm_type` in a row's metadata, names",
    "dynamic_sampling_filter_path": "every group is kept",
    "buffer_filter_path": "first in, first out (`slime.rollout.data_source.pop_first`)",
    "custom_reward_post_process_path": "normalisation by group, as `--advantage-estimator` needs it",
    "custom_convert_samples_to_train_data_path": "`slime.rollout.train_data.samples_to_train_data`",
    "custom_rollout_log_function_path": "slime's metrics",
    "custom_eval_rollout_log_function_path": "slime's metrics",
    "custom_model_provider_path": "Megatron's GPT, as the flags describe it",
    "custom_advantage_function_path": "what `--advantage-estimator` says",
    "custom_tis_function_path": "truncated importance sampling",
    "custom_pg_loss_reducer_function_path": "what `--loss-agg-mode` says",
}
SHIPPED = {
    "--rollout-function-path": [
        "slime.rollout.sglang_rollout.generate_rollout",
        "slime.rollout.fully_async_rollout.generate_rollout_fully_async",
        "slime.rollout.sft_rollout.generate_rollout",
        "slime.rollout.forge_load.generate_rollout",
        "slime.rollout.sleep_rollout.sleep",
        "slime_plugins.rollout_buffer.rollout_buffer_example.generate_rollout",
    ],
    "--custom-generate-function-path": [
        "slime.agent.generate",
        "slime.rollout.multi_turn.generate",
        "slime.rollout.sglang_streaming_rollout.generate_streaming",
    ],
    "--custom-rm-path": ["slime.rollout.on_policy_distillation.reward_func"],
    "--custom-reward-post-process-path": ["slime.rollout.on_policy_distillation.post_process_rewards"],
    "--dynamic-sampling-filter-path": [
        "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std",
        "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std_with_fallback",
    ],
    "--data-source-path": [
        "slime.rollout.data_source.RolloutDataSourceWithBuffer",
        "slime.rollout.data_source.RolloutDataSource",
    ],
}
INTRODUCTION = """# Hooks

Made by `python tools/make_hook_reference.py` from the Protocols in `slime/rollout/base_types.py`; do not edit.
[customization.md](../customization.md) explains the most used ones with examples.

A hook is a function (or class) of yours that a flag names in one of three forms:

| form | example |
|---|---|
| module and attribute, with a dot | `my_package.agent.generate` |
| module and attribute, with a colon | `my_package.agent:generate` |
| file and attribute | `path/to/agent.py:generate` |

It is loaded before anything starts, and refused with a sentence when it is not found or cannot be called as below.
Arguments in front of `*` are passed by position, so you may name them as you like; those behind it by name. `args` has
every flag of the run under its name with underscores; a `Group` is a list of `slime.utils.types.Sample`, those of one
prompt. A function that returns something else is named in an error with its flag.
"""
INDIRECT = """## Hooks that no flag names

| where | what | called as |
|---|---|---|
| an entry of `--eval-config` | `custom_rm_path`, `custom_generate_function_path` | their flags; for this set only |
| `Sample.custom_rm_path` | scores this sample; wins over the flag, not with `--group-rm` | `--custom-rm-path` |
| `Sample.generate_function_path` | completes this sample; wins over the flag | `--custom-generate-function-path` |
| the file of `--custom-config-path` | `tool_function_path`, read by `slime.rollout.multi_turn` | below |
"""


def render() -> str:
    """The whole page, as Markdown."""
    attributes: dict[type, list[str]] = {}
    for attribute, protocol in HOOKS.items():
        attributes.setdefault(protocol, []).append(attribute)
    sections = ["\n".join(_section(protocol, names)) for protocol, names in attributes.items()]
    return "\n".join([INTRODUCTION, *sections, INDIRECT, "\n".join(_tool_section()), "\n".join(_shipped())])


def _section(protocol: type, attributes: list[str]) -> Iterator[str]:
    about = parts_of(protocol)
    fields = _fields()
    yield "## " + ", ".join(f"`{option_of(attribute)}`" for attribute in attributes) + "\n"
    yield about["summary"] + "\n"
    yield f"```python\n{signature_of(protocol)}\n```\n"
    yield f"- **Called** {about['Called']}"
    if optional := OPTIONAL_KEYWORDS.get(protocol):
        names = " and ".join(f"`{name}=`" for name in optional)
        yield f"- **Also passed** if the function has such a parameter: {names}."
    yield f"- **Returns** {about['Returns']}"
    for attribute in attributes:
        given = f" ({option_of(attribute)})" if len(attributes) > 1 else ""
        yield f"- **Without it**{given}: {_without(attribute, fields[attribute].default)}."
    yield f"- **Path**: {_examples(protocol)}\n"


def parts_of(protocol: type) -> dict[str, str]:
    """The summary of a Protocol's docstring without its flags, and its paragraphs by their name."""
    text = inspect.cleandoc(protocol.__doc__ or "")
    head, _, rest = text.partition("\n\n")
    parts = {"summary": _sentence(head.partition(": ")[2])}
    for name, body in re.findall(r"^(\w+): (.*?)(?=^\w+: |\Z)", rest, flags=re.DOTALL | re.MULTILINE):
        parts[name] = " ".join(body.split())
    return parts


def signature_of(protocol: type, name: str = "fn") -> str:
    """The call of a Protocol as Python writes it."""
    call: Any = protocol.__call__
    signature = inspect.signature(call)
    parameters = list(signature.parameters.values())[1:]
    shown = [str(p).replace(": '", ": ").replace("'", "") for p in parameters]
    kinds = [p.kind for p in parameters]
    if inspect.Parameter.KEYWORD_ONLY in kinds:
        shown.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    line = f"{name}({', '.join(shown)}) -> {signature.return_annotation}"
    if len(line) <= 110:
        return line
    return f"{name}(\n" + textwrap.indent(",\n".join(shown), "    ") + f",\n) -> {signature.return_annotation}"


def option_of(attribute: str) -> str:
    """The flag of an attribute."""
    return "--" + attribute.replace("_", "-")


def _fields() -> dict[str, dataclasses.Field[Any]]:
    return {field.name: field for flags in FLAG_CLASSES for field in dataclasses.fields(flags)}


def _without(attribute: str, default: Any) -> str:
    return f"`{default}`" if isinstance(default, str) else WITHOUT.get(attribute, "nothing is called")


def _examples(protocol: type) -> str:
    is_class = protocol.__name__ == "DataSourceClass"
    words = re.sub(r"(?<!^)(?=[A-Z])", "_", protocol.__name__.removesuffix("Fn")).lower()
    name = "MyDataSource" if is_class else f"my_{words}"
    forms = (f"my_package.hooks.{name}", f"my_package.hooks:{name}", f"path/to/hooks.py:{name}")
    return ", ".join(f"`{form}`" for form in forms)


def _tool_section() -> Iterator[str]:
    yield f"```python\n{signature_of(ToolFn, 'tool')}\n```\n"
    yield " ".join(_sentence(inspect.cleandoc(ToolFn.__doc__ or "").partition(": ")[2]).split()) + "\n"


def _shipped() -> Iterator[str]:
    yield "## Functions that come with slime\n"
    yield "| flag | path | what it does |\n|---|---|---|"
    for option, paths in SHIPPED.items():
        for path in paths:
            summary = inspect.cleandoc(load_function(path).__doc__ or "").partition("\n\n")[0]
            yield f"| `{option}` | `{path}` | {' '.join(summary.split()).replace('|', chr(92) + '|')} |"
    yield ""


def _sentence(text: str) -> str:
    text = " ".join(text.split())
    return text[:1].upper() + text[1:]


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
