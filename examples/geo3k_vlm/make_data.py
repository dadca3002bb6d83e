"""Rows of problems with drawings, with the columns of geo3k: problem, answer, images; and messages, for SFT.

    python examples/geo3k_vlm/make_data.py --output outputs/geo3k                              drawn here
    python examples/geo3k_vlm/make_data.py --output outputs/geo3k_sft --input train.parquet   of a file, for SFT

A drawn problem asks for the area of a right triangle, whose sides are the numbers of grid lines that it covers. The
demonstration of a row is its answer in a box, as graders look for it.
"""

from __future__ import annotations

import argparse
import base64
import io
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from examples.tiny import write_jsonl
from slime.utils.files.rows import read_file

SIDE, CELL = 128, 16
PROBLEM = "<image>Each square of the grid has an area of 1. What is the area of the triangle?"


def draw(base: int, height: int) -> str:
    """Return a right triangle on a grid as a data URI."""
    image = Image.new("RGB", (SIDE, SIDE), "white")
    pen = ImageDraw.Draw(image)
    for place in range(0, SIDE, CELL):
        pen.line([(place, 0), (place, SIDE)], fill=(210, 210, 210))
        pen.line([(0, place), (SIDE, place)], fill=(210, 210, 210))
    pen.polygon([(0, 0), (base * CELL, 0), (0, height * CELL)], outline="black", width=2)
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def problems(rng: random.Random, count: int) -> Iterator[dict[str, Any]]:
    """Draw rows."""
    for _ in range(count):
        base, height = rng.randint(1, 7), rng.randint(1, 7)
        yield {"problem": PROBLEM, "answer": f"{base * height / 2:g}", "images": [draw(base, height)]}


def with_messages(row: dict[str, Any]) -> dict[str, Any]:
    """A row with its demonstration."""
    said = {"role": "assistant", "content": f"Answer: \\boxed{{{row['answer']}}}"}
    return {**row, "messages": [{"role": "user", "content": row["problem"]}, said]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="directory of train.jsonl and test.jsonl")
    parser.add_argument("--input", help="a file with the columns problem, answer, images; without one they are drawn")
    parser.add_argument("--count", type=int, default=512, help="drawn problems; a tenth as many are held out")
    parser.add_argument("--seed", type=int, default=0, help="of the drawn problems")
    args = parser.parse_args()
    if args.input:
        sets = {"train": read_file(args.input)}
    else:
        sets = {"train": problems(random.Random(args.seed), args.count)}
        sets["test"] = problems(random.Random(args.seed + 1), max(args.count // 10, 1))
    for name, rows in sets.items():
        count = write_jsonl(args.output / f"{name}.jsonl", map(with_messages, rows))
        print(f"{args.output / name}.jsonl: {count} rows")


if __name__ == "__main__":
    main()
