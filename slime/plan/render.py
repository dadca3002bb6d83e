"""A plan as text: sections with tables, plain where the output is no terminal, at most 120 columns wide. And what it
says about data: one row of every data file as the model will see it, and how long prompts are.

A row is read and rendered by the code that a run uses (slime.utils.data.Dataset, slime.utils.mask_utils). What cannot
be read becomes a sentence, never an error: a plan is made without data and without a tokenizer too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from slime.plan import Plan, RowReport
from slime.plan.fit import EngineMemory
from slime.plan.layout import DataFacts, Seat, together
from slime.plan.trainer_memory import TrainerMemory
from slime.utils.data import Dataset, parse_slice, read_rows
from slime.utils.errors import UsageError
from slime.utils.files.rows import messages_of
from slime.utils.files.streams import is_stream
from slime.utils.mask_utils import MultiTurnLossMaskGenerator
from slime.utils.misc import attempt
from slime.utils.processing_utils import image_options, load_processor, load_tokenizer, num_image_tokens, render_chat
from slime.utils.types import Sample

if TYPE_CHECKING:
    from slime.config.args import Args
    from slime.utils.eval_config import DatasetSettings

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
    evaluated = [one for one in args.eval_datasets if not is_stream(one.path)]
    wanted: list[tuple[str, DatasetSettings]] = [(one.name, one) for one in evaluated]
    files = [one for one in args.prompt_sources if not (args.stream_prompts or is_stream(one.path))]
    wanted[:0] = [(f"prompts {one.name}" if one.is_named else "prompts", one) for one in files]
    readable = [entry for entry in wanted if parse_slice(entry[1].path)[0].is_file()]
    missing = [f"{name}: {one.path} does not exist" for name, one in wanted if (name, one) not in readable]
    tokenizer = _tokenizer(args, missing) if readable else None
    has_images = tokenizer is not None and any(one.multimodal_keys for _, one in readable)
    trust = args.trust_remote_code
    processor = _tried(load_processor, args.hf_checkpoint, trust_remote_code=trust)[0] if has_images else None
    facts, reports = None, []
    for name, dataset in readable:
        keys, is_trained = _keys(args, dataset), dataset in args.prompt_sources
        demonstrates = is_trained and args.loss_type == "sft_loss"
        file = _File(dataset.path, keys, tokenizer, processor, args)
        reports.append(row_report(args, name, file, demonstrates=demonstrates))
        if is_trained:
            facts = together(facts, data_facts(file, is_whole=demonstrates))
    return facts, reports, missing


@dataclass(frozen=True)
class _File:
    """A data file, and who reads it."""

    path: str
    keys: dict[str, Any]  # Of `Dataset`
    tokenizer: Any
    processor: Any  # None: its images are not looked at
    args: Args

    def first(self, number: int) -> list[tuple[Sample, int]]:
        """The first rows as the data source would hand them out, each with the tokens of its images."""
        head, keys = head_of(self.path, number), self.keys
        samples = Dataset(head, self.tokenizer, None, None, **keys).origin_samples[:number]
        kinds = None if self.processor is None else keys["multimodal_keys"]
        if not kinds:
            return [(sample, 0) for sample in samples]
        rows = islice(read_rows(head, [] if keys["skip_malformed"] else None), number)
        prompts = [messages_of(row, where, keys["prompt_key"], kinds) for where, row in rows]
        counts = [num_image_tokens(prompt, self.processor, image_options(self.args)) for prompt in prompts]
        return list(zip(samples, counts, strict=True))


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


def _keys(args: Args, source: DatasetSettings) -> dict[str, Any]:
    """The keyword arguments of `Dataset` for a data set."""
    return {
        "prompt_key": source.input_key,
        "label_key": source.label_key,
        "tool_key": source.tool_key,
        "metadata_key": source.metadata_key,
        "apply_chat_template": source.apply_chat_template,
        "apply_chat_template_kwargs": source.apply_chat_template_kwargs,
        "multimodal_keys": source.multimodal_keys,
        "skip_malformed": args.skip_malformed_data,
        "source": source if source in args.prompt_sources else None,
    }


def row_report(args: Args, name: str, file: _File, *, demonstrates: bool) -> RowReport:
    """The first row of a file; rendered and counted where there is a tokenizer, else as it is written."""
    path, keys, tokenizer = file.path, file.keys, file.tokenizer
    first, problem = _tried(_first_row, args, path)
    if first is None:
        return RowReport(name, path, None, None, [], None, None, None, problem)
    where, row = first
    if tokenizer is None:
        text, label = str(row.get(keys["prompt_key"], row)), _shown(row.get(keys["label_key"]))
        return RowReport(name, path, where, text, [], None, None, label, None)

    def shown() -> RowReport:
        sample, of_images = file.first(1)[0]
        text, pieces, tokens, trained = (
            _masked(args, sample, tokenizer) if demonstrates else _prompt(sample, tokenizer)
        )
        return RowReport(name, path, where, text, pieces, tokens + of_images, trained, _shown(sample.label), None)

    report, problem = _tried(shown)
    return report or RowReport(name, path, where, None, [], None, None, None, problem)


def _first_row(args: Args, path: str) -> tuple[str, dict[str, Any]]:
    """(where it is, row) of a data file."""
    for where, row in read_rows(path, [] if args.skip_malformed_data else None):
        return where, row
    raise UsageError(f"{path} has no rows")


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


def data_facts(file: _File, *, is_whole: bool = False) -> DataFacts | None:
    """Rows of the prompt file, and prompt lengths of the first `MEASURED_ROWS`; None where a row cannot be used."""

    def read() -> DataFacts | None:
        num_rows = sum(1 for _ in read_rows(file.path, [] if file.keys["skip_malformed"] else None))
        if file.tokenizer is None or not num_rows:
            return DataFacts(num_rows) if num_rows else None
        first = file.first(MEASURED_ROWS)
        lengths = [_prompt(sample, file.tokenizer, is_whole=is_whole)[2] + images for sample, images in first]
        images = max(images for _, images in first)
        return DataFacts(num_rows, len(lengths), round(sum(lengths) / len(lengths)), max(lengths), images)

    return _tried(read)[0]  # why not is in the report of the first row, or in the problems of the command line


WIDTH = 110
MAX_TEXT = 1500  # characters of a data row that are shown
UNITS = {1e9: "GB", 1e6: "MB", 1e3: "kB"}
Lines = Iterable[str | Table]


def render(plan: Plan, stream: TextIO) -> None:
    """Write the plan; colours only on a terminal."""
    width = min(max(os.get_terminal_size(stream.fileno()).columns, 100), 120) if stream.isatty() else WIDTH
    console = Console(file=stream, width=width, highlight=False, emoji=False)
    with console.capture() as captured:
        for title, section in SECTIONS.items():
            lines = [line if isinstance(line, Table) else escape(line) for line in section(plan)]
            if lines:
                console.print(f"\n[bold]{title}[/bold]", *lines, sep="\n")
    text = "".join(line.rstrip() + "\n" for line in captured.get().splitlines()[1:])
    encoding = stream.encoding or "utf-8"
    stream.write(text.encode(encoding, "replace").decode(encoding))  # a row may hold what the terminal has not


def table(header: Sequence[str], rows: Iterable[Sequence[Any]], *, right: Sequence[int] = ()) -> Table:
    """A table without lines; `right` are the columns of numbers."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="underline")
    for index, name in enumerate(header):
        made.add_column(name, justify="right" if index in right else "left", overflow="fold")
    for row in rows:
        made.add_row(*(escape(str(cell)) for cell in row))
    return made


