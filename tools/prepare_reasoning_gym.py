r"""Write arithmetic tasks of the package reasoning_gym as JSON lines with prompts and labels.

    python tools/prepare_reasoning_gym.py --output data/chain_sum --task chain_sum --config min_terms=2 max_terms=3
    python tools/prepare_reasoning_gym.py --output data/mixed --part chain_sum max_digits=1 --part gcd

`train.jsonl` and `eval.jsonl` hold {"prompt": message list, "label": answer, "metadata": {"rm_type", "task"}}; no
question is in both, and both are drawn alike: every part (--part, or the one of --task) has an equal share of either
file. A part with few questions bounds what each holds back (a quarter of its questions), and repeats those it trains
on. By default the answer is asked for in \boxed{}, so the rewards `math` and `boxed_*` can grade it. It knows nothing
of models.

Only the module of the task is imported: the package's own `__init__` imports every task, and with them packages that
have to be compiled (install reasoning_gym with `pip install --no-deps reasoning_gym`).
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import random
import re
import sys
import types
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

PACKAGE = "reasoning_gym.arithmetic"
# task -> (config class, data set class); all need nothing but the standard library
TASKS = {
    "basic_arithmetic": ("BasicArithmeticDatasetConfig", "BasicArithmeticDataset"),
    "chain_sum": ("ChainSumConfig", "ChainSumDataset"),
    "decimal_chain_sum": ("DecimalChainSumConfig", "DecimalChainSumDataset"),
    "gcd": ("GCDConfig", "GCDDataset"),
    "lcm": ("LCMConfig", "LCMDataset"),
    "products": ("ProductsConfig", "ProductsDataset"),
}
DEFAULT_INSTRUCTION = "Put only the final answer inside \\boxed{}."


def import_task_module(task: str) -> types.ModuleType:
    """The module of one task, with its parent packages present but not executed.

    Raises:
        SystemExit: reasoning_gym is not installed.
    """
    if importlib.util.find_spec("reasoning_gym") is None:
        raise SystemExit("error: reasoning_gym is not installed: pip install --no-deps reasoning_gym")
    for name in ("reasoning_gym", PACKAGE):
        if name not in sys.modules:
            parent = sys.modules.get(name.rpartition(".")[0])
            path = list(parent.__path__) if parent else None
            spec = PathFinder.find_spec(name, path)
            if spec is None or spec.submodule_search_locations is None:
                raise SystemExit(f"error: {name} was not found in the installed reasoning_gym")
            package = types.ModuleType(name)
            package.__path__ = list(spec.submodule_search_locations)
            package.__spec__ = spec
            sys.modules[name] = package
    return importlib.import_module(f"{PACKAGE}.{task}")


def make_questions(task: str, *, count: int, seed: int, config: dict[str, Any]) -> list[dict[str, str]]:
    """`count` different questions with their answers; fewer when the task has no more of them."""
    module = import_task_module(task)
    config_class, dataset_class = (getattr(module, name) for name in TASKS[task])
    found: dict[str, str] = {}
    for item in dataset_class(config_class(size=4 * count, seed=seed, **config)):
        found.setdefault(item["question"], str(item["answer"]))
        if len(found) == count:
            break
    return [{"task": task, "question": question, "answer": answer} for question, answer in found.items()]


def split_parts(
    parts: Sequence[Sequence[dict[str, str]]], *, num_train: int, num_eval: int, seed: int
) -> dict[str, list[dict[str, str]]]:
    """Rows of "train" and "eval": no question in both, in any words, and the same share of every part in each.

    Args:
        parts: the different questions of each part; one that an earlier part has, too, counts there.
        num_train: rows to draw; questions repeat where a part has too few.
        num_eval: rows to hold back; equally many of each part, at most a quarter of the smallest one's questions.
        seed: of the order, which no file has from the generator: there the rare kinds come first.
    """
    rng, seen = random.Random(seed), set[str]()
    rows: dict[str, list[dict[str, str]]] = {"eval": [], "train": []}
    pools = []
    for part in parts:
        pools.append([question for question in part if question["question"] not in seen])
        seen |= {question["question"] for question in pools[-1]}
    held_back = min(num_eval // len(parts), *(max(1, len(pool) // 4) for pool in pools))
    for pool in pools:
        rng.shuffle(pool)
        rows["eval"] += pool[:held_back]
    held_out = {expression(row["question"]) for row in rows["eval"]}
    for pool in pools:
        rest = [row for row in pool[held_back:] if expression(row["question"]) not in held_out]
        wanted = num_train // len(parts)
        rows["train"] += (rest * -(-wanted // max(1, len(rest))))[:wanted]
    rng.shuffle(rows["eval"])
    rng.shuffle(rows["train"])
    return rows


def expression(question: str) -> tuple[str, ...]:
    """Numbers and operators of a question: two tasks may ask for the same sum in other words."""
    return tuple(re.findall(r"\d+(?:\.\d+)?|[-+*/()]", question))


def to_row(question: dict[str, str], *, rm_type: str, instruction: str) -> dict[str, Any]:
    """One line of the output."""
    return {
        "prompt": [{"role": "user", "content": f"{question['question'].strip()}\n{instruction}".strip()}],
        "label": question["answer"],
        "metadata": {"rm_type": rm_type, "task": question["task"]},
    }


def parse_value(text: str) -> Any:
    """A config value: JSON where it is JSON, else the text."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="directory to write")
    parser.add_argument("--task", default="chain_sum", choices=sorted(TASKS), help="what is asked")
    parser.add_argument("--num-train", type=int, default=4000, help="rows to train on")
    parser.add_argument("--num-eval", type=int, default=200, help="rows to evaluate on")
    parser.add_argument("--seed", type=int, default=0, help="seed of the rows")
    parser.add_argument("--rm-type", default="math", help="reward named in each row's metadata")
    parser.add_argument("--instruction", default=DEFAULT_INSTRUCTION, help="line added to each question")
    parser.add_argument("--config", nargs="*", default=[], metavar="KEY=VALUE", help="fields of the task's config")
    parser.add_argument(
        "--part",
        nargs="+",
        action="append",
        metavar=("TASK", "KEY=VALUE"),
        help="a task and its config, instead of --task and --config; again for a mixture in equal shares",
    )
    return parser


def main() -> None:
    """Write both files and say how many rows they have."""
    args = build_parser().parse_args()
    parts = [(args.task, args.config)] if not args.part else [(task, config) for task, *config in args.part]
    if unknown := [task for task, _ in parts if task not in TASKS]:
        raise SystemExit(f"error: --part {unknown[0]} is no task; choose from {', '.join(sorted(TASKS))}")
    wanted = (args.num_train + args.num_eval) // len(parts)
    questions = []
    for task, settings in parts:
        config = {key: parse_value(value) for key, _, value in (item.partition("=") for item in settings)}
        questions.append(make_questions(task, count=wanted, seed=args.seed, config=config))
        if len(questions[-1]) < 2:
            raise SystemExit(f"error: {task} gave {len(questions[-1])} different questions, too few to hold any back")
    args.output.mkdir(parents=True, exist_ok=True)
    split = split_parts(questions, num_train=args.num_train, num_eval=args.num_eval, seed=args.seed)
    for name, part in split.items():
        path = args.output / f"{name}.jsonl"
        rows = (to_row(question, rm_type=args.rm_type, instruction=args.instruction) for question in part)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{path}: {len(part)} rows")


if __name__ == "__main__":
    main()
