"""Write the tasks of an environment as rows whose prompt is the task's number.

    python examples/tau-bench/tau1_mock.py --local_dir tau-bench --env retail
    python examples/tau-bench/tau1_mock.py --local_dir outputs/tau-bench/data --env shop

Files: {env}_{split}_tasks.jsonl, rows {"index": "0", "metadata": {...}}; --input-key index reads them.
"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

import shop
from tau_environments import SHOP, tau2_task_ids

from examples.tiny import write_jsonl


def splits_of(env: str) -> dict[str, dict[int, str]]:
    """Split -> {number of a task: its name} of an environment."""
    if env == SHOP:
        return {split: {task: shop.ORDERS[task].order_id for task in shop.tasks(split)} for split in ("train", "test")}
    loader = importlib.import_module("tau2.registry").registry.get_task_splits_loader(env)
    names = list(loader()) if loader is not None else ["base"]
    return {split: dict(enumerate(tau2_task_ids(env, split))) for split in names}


def write_tasks(directory: Path, env: str) -> dict[str, int]:
    """Write all splits; returns rows per file."""
    counts = {}
    for split, names in splits_of(env).items():
        path = directory / f"{env}_{split}_tasks.jsonl"
        rows = [{"index": str(task), "metadata": {"split": split, "task_id": name}} for task, name in names.items()]
        counts[str(path)] = write_jsonl(path, rows)
    return counts


def main() -> None:
    """Write the files and say what is in them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_dir", type=Path, required=True, help="directory to write")
    parser.add_argument("--env", default="retail", help="a domain of tau2, or shop")
    args = parser.parse_args()
    for path, count in write_tasks(args.local_dir, args.env).items():
        print(f"{path}: {count} rows")


if __name__ == "__main__":
    main()
