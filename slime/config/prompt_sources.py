"""Which files the prompts of training come from, how often each is drawn, and how each is graded and sampled.

One file is what `--prompt-data` and the flags say. Several files, or a YAML file with `datasets` and `defaults` (as
--eval-config has them), are a mixture: every field is resolved as data set > `defaults` > flags.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field

from slime.utils.errors import UsageError, sentences
from slime.utils.eval_config import (
    NARROWER,
    PROMPTS_FLAG,
    FileForm,
    PromptSource,
    source_of,
    sources_of,
    values_of_flags,
)
from slime.utils.files.yaml_config import load_yaml

if TYPE_CHECKING:
    from slime.config.args import Args
    from slime.utils.types import Sample

SUFFIXES = (".yaml", ".yml")
_MOST = 1e12  # a weight; their sum has to be a number, too
_SAME = ("input_key", "label_key", "tool_key", "metadata_key", "multimodal_keys", "apply_chat_template")
_FROM_ARGS = {name: (name,) for name in (*_SAME, "apply_chat_template_kwargs")}
_FROM_ARGS["max_prompt_len"] = ("rollout_max_prompt_len",)


def _weight(value: Any) -> Any:
    """A number above 0, or a schedule from rollout 0 on.

    Raises:
        ValueError: with the reason.
    """
    numbers = list(value.values()) if isinstance(value, dict) else [value]
    if not all(isinstance(number, int | float) and not isinstance(number, bool) for number in numbers):
        raise ValueError("a weight is a number, or a mapping from rollout ids to numbers")
    if not all(number <= _MOST for number in numbers):
        raise ValueError(f"a weight is at most {_MOST:g}")
    if not isinstance(value, dict):
        if value <= 0:
            raise ValueError(f"a weight must be more than 0, not {value}; leave the data set out")
        return float(value)
    if not all(key.isdecimal() for key in value) or "0" not in value:
        raise ValueError("a schedule of weights maps rollout ids to weights, and begins at rollout 0")
    if min(numbers) < 0 or max(numbers) == 0:
        raise ValueError("the weights of a schedule are 0 or more, and one is more than 0")
    return {key: float(number) for key, number in value.items()}


_FORM = FileForm(
    PromptSource,
    NARROWER
    | {
        "weight": Annotated[Any, BeforeValidator(_weight)],
        "system_prompt": Annotated[str, Field(min_length=1)],
        "max_prompt_len": Annotated[int, Field(ge=1)],
    },
    leave_out=("is_named",),
)


def prompt_sources(args: Args) -> list[PromptSource]:
    """The files that --prompt-data names; none where it is not given.

    Args:
        args: reads `prompt_data` and the flags of `_FROM_ARGS`.

    Raises:
        FileUnusable: the YAML file is not there or cannot be read.
        UsageError: an unknown key, a value of the wrong type, a name used twice, or a weight of 0; two files with one
            name.
    """
    paths = [args.prompt_data] if isinstance(args.prompt_data, str) else list(args.prompt_data or [])
    from_flags = values_of_flags(args, _FROM_ARGS)
    if not any(path.endswith(SUFFIXES) for path in paths):
        return [
            PromptSource(**from_flags, name=name, path=path, is_named=len(paths) > 1) for name, path in _named(paths)
        ]
    if len(paths) > 1:
        raise UsageError(f"{PROMPTS_FLAG} {' '.join(paths)}: a YAML file lists all files of a mixture; give it alone.")
    datasets, defaults, _ = _FORM.read(load_yaml(paths[0], PROMPTS_FLAG, interpolates=True))
    sources = [PromptSource(**{**from_flags, **defaults, **entry}) for entry in datasets]
    for at in sorted({int(point) for source in sources if isinstance(source.weight, dict) for point in source.weight}):
        if not any(source.weight_at(at) for source in sources):
            raise UsageError(f"{PROMPTS_FLAG} {paths[0]}: at rollout {at} the weights of all data sets are 0.")
    return sources


def params_of(args: Args, params: dict[str, Any], group: Sequence[Sample]) -> dict[str, Any]:
    """SGLang's sampling parameters for a group: the run's, and what the group's data set changes of them."""
    source = source_of(args, group[0]) if group else None
    return {**params, **(source.sampling_params if source else {})}


def source_problems(args: Args) -> Iterator[str]:
    """A sentence for each limit of a data set that does not fit the run's flags, and for images of one alone."""
    named = [source for source in sources_of(args) if source.is_named]
    if named and args.rollout_buffer_url:
        yield f"{PROMPTS_FLAG}: the generator of --rollout-buffer-url reads one file, and no mixture; name one."
    for source in named:
        yield from _limit_problems(args, source)
        yield from _image_problems(args, source)


def _limit_problems(args: Args, source: PromptSource) -> Iterator[str]:
    longest = source.max_response_len or args.rollout_max_response_len
    fewest = args.rollout_min_new_tokens if source.min_new_tokens is None else source.min_new_tokens
    context, buffer, prompt = args.rollout_max_context_len, args.overlong_buffer_len, source.max_prompt_len
    return sentences(
        (
            longest is not None and fewest > longest,
            f"{source.where}: its min_new_tokens, {fewest}, is more than its max_response_len, {longest}; lower it.",
        ),
        (
            buffer is not None and (longest is None or buffer > longest),
            f"{source.where}: --overlong-buffer-len {buffer} is longer than its max_response_len, {longest}; lower "
            "the one, or raise the other.",
        ),
        (
            context is not None and prompt is not None and prompt > context - 1,
            f"{source.where}: max_prompt_len {prompt} leaves no room for a response in --rollout-max-context-len "
            f"{context}; lower it.",
        ),
    )


def _image_problems(args: Args, source: PromptSource) -> Iterator[str]:
    kinds, known = source.multimodal_keys or {}, args.multimodal_keys or {}
    others = ", ".join(kind for kind in kinds if kind not in known)
    return sentences(
        (
            kinds and not known,
            f"{source.where}: multimodal_keys: the trainer builds a model that sees images with --multimodal-keys "
            "alone; give it, too (data sets without images may have it).",
        ),
        (
            known and others,
            f"{source.where}: multimodal_keys: {others} is not in --multimodal-keys; add it, or leave it out.",
        ),
    )


def _named(paths: Sequence[str]) -> list[tuple[str, str]]:
    """(name, path) of each file: its name without the suffix."""
    named = [(Path(path.partition("@[")[0]).stem, path) for path in paths]
    for number, (name, path) in enumerate(named):
        if name in [other for other, _ in named[:number]]:
            raise UsageError(f"{PROMPTS_FLAG} {path}: another file is called {name}, too; name them in a YAML file.")
    return named
