"""Turn demonstrations of ReTool into conversations with tool turns, as rollouts of `generate_with_retool` have them.

    hf download --repo-type dataset JoeYing/ReTool-SFT --local-dir ReTool-SFT
    python examples/retool/sft_data_processing.py --input ReTool-SFT/*.parquet --output ReTool-SFT/messages.jsonl

There an answer is one text: `<code>program</code>`, then `<interpreter>result</interpreter>`, and so on.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from tool_sandbox import SCHEMA

SYSTEM = "You are a helpful assistant that can run Python programs with a tool to solve mathematical problems."
_RESULT = re.compile(r"\s*<interpreter>\s*(.*?)\s*</interpreter>\s*", re.DOTALL)


def with_tool_turns(messages: list[dict[str, Any]]) -> list[dict[str, str]]:
    """The conversation with a turn of the tool for each result; what follows a result is a turn of the assistant.

    Example: `<code>print(1)</code><interpreter>1</interpreter>It is 1.` becomes three messages.
    """
    turns: list[dict[str, str]] = []
    for message in messages:
        if message["role"] != "assistant":
            turns.append({"role": message["role"], "content": message["content"]})
            continue
        for number, part in enumerate(_RESULT.split(message["content"])):
            if number % 2:
                turns.append({"role": "tool", "content": f"<interpreter>\n{part}\n</interpreter>"})
            elif part:
                turns.append({"role": "assistant", "content": part})
    return turns if turns[0]["role"] == "system" else [{"role": "system", "content": SYSTEM}, *turns]


def main() -> None:
    """Write a row per conversation that ends with the assistant's turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", type=Path, nargs="+", required=True, help="parquet files with `messages`")
    parser.add_argument("--output", type=Path, required=True, help="JSONL file to write")
    args = parser.parse_args()
    kept = left_out = 0
    with args.output.open("w") as file:
        for path in args.input:
            for row in pq.read_table(path, columns=["messages"]).to_pylist():
                messages = with_tool_turns(row["messages"])
                if messages[-1]["role"] != "assistant":
                    left_out += 1
                    continue
                file.write(json.dumps({"messages": messages, "tools": [SCHEMA]}) + "\n")
                kept += 1
    print(f"{args.output}: {kept} conversations; {left_out} left out, which do not end with an answer")


if __name__ == "__main__":
    main()
