"""Write the data of the task: which of two numbers is larger?

    python examples/bring_your_own_task/make_data.py --output outputs/own-task/data

train.jsonl and eval.jsonl hold one JSON object a line. Replace `rows` with a loop over your own data.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from pathlib import Path


def rows(seed: int = 0) -> list[dict[str, object]]:
    """Return all 9,900 questions in random order, each with the messages, the label and metadata of a row."""
    pairs = list(itertools.permutations(range(100), 2))
    random.Random(seed).shuffle(pairs)
    return [
        {
            "prompt": [{"role": "user", "content": f"{a:02d}?{b:02d}="}],
            "label": f"{max(a, b):02d}",
            "metadata": {"distance": abs(a - b)},
        }
        for a, b in pairs
    ]


def main() -> None:
    """Write both files: no question of the evaluation set is trained on."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="directory to write")
    output = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    questions = rows()
    for name, part in {"eval.jsonl": questions[:200], "train.jsonl": questions[200:]}.items():
        (output / name).write_text("".join(json.dumps(row) + "\n" for row in part))
        print(f"{output / name}: {len(part)} rows")


if __name__ == "__main__":
    main()