def size(num_bytes: float | None) -> str:
    """Bytes with a unit of 1000s, as devices are sold."""
    if num_bytes is None:
        return ""
    scale = next((scale for scale in UNITS if abs(num_bytes) >= scale), None)
    return f"{num_bytes / scale:,.1f} {UNITS[scale]}" if scale else f"{num_bytes:.0f} B"


def count(number: float) -> str:
    """A number of parameters."""
    if number >= 1e9:
        return f"{number / 1e9:.2f} B"
    return f"{number / 1e6:.2f} M" if number >= 1e5 else f"{number:,.0f}"


def seconds(value: float) -> str:
    """A time."""
    if value >= 5400:
        return f"{value / 3600:.1f} h"
    return f"{value / 60:.1f} min" if value >= 120 else f"{value:.2f} s"


def _summary(plan: Plan) -> Lines:
    tight = [moment.where for moment in plan.fit if not moment.fits]
    parts = [
        f"{plan.slots.total} x {plan.device.name}",
        f"DOES NOT FIT ({', '.join(tight)})" if tight else "fits" if plan.fit else "",
        f"one rollout about {seconds(plan.rollout_seconds)}" if plan.phases else "",
        f"a run would be refused for {len(plan.refused)} reason(s), listed at the end" if plan.refused else "",
    ]
    return ["; ".join(filter(None, parts))] if plan.slots.total else []


