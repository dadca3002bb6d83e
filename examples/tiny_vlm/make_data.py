"""Write the data of the smallest example with images: how many squares are there?

    python examples/tiny_vlm/make_data.py --output outputs/tiny_vlm/data

An image of 64 x 64 pixels has 1 to 4 squares of one colour in the cells of a 4 x 4 raster, and is inside the row, as a
data URI. Files: train.jsonl, eval.jsonl (other images), sft.jsonl (demonstrations, three in ten with a wrong number,
so that reinforcement learning has something to correct) and eval.yaml. The seed decides all but what is held out.
"""

from __future__ import annotations

import argparse
import base64
import io
import random
from collections.abc import Iterator
from typing import Any

from PIL import Image, ImageDraw

from examples.tiny import data_parser, write_and_say, write_eval_config, write_jsonl

SIDE, CELL, MOST = 64, 16, 4
COLOURS = ((220, 30, 30), (30, 180, 30), (40, 60, 230), (240, 220, 40))
HELD_OUT_SEED = 20261127  # fixed: every seed of a run is evaluated on the same images
NUM_TRAIN, NUM_EVAL = 4096, 256
MAX_RESPONSE_TOKENS = 3  # a digit and the end of the turn, and one more: who fills the limit is truncated
GRADER = "examples.tiny_cpu.reward:exact_match"
PIECES = ["how many?"]  # one token of the tiny tokenizer, about as a large tokenizer has few for it
QUESTION = {"role": "user", "content": "<image>how many?"}


def draw(rng: random.Random) -> tuple[str, int]:
    """Return an image as a data URI, and the number of its squares."""
    image, count, colour = Image.new("RGB", (SIDE, SIDE), "white"), rng.randint(1, MOST), rng.choice(COLOURS)
    for place in rng.sample(range((SIDE // CELL) ** 2), count):
        x, y = place % 4 * CELL + 2, place // 4 * CELL + 2
        ImageDraw.Draw(image).rectangle([x, y, x + CELL - 5, y + CELL - 5], fill=colour)
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode(), count


def problems(rng: random.Random, count: int) -> Iterator[dict[str, Any]]:
    """Rows of a prompt with its image and the right number."""
    for _ in range(count):
        uri, number = draw(rng)
        yield {"prompt": [QUESTION], "images": [uri], "label": str(number)}


def demonstrations(rng: random.Random, count: int) -> Iterator[dict[str, Any]]:
    """Conversations, three in ten of which have a wrong number."""
    for row in problems(rng, count):
        right = int(row["label"])
        wrong = rng.choice([number for number in range(1, MOST + 1) if number != right])
        answer = {"role": "assistant", "content": str(right if rng.random() < 0.7 else wrong)}
        yield {"messages": [QUESTION, answer], "images": row["images"]}


def write_data(args: argparse.Namespace) -> dict[str, int]:
    """Write all files; returns rows per JSONL file."""
    output, rng = args.output, random.Random(args.seed)
    rows = {
        "sft.jsonl": demonstrations(rng, args.num_demonstrations),
        "train.jsonl": problems(rng, NUM_TRAIN),
        "eval.jsonl": problems(random.Random(HELD_OUT_SEED), NUM_EVAL),
    }
    counts = {name: write_jsonl(output / name, of_file) for name, of_file in rows.items()}
    dataset = {"name": "squares", "path": str(output / "eval.jsonl"), "input_key": "prompt", "label_key": "label"}
    dataset |= {"multimodal_keys": {"image": "images"}, "apply_chat_template": True, "custom_rm_path": GRADER}
    write_eval_config(output / "eval.yaml", dataset, samples=args.eval_samples, max_response_len=MAX_RESPONSE_TOKENS)
    return counts


if __name__ == "__main__":
    write_and_say(write_data, data_parser(__doc__))
