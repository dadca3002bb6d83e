"""One row of every data file as the model will see it, and how long prompts are: what a plan says about data.

A row is read and rendered by the code that a run uses (slime.utils.data.Dataset, slime.utils.mask_utils). What cannot
be read becomes a sentence, never an error: a plan is made without data and without a tokenizer too.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from slime.plan import RowReport
from slime.plan.layout import DataFacts
from slime.utils.data import Dataset, parse_slice, read_rows
from slime.utils.errors import UsageError
from slime.utils.mask_utils import MultiTurnLossMaskGenerator
from slime.utils.misc import attempt
from slime.utils.processing_utils import load_tokenizer, render_chat
from slime.utils.types import Sample

if TYPE_CHECKING:
    from slime.config.args import Args
    from slime.utils.eval_config import EvalDatasetConfig


MEASURED_ROWS = 200  # Rows at the start of the prompt file whose lengths are measured

T = TypeVar("T")
# (text, spans with whether they are trained, tokens, trained tokens)
Shown = tuple[str, list[tuple[str, bool]], int, int | None]
Found = tuple[DataFacts | None, list[RowReport], list[str]]


def read_rows_of(args: Args) -> Found:
    """What the data of a command line tells.

    Returns:
        facts about the prompts (None without them), one report per data file, and a sentence for each thing missing.
    """
    wanted: list[tuple[str, str, EvalDatasetConfig | None]] = [(d.name, d.path, d) for d in args.eval_datasets]
    if args.prompt_data:
        wanted.insert(0, ("prompts", args.prompt_data, None))
    readable = [entry for entry in wanted if parse_slice(entry[1])[0].is_file()]
    missing = [f"{entry[0]}: {entry[1]} does not exist" for entry in wanted if entry not in readable]
    tokenizer = _tokenizer(args, missing) if readable else None
    facts, reports = None, []
    for name, path, dataset in readable:
        keys = _keys(args, dataset)
        reports.append(row_report(args, name, path, keys=keys, tokenizer=tokenizer))
        if dataset is None:
            facts = data_facts(path, keys, tokenizer, is_whole=args.loss_type == "sft_loss")
    return facts, reports, missing


def _tokenizer(args: Args, missing: list[str]) -> Any:
    if not args.hf_checkpoint or not Path(args.hf_checkpoint).is_dir():
        missing.append(f"a tokenizer: --hf-checkpoint {args.hf_checkpoint} is no directory; data rows are shown raw")
        return None
    tokenizer, problem = _tried(load_tokenizer, args.hf_checkpoint, trust_remote_code=args.trust_remote_code)
    if problem is not None:
        missing.append(f"a tokenizer: {args.hf_checkpoint}: {problem}; data rows are shown raw")
    return tokenizer


def _tried(function: Callable[..., T], *args: Any, **keywords: Any) -> tuple[T | None, str | None]:
    """(what a function returns, None), or (None, why it fails)."""
    result, error = attempt(function, *args, **keywords)  # tokenizer, template and data are the user's
    if error is None:
        return result, None
    return None, str(error) if isinstance(error, UsageError) else f"{type(error).__name__}: {error}"


def _keys(args: Args, dataset: Any) -> dict[str, Any]:
    """The keyword arguments of `Dataset` for the prompts, or for an evaluation data set."""
    source = dataset or args
    return {
        "prompt_key": source.input_key,
        "label_key": source.label_key,
        "tool_key": source.tool_key,
        "metadata_key": source.metadata_key,
        "apply_chat_template": source.apply_chat_template,
        "apply_chat_template_kwargs": source.apply_chat_template_kwargs,
        "skip_malformed": args.skip_malformed_data,
    }


def row_report(args: Args, name: str, path: str, *, keys: dict[str, Any], tokenizer: Any) -> RowReport:
    """The first row of a file; rendered and counted where there is a tokenizer, else as it is written."""
    first, problem = _tried(_first_row, args, path)
    if first is None:
        return RowReport(name, path, None, None, [], None, None, None, problem)
    where, row = first
    if tokenizer is None:
        text, label = str(row.get(keys["prompt_key"], row)), _shown(row.get(keys["label_key"]))
        return RowReport(name, path, where, text, [], None, None, label, None)
    is_demonstration = args.loss_type == "sft_loss" and name == "prompts"

    def shown() -> RowReport:
        sample = first_samples(path, keys, tokenizer, 1)[0]
        parts = _masked(args, sample, tokenizer) if is_demonstration else _prompt(sample, tokenizer)
        return RowReport(name, path, where, *parts, _shown(sample.label), None)

    report, problem = _tried(shown)
    return report or RowReport(name, path, where, None, [], None, None, None, problem)


def _first_row(args: Args, path: str) -> tuple[str, dict[str, Any]]:
    """(where it is, row) of a data file."""
    for where, row in read_rows(path, [] if args.skip_malformed_data else None):
        return where, row
    raise UsageError(f"{path} has no rows")


def first_samples(path: str, keys: dict[str, Any], tokenizer: Any, number: int) -> list[Sample]:
    """The first rows of a data file as the samples that the data source would hand out."""
    return list(Dataset(head_of(path, number), tokenizer, None, None, **keys).origin_samples[:number])


def head_of(path: str, number: int) -> str:
    """The path with a slice of its first rows; a slice that counts from the end stays, as it needs the whole file."""
    file, rows = parse_slice(path)
    start, stop = rows.start or 0, rows.stop
    if start < 0 or (stop is not None and stop < 0):
        return path
    return f"{file}@[{start}:{start + number if stop is None else min(stop, start + number)}]"


def _prompt(sample: Sample, tokenizer: Any, *, is_whole: bool = False) -> Shown:
    """(text, no spans, tokens, nothing trained) of a prompt, or of a whole conversation."""
    text = sample.prompt
    if isinstance(text, list):  # a custom generate function renders it
        tools = sample.metadata.get("tools")
        text = render_chat(tokenizer, text, tools=tools, add_generation_prompt=not is_whole)
    return text, [], len(tokenizer.encode(text, add_special_tokens=False)), None


def _masked(args: Args, sample: Sample, tokenizer: Any) -> Shown:
    """(text, spans, tokens, trained tokens) of a demonstration."""
    if not isinstance(sample.prompt, list):
        raise UsageError(
            "supervised fine-tuning needs a message list under --input-key, without --apply-chat-template"
        )
    masks = MultiTurnLossMaskGenerator(tokenizer, args.loss_mask_type)
    tokens, mask = masks.get_loss_mask(sample.prompt, tools=sample.metadata.get("tools"))
    pairs = groupby(zip(tokens, mask, strict=True), key=lambda pair: pair[1])
    pieces = [(tokenizer.decode([token for token, _ in span]), bool(trained)) for trained, span in pairs]
    return "".join(text for text, _ in pieces), pieces, len(tokens), sum(mask)


def _shown(label: Any) -> str | None:
    return None if label is None else str(label)


def data_facts(path: str, keys: dict[str, Any], tokenizer: Any, *, is_whole: bool = False) -> DataFacts | None:
    """Rows of the prompt file, and prompt lengths of the first `MEASURED_ROWS`; None where a row cannot be used."""

    def read() -> DataFacts | None:
        num_rows = sum(1 for _ in read_rows(path, [] if keys["skip_malformed"] else None))
        if tokenizer is None or not num_rows:
            return DataFacts(num_rows) if num_rows else None
        samples = first_samples(path, keys, tokenizer, MEASURED_ROWS)
        lengths = [_prompt(sample, tokenizer, is_whole=is_whole)[2] for sample in samples]
        return DataFacts(num_rows, len(lengths), round(sum(lengths) / len(lengths)), max(lengths))

    return _tried(read)[0]  # why not is in the report of the first row, or in the problems of the command line
