"""The layers of each pipeline stage: Megatron's rules as pure arithmetic, and its text for stages of any kind.

A text has one letter for each layer (E embedding, t decoder layer, m multi-token prediction, L output and loss) and |
between stages; `x*3` and `(xy|)*3` repeat, commas are for the eye. Stages are dealt out to the pipeline's ranks in
turn: with 2 ranks, "Et|t|t|tL" gives rank 0 the first and the third.
"""

from __future__ import annotations

import re

from slime.utils.errors import sentences

_REPEATED = (re.compile(r"\(([^)]+)\)\*(\d+)"), re.compile(r"(.)\*(\d+)"))
_MOST = 10_000
"""Longest text of stages that is looked at; no model has as many layers."""


def stages_of_text(text: str) -> list[str]:
    """The stages in order, one letter for each layer: "Et*2|tL" -> ["Ett", "tL"].

    Raises:
        ValueError: a letter that has no meaning, or a text without end.
    """
    unrolled = text.replace(",", "")
    for pattern in _REPEATED:
        unrolled = pattern.sub(lambda match: match[1] * min(int(match[2]), _MOST), unrolled)
        if len(unrolled) > _MOST:
            raise ValueError(f"it describes more than {_MOST} layers and stages")
    if wrong := sorted(set(unrolled) - set("EtmL|")):
        raise ValueError(
            f"{''.join(wrong)!r} means nothing there; E is the embedding, t a decoder layer, m a layer of multi-token "
            "prediction, L output and loss, | the end of a stage"
        )
    return unrolled.split("|")


def text_problem(text: str, pp: int, *, num_layers: int, num_mtp_layers: int = 0) -> str | None:
    """The end of a sentence on what is wrong with a text of stages for `pp` ranks; None where nothing is."""
    try:
        stages = stages_of_text(text)
    except ValueError as error:
        return str(error)
    letters = "".join(stages)
    near = sorted({max(pp, len(stages) // pp * pp), -(-len(stages) // pp) * pp})
    wanted = (("t", num_layers, "decoder layers"), ("m", num_mtp_layers, "prediction layers"))
    problems = sentences(
        (
            len(stages) % pp,
            f"it has {len(stages)} stages, which {pp} ranks cannot share equally; {' or '.join(map(str, near))} work",
        ),
        (
            letters.count("E") != 1 or letters.count("L") != 1 or stages[0][:1] != "E" or stages[-1][-1:] != "L",
            "the first stage must begin with the embedding E and the last end with the output L, and have each once",
        ),
        *(
            (letters.count(one) != n, f"it has {letters.count(one)} {what} ({one}), the model has {n}")
            for one, n, what in wanted
        ),
        (
            "m" in letters and not re.fullmatch(r"E?t*m+L", stages[-1]),
            f"prediction layers (m) must stand right before the output L, in the last stage, which is {stages[-1]}",
        ),
    )
    return next(problems, None)


def split_text(text: str, pp: int) -> list[list[int]]:
    """[pp][decoder layers] of a text that `text_problem` finds nothing in."""
    found: list[list[int]] = [[] for _ in range(pp)]
    layer = 0
    for number, stage in enumerate(stages_of_text(text)):
        found[number % pp] += range(layer, layer + stage.count("t"))
        layer += stage.count("t")
    return found


def split_layers(
    num_layers: int,
    pp: int,
    *,
    vpp: int = 1,
    first: int | None = None,
    last: int | None = None,
    counts_embedding: bool = False,
    counts_loss: bool = False,
) -> list[list[int]]:
    """Decoder layers of each pipeline rank.

    Args:
        num_layers: of the model.
        pp: ranks.
        vpp: stages of a rank; stage c of rank r comes after stage c of rank r - 1.
        first: layers of the first rank, where it differs from the others.
        last: layers of the last.
        counts_embedding: the embedding takes the place of a layer in the first stage.
        counts_loss: output and loss take that of a layer in the last.

    Returns:
        [pp][layer numbers]; the rest of an uneven division goes to the early ranks.
    """
    ends = {0: first, pp - 1: last} if pp > 1 else {}
    fixed = {rank: count for rank, count in ends.items() if count is not None}
    free = [rank for rank in range(pp) if rank not in fixed]
    rest = max(0, num_layers + counts_embedding + counts_loss - sum(fixed.values()))
    counts = [
        fixed[rank] if rank in fixed else rest // len(free) + (free.index(rank) < rest % len(free))
        for rank in range(pp)
    ]
    found: list[list[int]] = [[] for _ in range(pp)]
    layer = 0
    for chunk in range(vpp):
        for rank, count in enumerate(counts):
            size = count // vpp + (chunk < count % vpp)
            size -= counts_embedding and (chunk, rank) == (0, 0)
            size -= counts_loss and (chunk, rank) == (vpp - 1, pp - 1)
            found[rank] += range(layer, layer + max(0, size))
            layer += max(0, size)
    return found
