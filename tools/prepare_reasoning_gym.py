r"""Write arithmetic tasks of the package reasoning_gym as JSON lines with prompts and labels.

    python tools/prepare_reasoning_gym.py --output data/chain_sum --task chain_sum --config min_terms=2 max_terms=3

`train.jsonl` and `eval.jsonl` hold {"prompt": message list, "label": answer, "metadata": {"rm_type", "task"}}; no
question is in both. By default the answer is asked for in \boxed{}, so the rewards `math` and `boxed_*` can grade it.
It knows nothing of models.

Only the module of the task is imported: the package's own `__init__` imports every task, and with them packages that
have to be compiled (install reasoning_gym with `pip install --no-deps reasoning_gym`).
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
import types
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
    return [{"question": question, "answer": answer} for question, answer in found.items()]


def to_row(question: dict[str, str], *, task: str, rm_type: str, instruction: str) -> dict[str, Any]:
    """One line of the output."""
    return {
        "prompt": [{"role": "user", "content": f"{question['question'].strip()}\n{instruction}".strip()}],
        "label": question["answer"],
        "metadata": {"rm_type": rm_type, "task": task},
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
    parser.add_argument("--task", default="chain_sum", choices=sorted(TASKS))
    parser.add_argument("--num-train", type=int, default=4000)
    parser.add_argument("--num-eval", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rm-type", default="math", help="reward named in each row's metadata")
    parser.add_argument("--instruction", default=DEFAULT_INSTRUCTION, help="line added to each question")
    parser.add_argument("--config", nargs="*", default=[], metavar="KEY=VALUE", help="fields of the task's config")
    return parser


def main() -> None:
    """Write both files and say how many rows they have."""
    args = build_parser().parse_args()
    config = {key: parse_value(value) for key, _, value in (item.partition("=") for item in args.config)}
    wanted = args.num_train + args.num_eval
    questions = make_questions(args.task, count=wanted, seed=args.seed, config=config)
    if len(questions) <= args.num_eval:
        raise SystemExit(f"error: {args.task} gave {len(questions)} different questions, too few for --num-eval")
    args.output.mkdir(parents=True, exist_ok=True)
    parts = {"eval": questions[: args.num_eval], "train": questions[args.num_eval :]}
    for name, part in parts.items():
        path = args.output / f"{name}.jsonl"
        rows = (to_row(q, task=args.task, rm_type=args.rm_type, instruction=args.instruction) for q in part)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{path}: {len(part)} rows")


if __name__ == "__main__":
    main()