def _model(plan: Plan) -> Lines:
    if plan.params is None:
        return []
    parts = [f"{name} {count(number)}" for name, number in plan.params.items() if name != "total" and number]
    return [f"{count(plan.params['total'])} parameters: {', '.join(parts)}"]


def _placement(plan: Plan) -> Lines:
    slots = plan.slots
    where = "share them" if slots.num_engine_slots and slots.engine_offset == 0 else "have their own"
    engines = f", engines {slots.num_engine_slots} ({where})" if slots.num_engine_slots else ", no engines"
    yield f"{slots.total} x {plan.device.name}: trainer {slots.num_trainers}{engines}"
    groups = [list(group) for _, group in groupby(plan.seats, key=_pattern)]
    rows = [
        (seats[0].node, _span([seat.gpu for seat in seats]), _trainers(seats), _engines(seats)) for seats in groups
    ]
    yield table(("node", "GPU", "trainer", "engine"), rows)


def _pattern(seat: Seat) -> tuple[Any, ...]:
    """Neighbouring seats with the same are one line: engine by engine, trainers without engines by pipeline stage."""
    stage = seat.coordinates.get("pp") if seat.engine is None else None
    return seat.node, seat.trainer_rank is None, seat.engine, seat.engine_name, stage


def _span(numbers: Sequence[int | None]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"


def _trainers(members: Sequence[Seat]) -> str:
    if members[0].trainer_rank is None:
        return ""
    axes = [f"{axis} {_span(sorted({seat.coordinates[axis] for seat in members}))}" for axis in members[0].coordinates]
    return f"rank {_span([seat.trainer_rank for seat in members])}" + (f" ({', '.join(axes)})" if axes else "")


def _engines(members: Sequence[Seat]) -> str:
    first = members[0]
    if first.engine is None:
        return ""
    ranks = f" (tp {_span([seat.engine_tp_rank for seat in members])})" if len(members) > 1 else ""
    return f"engine {first.engine} {first.engine_name}".rstrip() + ranks


def _parallel(plan: Plan) -> Lines:
    layout = plan.layout
    if layout is None:
        return
    text = "  ".join(f"{axis.upper()} {vars(layout)[axis]}" for axis in ("tp", "pp", "vpp", "cp", "dp", "ep", "etp"))
    sequence = ", sequence parallel" if layout.is_sequence_parallel else ""
    yield f"{text}  expert DP {layout.expert_dp}  (world {layout.world_size}){sequence}"
    if layout.pp > 1:
        yield "layers of the stages: " + "; ".join(_ranges(stage) for stage in layout.stage_layers)


def _ranges(numbers: Sequence[int]) -> str:
    runs = groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    return ", ".join(_span([number for _, number in run]) for _, run in runs) or "none"


def _batch(plan: Plan) -> Lines:
    batch = plan.batch
    if batch is None:
        return
    yield (
        f"{batch.prompts_per_rollout} prompts x {batch.samples_per_prompt} samples = {batch.samples_per_rollout} a "
        f"rollout = {batch.steps_per_rollout} train step(s) of {batch.samples_per_step}"
        + (f", {batch.samples_dropped} left over" if batch.samples_dropped else "")
    )
    yield (
        f"about {batch.lengths.mean} tokens a sample (at most {batch.lengths.longest}), "
        f"{batch.tokens_per_rollout:,} a rollout; about {batch.micro_batches_per_rank} micro-batch(es) of at most "
        f"{batch.micro_batch_tokens} tokens per data-parallel rank and step"
    )
    rollouts = "unknown" if batch.num_rollouts is None else str(batch.num_rollouts)
    yield f"rollouts: {rollouts}" + ("" if batch.epochs is None else f" = {batch.epochs:.2f} passes over the prompts")


def _memory(plan: Plan) -> Lines:
    for name, trainer in (("trainer", plan.trainer_memory), ("critic", plan.critic_memory)):
        if trainer is not None:
            yield from _trainer(name, trainer)
    yield from map(_engine, plan.engine_memory)
    if plan.host_memory_per_node:
        yield f"host memory per node for copies of weights and what is offloaded: {size(plan.host_memory_per_node)}"
    for moment in plan.fit:
        parts = " + ".join(f"{name} {size(number)}" for name, number in moment.parts.items())
        yield f"{moment.where}, {moment.when}: {parts} = {size(moment.total)} of {size(moment.limit)}"
        yield f"    -> {moment.verdict}"


def _trainer(name: str, trainer: TrainerMemory) -> Lines:
    yield f"{name}, {trainer.precision}, recomputation: {trainer.recompute}"
    sizes = {name: name for name in ("weights", "gradients", "optimizer", "activations", "head")}
    sizes |= {"peak: log-probs": "log_probs_peak", "peak: train": "train_peak"}
    rows = [(s.stage, count(s.params), *(size(vars(s)[field]) for field in sizes.values())) for s in trainer.stages]
    yield table(("stage", "params", *sizes), rows, right=range(1, 2 + len(sizes)))
    yield f"the peak of train is its {trainer.peak.peak_is}"


def _engine(engine: EngineMemory) -> str:
    return (
        f"engine {engine.name}".rstrip()
        + f", TP {engine.tp}"
        + (f" PP {engine.pp}" if engine.pp > 1 else "")
        + (f" EP {engine.ep}" if engine.ep > 1 else "")
        + f": weights {size(engine.weights)} per GPU, KV cache {size(engine.kv_cache)} "
        f"({size(engine.kv_bytes_per_token)} a token): {engine.kv_tokens:,} tokens, "
        f"{engine.full_length_requests:,} requests of full length"
    )


def _times(plan: Plan) -> Lines:
    if not plan.phases:
        return
    rows = [(phase.name, seconds(phase.seconds), phase.formula) for phase in plan.phases]
    yield table(("phase", "time", "made of"), rows, right=(1,))
    number = plan.batch.num_rollouts if plan.batch else None
    run = f", {number} rollouts about {seconds(plan.rollout_seconds * number)}" if number else ""
    yield f"one rollout about {seconds(plan.rollout_seconds)}{run} (phases one after the other; an estimate)"


def _transport(plan: Plan) -> Lines:
    sends = plan.transport
    if sends is not None:
        buckets = f"{sends.num_buckets} bucket(s) of at most {size(sends.bucket_bytes)}"
        yield f"{sends.way}, {sends.every}: {size(sends.num_bytes)} in {buckets}"


def _hooks(plan: Plan) -> Lines:
    rows = [(hook.flag, hook.path, hook.where or f"NOT LOADED: {hook.problem}") for hook in plan.hooks]
    return [table(("flag", "hook", "where"), rows) if rows else "none of the user's"]


def _rows(plan: Plan) -> Lines:
    for row in plan.rows:
        yield f"{row.data}: {row.where or row.path}" + ("" if row.num_tokens is None else _tokens(row))
        if row.problem:
            yield f"    {row.problem}"
        marked = "".join(f">>>{text}<<<" if is_trained else text for text, is_trained in row.pieces)
        shown = marked or row.text
        if shown is not None:
            cut = f" ... ({len(shown) - MAX_TEXT} more characters)" if len(shown) > MAX_TEXT else ""
            yield "\n".join(f"    | {line}" for line in (shown[:MAX_TEXT] + cut).splitlines())
        if row.label is not None:
            yield f"    label: {row.label}"


def _tokens(row: RowReport) -> str:
    trained = "" if row.num_trained_tokens is None else f", {row.num_trained_tokens} trained (between >>> and <<<)"
    return f", {row.num_tokens} tokens{trained}"


def _sentences(field: str) -> Callable[[Plan], Lines]:
    return lambda plan: [f"- {sentence}" for sentence in vars(plan)[field]]


SECTIONS: dict[str, Callable[[Plan], Lines]] = {
    "Plan": _summary,
    "Model": _model,
    "Placement": _placement,
    "Parallel layout": _parallel,
    "Batches": _batch,
    "Memory per GPU": _memory,
    "Time of one rollout (estimate)": _times,
    "Weight transport": _transport,
    "What is written": lambda plan: [
        table(
            ("what", "where", "size", "when"),
            [(output.what, output.where, size(output.size_bytes), output.when) for output in plan.outputs],
            right=(2,),
        )
    ],
    "Hooks": _hooks,
    "Data": _rows,
    "Assumed": _sentences("assumptions"),
    "Missing": _sentences("missing"),
    "Warnings": _sentences("warnings"),
    "A run would be refused:": _sentences("refused"),
}
