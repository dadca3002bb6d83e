"""A rollout manager whose engine is scripted (tests.unit.rollout_fakes): no Ray, no model; all else is the real code.

`user_package` stands in for a package of the user's: it is found on the Python path, or read from its file.
"""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

from slime.config.prompt_sources import prompt_sources
from slime.observability.rollout_records.recorder import SampleRecorder
from slime.ray.rollout.manager import RolloutManager
from slime.utils.eval_config import EvalDatasetConfig
from slime.utils.train_data import PER_TOKEN, restore_columns
from tests.unit.rollout_fakes import FakeEngine, LetterTokenizer, rollout_args

OF_MANAGER: dict[str, Any] = {
    "eval_function_path": "slime.rollout.sglang_rollout.generate_rollout",  # what the parser derives
    "global_batch_size": 1,
    "rewards_normalization": False,
    "grpo_std_normalization": False,
    "keep_rollouts": "none",
}


class TextTokenizer(LetterTokenizer):
    """Takes one text or several, as a real one does."""

    def __call__(self, texts: Any, add_special_tokens: bool = False, **kwargs: Any) -> dict[str, Any]:
        if isinstance(texts, str):
            return {"input_ids": self.encode(texts)}
        return super().__call__(texts)


class World:
    """Builds managers. Prompts are "p" and a letter; the engine answers letter n of the alphabet with n tokens."""

    def __init__(self, engine: FakeEngine, folder: Path) -> None:
        self.engine, self.folder = engine, folder

    def prompts(self, name: str, letters: str) -> str:
        """A prompt file."""
        path = self.folder / f"{name}.jsonl"
        rows = [{"input": f"p{letter}", "label": letter, "metadata": {"row": i}} for i, letter in enumerate(letters)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    def args(self, letters: str = "bc", **changes: Any) -> Namespace:
        """Every flag that a rollout reads."""
        given = {"sglang_router_port": self.engine.port, "prompt_data": self.prompts("train", letters), **changes}
        args = Namespace(**{**vars(rollout_args()), **OF_MANAGER, **given})
        args.prompt_sources = prompt_sources(args)
        return args

    def manager(self, letters: str = "bc", **changes: Any) -> RolloutManager:
        """A manager as it is after `start`, for a trainer of one rank."""
        manager = RolloutManager.__new__(RolloutManager)
        manager.args = self.args(letters, **changes)
        manager.data_source, manager._parallel_config = None, {"dp_size": 1, "cp_size": 1}
        manager._generated = manager.replacements = manager._router_watch = None
        manager.recorder = SampleRecorder(manager.args)
        manager.load_user_code()
        return manager

    def data_set(self, name: str, letters: str, **settings: Any) -> EvalDatasetConfig:
        """An evaluation set."""
        return EvalDatasetConfig(name, self.prompts(name, letters), **{"max_response_len": 9, **settings})


def rollout(manager: RolloutManager, rollout_id: int) -> tuple[list[Any], list[Any]]:
    """A rollout as the driver asks for it: its samples, then the shares and metric records that are made of them."""
    manager.generate(rollout_id)
    return manager.train_data()


def train_data(manager: RolloutManager, rollout_id: int = 0) -> dict[str, Any]:
    """The columns that one rollout gives the trainer, in the order of the samples."""
    share = restore_columns(rollout(manager, rollout_id)[0][0].inner)
    share |= {name: [value.tolist() for value in share[name]] for name in PER_TOKEN if name in share}
    order = sorted(range(len(share["partition"])), key=share["partition"].__getitem__)
    num_samples = len(order)
    return {
        name: [column[i] for i in order] if isinstance(column, list) and len(column) == num_samples else column
        for name, column in share.items()
    }
