"""Give the problems of DAPO-Math-17k (or AIME) retool's system message and tool.

python examples/retool/rl_data_preprocess.py --input dapo-math-17k.jsonl --output dapo-math-17k-retool.jsonl
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from sft_data_processing import SYSTEM
from tool_sandbox import SCHEMA


def with_tool(row: dict[str, Any]) -> dict[str, Any]:
    """The row with a system message, unless it has one, and the tool's schema."""
    prompt = row["prompt"] if isinstance(row["prompt"], list) else [{"role": "user", "content": row["prompt"]}]
    if prompt[0]["role"] != "system":
        prompt = [{"role": "system", "content": SYSTEM}, *prompt]
    return {"prompt": prompt, "label": str(row["label"]), "tools": [SCHEMA]}


def main() -> None:
    """Write a row per problem."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", type=Path, required=True, help="JSONL with prompt and label")
    parser.add_argument("--output", type=Path, required=True, help="JSONL file to write")
    args = parser.parse_args()
    lines = args.input.read_text().splitlines()
    args.output.write_text("".join(json.dumps(with_tool(json.loads(line))) + "\n" for line in lines))
    print(f"{args.output}: {len(lines)} problems")


if __name__ == "__main__":
    main()
