"""A plan as text: sections with tables, plain where the output is no terminal, at most 120 columns wide.

It formats numbers and decides nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any, TextIO

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from slime.utils.plan.engine_memory import EngineMemory
from slime.utils.plan.layout import Seat
from slime.utils.plan.plan import Plan, RowReport
from slime.utils.plan.trainer_memory import TrainerMemory

WIDTH = 110
MAX_TEXT = 1500
"""Characters of a data row that are shown."""


def render(plan: Plan, stream: TextIO) -> None:
    """Write the plan; colours only on a terminal."""
    width = min(max(os.get_terminal_size(stream.fileno()).columns, 100), 120) if stream.isatty() else WIDTH
    console = Console(file=stream, width=width, highlight=False, emoji=False)
    with console.capture() as captured:
        for title, section in SECTIONS.items():
            lines = list(section(plan))
            if lines:
                console.print(f"\n[bold]{title}[/bold]")
                for line in lines:
                    console.print(line if isinstance(line, Table) else escape(line))
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
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(num_bytes) >= scale:
            return f"{num_bytes / scale:,.1f} {unit}"
    return f"{num_bytes:.0f} B"


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


def _summary(plan: Plan) -> Iterable[Any]:
    slots, found = plan.slots, [f"{plan.slots.total} x {plan.device.name}"]
    if plan.fit:
        tight = [moment.where for moment in plan.fit if not moment.fits]
        found.append(f"DOES NOT FIT ({', '.join(tight)})" if tight else "fits")
    if plan.phases:
        found.append(f"one rollout about {seconds(sum(phase.seconds for phase in plan.phases))}")
    if plan.refused:
        found.append(f"a run would be refused for {len(plan.refused)} reason(s), listed at the end")
    return ["; ".join(found)] if slots.total else []


def _model(plan: Plan) -> Iterable[Any]:
    if plan.params is None:
        return
    parts = [f"{name} {count(number)}" for name, number in plan.params.items() if name != "total" and number]
    yield f"{count(plan.params['total'])} parameters: {', '.join(parts)}"


def _placement(plan: Plan) -> Iterable[Any]:
    slots = plan.slots
    where = "share them" if slots.num_engine_slots and slots.engine_offset == 0 else "have their own"
    engines = f", engines {slots.num_engine_slots} ({where})" if slots.num_engine_slots else ", no engines"
    yield f"{slots.total} x {plan.device.name}: trainer {slots.num_trainers}{engines}"
    rows = []
    for (node, _), group in groupby(plan.seats, key=lambda seat: (seat.node, _pattern(seat))):
        members = list(group)
        gpus = _span([seat.gpu for seat in members])
        rows.append((node, gpus, _trainers(members), _engines(members)))
    yield table(("node", "GPU", "trainer", "engine"), rows)


def _pattern(seat: Seat) -> tuple[Any, ...]:
    """Neighbouring seats with the same are one line: engine by engine, trainers without engines by pipeline stage."""
    engine = (seat.engine, seat.engine_name)
    return (seat.trainer_rank is None, *engine, seat.coordinates.get("pp") if seat.engine is None else None)


def _span(numbers: Sequence[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"


def _trainers(members: Sequence[Seat]) -> str:
    ranks = [seat.trainer_rank for seat in members if seat.trainer_rank is not None]
    if not ranks:
        return ""
    axes: list[str] = []
    for axis in members[0].coordinates:
        values = sorted({seat.coordinates[axis] for seat in members})
        axes.append(f"{axis} {_span(values)}")
    return f"rank {_span(ranks)}" + (f" ({', '.join(axes)})" if axes else "")


def _engines(members: Sequence[Seat]) -> str:
    first = members[0]
    if first.engine is None:
        return ""
    name = f" {first.engine_name}" if first.engine_name else ""
    ranks = [seat.engine_tp_rank for seat in members if seat.engine_tp_rank is not None]
    return f"engine {first.engine}{name}" + (f" (tp {_span(ranks)})" if len(ranks) > 1 else "")


def _parallel(plan: Plan) -> Iterable[Any]:
    layout = plan.layout
    if layout is None:
        return
    sizes = {"TP": layout.tp, "PP": layout.pp, "VPP": layout.vpp, "CP": layout.cp, "DP": layout.dp, "EP": layout.ep}
    text = "  ".join(f"{name} {number}" for name, number in sizes.items())
    yield f"{text}  ETP {layout.etp}  expert DP {layout.expert_dp}  (world {layout.world_size})" + (
        ", sequence parallel" if layout.is_sequence_parallel else ""
    )
    if layout.pp > 1:
        yield "layers of the stages: " + "; ".join(_ranges(stage) for stage in layout.stage_layers)


def _ranges(numbers: Sequence[int]) -> str:
    parts = []
    for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        members = [number for _, number in run]
        parts.append(_span(members))
    return ", ".join(parts) or "none"


def _batch(plan: Plan) -> Iterable[Any]:
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


def _memory(plan: Plan) -> Iterable[Any]:
    for name, trainer in (("trainer", plan.trainer_memory), ("critic", plan.critic_memory)):
        if trainer is not None:
            yield from _trainer(name, trainer)
    for engine in plan.engine_memory:
        yield from _engine(engine)
    if plan.host_memory_per_node:
        yield f"host memory per node for copies of weights and what is offloaded: {size(plan.host_memory_per_node)}"
    for moment in plan.fit:
        parts = " + ".join(f"{name} {size(number)}" for name, number in moment.parts.items())
        yield f"{moment.where}, {moment.when}: {parts} = {size(moment.total)} of {size(moment.limit)}"
        yield f"    -> {moment.verdict}"


def _trainer(name: str, trainer: TrainerMemory) -> Iterable[Any]:
    yield f"{name}, {trainer.precision}, recomputation: {trainer.recompute}"
    header = (
        *("stage", "params", "weights", "gradients", "optimizer", "activations", "head"),
        *("peak: log-probs", "peak: train"),
    )
    rows = [
        (s.stage, count(s.params), size(s.weights), size(s.gradients), size(s.optimizer), size(s.activations))
        + (size(s.head), size(s.log_probs_peak), size(s.train_peak))
        for s in trainer.stages
    ]
    yield table(header, rows, right=range(1, len(header)))
    yield f"the peak of train is its {trainer.peak.peak_is}"


def _engine(engine: EngineMemory) -> Iterable[str]:
    name = f"engine {engine.name}".rstrip()
    yield (
        f"{name}, TP {engine.tp}"
        + (f" PP {engine.pp}" if engine.pp > 1 else "")
        + (f" EP {engine.ep}" if engine.ep > 1 else "")
        + f": weights {size(engine.weights)} per GPU, KV cache {size(engine.kv_cache)} "
        f"({size(engine.kv_bytes_per_token)} a token): {engine.kv_tokens:,} tokens, "
        f"{engine.full_length_requests:,} requests of full length"
    )


def _times(plan: Plan) -> Iterable[Any]:
    if not plan.phases:
        return
    yield table(
        ("phase", "time", "made of"), [(p.name, seconds(p.seconds), p.formula) for p in plan.phases], right=(1,)
    )
    total = sum(phase.seconds for phase in plan.phases)
    text = f"one rollout about {seconds(total)}"
    if plan.batch and plan.batch.num_rollouts:
        text += f", {plan.batch.num_rollouts} rollouts about {seconds(total * plan.batch.num_rollouts)}"
    yield text + " (phases one after the other; an estimate)"


def _transport(plan: Plan) -> Iterable[Any]:
    sends = plan.transport
    if sends is None:
        return
    yield (
        f"{sends.way}, {sends.every}: {size(sends.num_bytes)} in {sends.num_buckets} bucket(s) of at most "
        f"{size(sends.bucket_bytes)}"
    )


def _outputs(plan: Plan) -> Iterable[Any]:
    rows = [(output.what, output.where, size(output.size_bytes), output.when) for output in plan.outputs]
    yield table(("what", "where", "size", "when"), rows, right=(2,))


def _hooks(plan: Plan) -> Iterable[Any]:
    if not plan.hooks:
        yield "none of the user's"
        return
    rows = [(hook.flag, hook.path, hook.where or f"NOT LOADED: {hook.problem}") for hook in plan.hooks]
    yield table(("flag", "hook", "where"), rows)


def _rows(plan: Plan) -> Iterable[Any]:
    for row in plan.rows:
        yield f"{row.data}: {row.where or row.path}" + ("" if row.num_tokens is None else _tokens(row))
        if row.problem:
            yield f"    {row.problem}"
        shown = _marked(row.pieces) if row.pieces else row.text
        if shown is not None:
            cut = f" ... ({len(shown) - MAX_TEXT} more characters)" if len(shown) > MAX_TEXT else ""
            yield "\n".join(f"    | {line}" for line in (shown[:MAX_TEXT] + cut).splitlines())
        if row.label is not None:
            yield f"    label: {row.label}"


def _tokens(row: RowReport) -> str:
    trained = "" if row.num_trained_tokens is None else f", {row.num_trained_tokens} trained (between >>> and <<<)"
    return f", {row.num_tokens} tokens{trained}"


def _marked(pieces: Sequence[tuple[str, bool]]) -> str:
    return "".join(f">>>{text}<<<" if is_trained else text for text, is_trained in pieces)


def _assumptions(plan: Plan) -> Iterable[Any]:
    return [f"- {sentence}" for sentence in plan.assumptions]


def _missing(plan: Plan) -> Iterable[Any]:
    return [f"- {sentence}" for sentence in plan.missing]


def _warnings(plan: Plan) -> Iterable[Any]:
    return [f"- {sentence}" for sentence in plan.warnings]


def _refused(plan: Plan) -> Iterable[Any]:
    return [f"- {sentence}" for sentence in plan.refused]


SECTIONS: dict[str, Callable[[Plan], Iterable[Any]]] = {
    "Plan": _summary,
    "Model": _model,
    "Placement": _placement,
    "Parallel layout": _parallel,
    "Batches": _batch,
    "Memory per GPU": _memory,
    "Time of one rollout (estimate)": _times,
    "Weight transport": _transport,
    "What is written": _outputs,
    "Hooks": _hooks,
    "Data": _rows,
    "Assumed": _assumptions,
    "Missing": _missing,
    "Warnings": _warnings,
    "A run would be refused:": _refused,
}
