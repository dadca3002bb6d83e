"""Draw the pictures of flows in the documentation, docs/images/NAME.svg.

    python tools/make_pictures.py                        write all pictures
    python tools/make_pictures.py --output DIRECTORY     write them somewhere else

A test compares the files with what this makes. Boxes carry their own background, and text outside of boxes has a tone
that is readable on light and on dark pages.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

OUTPUT = Path(__file__).resolve().parent.parent / "docs" / "images"
FREE = "#5f8a62"  # text and arrows outside of boxes


class Colour(NamedTuple):
    """Background, border and text of a box."""

    fill: str
    line: str
    text: str


GREEN = Colour("#e8f3e6", "#3d7a3f", "#16301a")  # training
BLUE = Colour("#e3eef9", "#2f6aa3", "#12304c")  # generation
GREY = Colour("#f0f0ec", "#77776c", "#2e2e28")  # what ties the two together
AMBER = Colour("#fdf0d5", "#a8761a", "#4a3306")  # weights on their way


class Box(NamedTuple):
    """A rectangle with a name and a second, smaller line."""

    x: int
    y: int
    width: int
    height: int
    name: str
    second: str = ""
    colour: Colour = GREEN


class Picture(NamedTuple):
    """One picture: arrows are (from x, from y, to x, to y), notes (x, y, text)."""

    title: str
    width: int
    height: int
    boxes: tuple[Box, ...]
    arrows: tuple[tuple[int, int, int, int], ...] = ()
    notes: tuple[tuple[int, int, str], ...] = ()


LOOP = Picture(
    "The loop: prompts, engines, rewards, trainer, weight sync, engines again",
    860,
    250,
    (
        Box(20, 30, 170, 74, "Data source", "prompts, buffer", GREY),
        Box(240, 30, 170, 74, "SGLang engines", "generate groups", BLUE),
        Box(460, 30, 170, 74, "Your functions", "reward, tools, filter", GREY),
        Box(460, 150, 170, 74, "Megatron trainer", "advantages, loss, step"),
        Box(240, 150, 170, 74, "Weight sync", "memory, NCCL or files", AMBER),
    ),
    ((190, 67, 240, 67), (410, 67, 460, 67), (545, 104, 545, 150), (460, 187, 410, 187), (325, 150, 325, 104)),
    (
        (552, 131, "samples"),
        (332, 131, "version v + 1"),
        (665, 100, "Ray places them"),
        (665, 122, "one Python loop"),
        (665, 144, "drives them"),
        (665, 166, "every part is watched"),
    ),
)
PROCESSES = Picture(
    "Processes of a run: the driver, the rollout manager with router and engines, the trainers",
    860,
    350,
    (
        Box(300, 20, 260, 64, "Driver", "train.py: which phase is next", GREY),
        Box(40, 130, 260, 64, "RolloutManager", "data, rewards, training data", BLUE),
        Box(560, 130, 260, 64, "Trainer group", "one actor for each GPU"),
        Box(40, 250, 120, 64, "Router", "one per model", BLUE),
        Box(190, 250, 110, 64, "Engine 0", "SGLang", BLUE),
        Box(320, 250, 110, 64, "Engine 1", "SGLang", BLUE),
        Box(560, 250, 120, 64, "Rank 0", "Megatron"),
        Box(700, 250, 120, 64, "Rank 1", "Megatron"),
    ),
    (
        (300, 62, 200, 130),
        (560, 62, 660, 130),
        (300, 162, 560, 162),
        (100, 194, 100, 250),
        (160, 282, 190, 282),
        (620, 194, 620, 250),
        (760, 194, 760, 250),
        (560, 282, 430, 282),
    ),
    ((355, 154, "samples, by object store"), (448, 274, "new weights"), (110, 226, "requests"), (570, 52, "verbs")),
)
ASYNC = Picture(
    "Two drivers in time: train.py takes turns; train_async.py generates the next rollout while it trains",
    860,
    300,
    (
        Box(120, 40, 150, 40, "generate 0", "", BLUE),
        Box(400, 40, 150, 40, "generate 1", "", BLUE),
        Box(680, 40, 150, 40, "generate 2", "", BLUE),
        Box(270, 84, 110, 40, "train 0"),
        Box(380, 84, 20, 40, "", "", AMBER),
        Box(550, 84, 110, 40, "train 1"),
        Box(660, 84, 20, 40, "", "", AMBER),
        Box(120, 190, 150, 40, "generate 0", "", BLUE),
        Box(272, 190, 150, 40, "generate 1", "", BLUE),
        Box(444, 190, 150, 40, "generate 2", "", BLUE),
        Box(616, 190, 150, 40, "generate 3", "", BLUE),
        Box(272, 234, 110, 40, "train 0"),
        Box(422, 234, 20, 40, "", "", AMBER),
        Box(444, 234, 110, 40, "train 1"),
        Box(594, 234, 20, 40, "", "", AMBER),
        Box(616, 234, 110, 40, "train 2"),
    ),
    (),
    (
        (120, 26, "train.py: every token is of the newest weights"),
        (20, 66, "engines"),
        (20, 110, "trainer"),
        (120, 176, "train_async.py: tokens are one version older"),
        (20, 216, "engines"),
        (20, 260, "trainer"),
        (640, 26, "amber: weight sync"),
    ),
)
COLOCATED = Picture(
    "Memory of one GPU in a colocated step: engine and trainer take turns, weights of both meet in the sync",
    860,
    290,
    (
        Box(110, 40, 210, 70, "cache of the engine", "", BLUE),
        Box(110, 114, 210, 40, "weights", "", BLUE),
        Box(110, 208, 210, 40, "state of the trainer", "in host memory", GREY),
        Box(340, 40, 230, 114, "trainer awake", "weights, gradients, optimizer"),
        Box(590, 40, 110, 70, "trainer", "awake"),
        Box(590, 114, 110, 40, "weights", "of the engine", AMBER),
        Box(720, 40, 120, 70, "cache", "", BLUE),
        Box(720, 114, 120, 40, "weights v + 1", "", BLUE),
        Box(720, 208, 120, 40, "trainer's state", "in host memory", GREY),
    ),
    (),
    (
        (110, 28, "generate"),
        (340, 28, "train"),
        (590, 28, "sync"),
        (720, 28, "generate"),
        (20, 102, "GPU"),
        (20, 232, "host"),
        (110, 278, "time goes from left to right; without a GPU nothing is released"),
    ),
)
STEP = Picture(
    "One colocated step of 10.2 seconds to scale, and below it the turns of the GPU ten times as large",
    860,
    260,
    (
        Box(70, 40, 432, 50, "generate", "6.17 s", BLUE),
        Box(502, 40, 29, 50, "", "", AMBER),
        Box(531, 40, 206, 50, "train", "2.95 s"),
        Box(737, 40, 32, 50, "", "", AMBER),
        Box(70, 150, 28, 50, "", "", BLUE),
        Box(98, 150, 224, 50, "trainer wakes up", "0.32 s"),
        Box(322, 150, 70, 50, "data", "0.10 s", GREY),
        Box(440, 150, 35, 50, "", "", AMBER),
        Box(475, 150, 196, 50, "trainer sleeps", "0.28 s"),
        Box(671, 150, 63, 50, "cache", "0.09 s", BLUE),
    ),
    ((516, 90, 330, 146), (753, 90, 590, 146)),
    (
        (70, 28, "a step of the 0.6B model, 64 x 8 responses of 512 tokens, one H200"),
        (70, 224, "the engine releases its memory: 0.04 s"),
        (440, 224, "weight sync: 0.05 s"),
        (70, 246, "where both fit, the trainer neither wakes up nor sleeps"),
    ),
)
WEIGHT_SYNC = Picture(
    "A weight sync: shards of the trainer are gathered, renamed, sent in buckets, and loaded by paused engines",
    860,
    270,
    (
        Box(20, 40, 150, 60, "Trainer ranks", "shards by TP, PP, EP"),
        Box(210, 40, 140, 60, "Gather", "whole parameters"),
        Box(390, 40, 140, 60, "Rename", "to Hugging Face"),
        Box(570, 40, 130, 60, "Bucket", "flat buffer", AMBER),
        Box(570, 150, 130, 60, "Send", "IPC, NCCL, files", AMBER),
        Box(390, 150, 140, 60, "Load", "every engine", BLUE),
        Box(210, 150, 140, 60, "Compare", "version, elements", BLUE),
        Box(20, 150, 150, 60, "Continue", "version v + 1", BLUE),
    ),
    (
        (170, 70, 210, 70),
        (350, 70, 390, 70),
        (530, 70, 570, 70),
        (635, 100, 635, 150),
        (570, 180, 530, 180),
        (390, 180, 350, 180),
        (210, 180, 170, 180),
    ),
    (
        (210, 26, "the next bucket is gathered while this one is sent"),
        (210, 236, "engines: pause, drop the prefix cache, load"),
        (20, 236, "a failed sync is sent"),
        (20, 256, "once more, as a whole"),
    ),
)
PARALLEL = Picture(
    "Eight GPUs with TP 2, PP 2 and DP 2: who holds which part of the model",
    860,
    290,
    tuple(
        Box(
            110 + 370 * copy + 175 * half,
            50 + 110 * stage,
            165,
            76,
            f"GPU {4 * stage + 2 * copy + half}",
            f"half {half + 1} of each layer",
            GREEN if copy == 0 else BLUE,
        )
        for stage in range(2)
        for copy in range(2)
        for half in range(2)
    ),
    ((192, 126, 192, 160), (562, 126, 562, 160)),
    (
        (110, 34, "copy 1 of the model (DP)"),
        (480, 34, "copy 2: other samples"),
        (14, 84, "first half"),
        (14, 104, "of layers"),
        (14, 194, "second half"),
        (14, 214, "of layers"),
        (110, 266, "TP: both halves of a layer exchange activations, twice a layer; keep them in one machine"),
        (206, 148, "PP: hidden states"),
    ),
)
FAVICON = Picture("slime", 32, 32, (Box(2, 2, 28, 28, "s"),))
PICTURES = {
    "favicon": FAVICON,
    "loop": LOOP,
    "processes": PROCESSES,
    "async": ASYNC,
    "colocated": COLOCATED,
    "step": STEP,
    "weight_sync": WEIGHT_SYNC,
    "parallel": PARALLEL,
}


def render(picture: Picture) -> str:
    """Return the SVG of a picture."""
    size = f'viewBox="0 0 {picture.width} {picture.height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" role="img">',
        f"<title>{picture.title}</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        f'<path d="M0 0 L8 4 L0 8 z" fill="{FREE}"/></marker></defs>',
    ]
    for box in picture.boxes:
        fill, line, text = box.colour
        middle, centre = box.x + box.width // 2, box.y + box.height // 2
        where = f'x="{box.x}" y="{box.y}" width="{box.width}" height="{box.height}" rx="8"'
        parts.append(f'<rect {where} fill="{fill}" stroke="{line}"/>')
        above = 4 if box.second else -5
        parts.append(_text(middle, centre - above, box.name, 15, text, anchor="middle"))
        parts.append(_text(middle, centre + 15, box.second, 12, text, anchor="middle"))
    for x1, y1, x2, y2 in picture.arrows:
        ends = f'x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"'
        parts.append(f'<line {ends} stroke="{FREE}" stroke-width="2" marker-end="url(#tip)"/>')
    parts += [_text(x, y, note, 13, FREE) for x, y, note in picture.notes]
    return "\n".join([*filter(None, parts), "</svg>", ""])


def _text(x: int, y: int, text: str, size: int, colour: str, *, anchor: str = "start") -> str:
    """Return a line of text, or nothing for an empty one."""
    where = f'x="{x}" y="{y}" text-anchor="{anchor}"'
    return f'<text {where} font-size="{size}" fill="{colour}">{text}</text>' if text else ""


def main() -> None:
    """Command line of this tool."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=OUTPUT, help="directory to write")
    output = parser.parse_args().output
    for name, picture in PICTURES.items():
        (output / f"{name}.svg").write_text(render(picture))
        print(f"wrote {output / name}.svg")


if __name__ == "__main__":
    main()
