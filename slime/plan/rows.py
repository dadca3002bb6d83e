"""One row of every data file as the model will see it, and how long prompts are: what a plan says about data.

A row is read and rendered by the code that a run uses (slime.utils.data.Dataset, slime.utils.mask_utils). What cannot
be read becomes a sentence, never an error: a plan is made without data and without a tokenizer too.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.plan import RowReport
from slime.plan.layout import DataFacts
from slime.utils.data import Dataset, parse_slice, read_rows
from slime.utils.errors import UsageError
from slime.utils.mask_utils import MultiTurnLossMaskGenerator
from slime.utils.processing_utils import load_tokenizer, render_chat
from slime.utils.types import Sample

if TYPE_CHECKING:
    from slime.config.args import Args
    from slime.utils.eval_config import EvalDatasetConfig


MEASURED_ROWS = 200  # Rows at the start of the prompt file whose lengths are measured

# (text, spans with whether they are trained, tokens, trained tokens)
Shown = tuple[str, list[tuple[str, bool]], int, int | None]
Found = tuple[DataFacts | None, list[RowReport], list[str]]


def read_rows_of(args: Args) -> Found:
    """What the data of a command line tells.

    Returns:
        facts about the prompts (None without them), one report per data file, and a sentence for each thing missing.
    """
    missing: list[str] = []
    wanted: list[tuple[str, str, EvalDatasetConfig | None]] = []
    if args.prompt_data:
        wanted.append(("prompts", args.prompt_data, None))
    wanted += [(dataset.name, dataset.path, dataset) for dataset in args.eval_datasets]
    readable = [entry for entry in wanted if parse_slice(entry[1])[0].is_file()]
    missing += [f"{name}: {path} does not exist" for name, path, _ in wanted if (name, path) not in _names(readable)]
    tokenizer = _tokenizer(args, missing) if readable else None
    facts, reports = None, []
    for name, path, dataset in readable:
        keys = _keys(args, dataset)
        reports.append(row_report(args, name, path, keys=keys, tokenizer=tokenizer))
        if dataset is None:
            facts = data_facts(path, keys, tokenizer, is_whole=args.loss_type == "sft_loss")
    return facts, reports, missing


def _names(entries: list[tuple[str, str, Any]]) -> set[tuple[str, str]]:
    return {(name, path) for name, path, _ in entries}


def _tokenizer(args: Args, missing: list[str]) -> Any:
    if not args.hf_checkpoint or not Path(args.hf_checkpoint).is_dir():
        missing.append(f"a tokenizer: --hf-checkpoint {args.hf_checkpoint} is no directory; data rows are shown raw")
        return None
    try:
        return load_tokenizer(args.hf_checkpoint, trust_remote_code=args.trust_remote_code)
    except Exception as error:  # its files are the user's: whatever transformers raises about them is an answer here
        kind = "" if isinstance(error, UsageError) else f"{args.hf_checkpoint} raises {type(error).__name__}: "
        missing.append(f"a tokenizer: {kind}{error}; data rows are shown raw")
        return None


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
    where = None
    try:
        where, row = next(read_rows(path, _left_out(args)), (None, {}))
        if where is None:
            raise UsageError(f"{path} has no rows")
        if tokenizer is None:
            text = str(row.get(keys["prompt_key"], row))
            return RowReport(name, path, where, text, [], None, None, _shown(row.get(keys["label_key"])), None)
        sample = first_samples(path, keys, tokenizer, 1)[0]
        is_demonstration = args.loss_type == "sft_loss" and name == "prompts"
        text, pieces, count, trained = (
            _masked(args, sample, tokenizer) if is_demonstration else _prompt(sample, tokenizer)
        )
        return RowReport(name, path, where, text, pieces, count, trained, _shown(sample.label), None)
    except UsageError as error:
        return RowReport(name, path, where, None, [], None, None, None, str(error))
    except Exception as error:  # tokenizer and template are the user's code
        problem = f"{type(error).__name__}: {error}"
        return RowReport(name, path, where, None, [], None, None, None, problem)


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


def _left_out(args: Args) -> list[str] | None:
    """Where read_rows may put lines that are no JSON; None: they are an error."""
    return [] if args.skip_malformed_data else None


def _shown(label: Any) -> str | None:
    return None if label is None else str(label)


def data_facts(path: str, keys: dict[str, Any], tokenizer: Any, *, is_whole: bool = False) -> DataFacts | None:
    """Rows of the prompt file, and prompt lengths of the first `MEASURED_ROWS`; None where a row cannot be used."""
    try:
        num_rows = sum(1 for _ in read_rows(path, [] if keys["skip_malformed"] else None))
        if tokenizer is None or not num_rows:
            return DataFacts(num_rows) if num_rows else None
        samples = first_samples(path, keys, tokenizer, MEASURED_ROWS)
        lengths = [_prompt(sample, tokenizer, is_whole=is_whole)[2] for sample in samples]
        return DataFacts(num_rows, len(lengths), round(sum(lengths) / len(lengths)), max(lengths))
    except Exception:  # what it is stands in the report of the first row, or in the problems of the command line
        return None
