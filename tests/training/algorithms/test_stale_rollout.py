"""TIS, IcePop, MIS and OPSM on a rollout that was really stale: every token's weight equals its formula.

tests/fixtures/stale_rollout.json is rollout 2 of train_async.py on the tiny task with --update-weights-interval 8 and
lr 4e-4: its tokens are by the engine's first weights, `log_probs` by the trainer's after two updates
(--recompute-old-log-probs, --save-debug-train-data), 5 decimals.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from examples.train_infer_mismatch_helper import mis
from slime.algorithms.losses import compute_opsm_mask
from slime.backends.megatron_utils.loss import icepop_function, vanilla_tis_function

LOW, HIGH = 0.8, 1.25
Rows = list[list[float]]


@pytest.fixture(scope="module")
def dump() -> dict[str, Rows]:
    return json.loads((Path(__file__).resolve().parents[2] / "fixtures/stale_rollout.json").read_text())


def tensors(values: Rows) -> list[torch.Tensor]:
    return [torch.tensor(row) for row in values]


def log_ratios(dump: dict[str, Rows]) -> Rows:
    pairs = zip(dump["log_probs"], dump["rollout_log_probs"], strict=True)
    return [[old - mu for old, mu in zip(*pair, strict=True)] for pair in pairs]


def corrected(function: Any, dump: dict[str, Rows], **settings: Any) -> tuple[Rows, Rows]:
    """(weights, masks) of each token: what a loss of 1 becomes."""
    lengths = [len(row) for row in dump["log_probs"]]
    loss, masks, _ = function(
        args=SimpleNamespace(use_tis=True, tis_clip=HIGH, tis_clip_low=LOW, **settings),
        pg_loss=torch.ones(sum(lengths)),
        train_log_probs=tensors(dump["log_probs"]),
        rollout_log_probs=tensors(dump["rollout_log_probs"]),
        loss_masks=[torch.tensor(row, dtype=torch.int32) for row in dump["loss_masks"]],
        total_lengths=[length + 8 for length in lengths],
        response_lengths=lengths,
    )
    return [row.tolist() for row in loss.split(lengths)], [row.tolist() for row in masks]


def assert_rows(found: Rows, expected: Rows) -> None:
    for row, wanted in zip(found, expected, strict=True):
        assert row == pytest.approx(wanted, rel=1e-5)


def test_the_rollout_is_stale(dump: dict[str, Rows]):
    logs = [x for row in log_ratios(dump) for x in row]
    assert sum(map(abs, logs)) / len(logs) > 0.05, "engine and trainer held different weights"
    ratios = [math.exp(x) for x in logs]
    inside = sum(LOW <= w <= HIGH for w in ratios) / len(ratios)
    assert 0.2 < inside < 0.95, "the bounds of these tests do something"
    # the engine wrote the tokens, so the mean of trainer / engine (not of engine / trainer) is 1 but for chance
    error = math.sqrt(sum((w - 1) ** 2 for w in ratios)) / len(ratios)
    assert abs(sum(ratios) / len(ratios) - 1) < 4 * error


def test_tis_weighs_each_token_with_its_clamped_ratio(dump: dict[str, Rows]):
    expected = [[min(max(math.exp(x), LOW), HIGH) for x in row] for row in log_ratios(dump)]
    assert_rows(corrected(vanilla_tis_function, dump)[0], expected)


def test_icepop_leaves_out_the_tokens_outside_the_bounds(dump: dict[str, Rows]):
    expected = [[math.exp(x) * (LOW <= math.exp(x) <= HIGH) for x in row] for row in log_ratios(dump)]
    assert_rows(corrected(icepop_function, dump)[0], expected)


@pytest.mark.parametrize("level", mis.LEVELS)
@pytest.mark.parametrize("mode", mis.MODES)
def test_mis_weighs_and_rejects_at_its_levels(dump: dict[str, Rows], level: str, mode: str):
    settings = {"tis_level": level, "tis_mode": mode, "tis_lower_bound": LOW, "tis_upper_bound": HIGH}
    rejection = {"use_rs": True, "rs_level": "geometric", "rs_lower_bound": 0.9, "rs_upper_bound": 1.1}
    weights, masks = corrected(mis.compute_mis, dump, **settings, **rejection, rs_veto_threshold=0.2)
    of_level = {"token": lambda row: row, "sequence": lambda row: [math.fsum(row)] * len(row)}
    of_level["geometric"] = lambda row: [math.fsum(row) / len(row)] * len(row)
    of_mode = {
        "truncate": lambda w: min(w, HIGH),
        "clip": lambda w: min(max(w, LOW), HIGH),
        "mask": lambda w: w * (LOW <= w <= HIGH),
    }
    logs = log_ratios(dump)
    assert_rows(weights, [[of_mode[mode](math.exp(x)) for x in of_level[level](row)] for row in logs])
    kept = [0.9 <= math.exp(math.fsum(row) / len(row)) <= 1.1 and math.exp(min(row)) >= 0.2 for row in logs]
    assert masks == [[int(keep)] * len(row) for keep, row in zip(kept, logs, strict=True)]
    assert 0 < sum(kept) < len(kept)


def test_opsm_leaves_out_bad_samples_that_the_trainer_has_left(dump: dict[str, Rows]):
    """As with --use-rollout-logprobs: the engine's policy is the old one."""
    columns = [tensors(dump[name]) for name in ("log_probs", "rollout_log_probs", "advantages", "loss_masks")]
    delta = 0.02
    keep = compute_opsm_mask(*columns, delta).split([len(row) for row in dump["log_probs"]])
    expected = []
    for row, advantages in zip(log_ratios(dump), dump["advantages"], strict=True):
        is_far = -math.fsum(row) / len(row) > delta
        expected.append([0.0 if is_far and a < 0 else 1.0 for a in advantages])
    assert [row.tolist() for row in keep] == expected
    assert {0.0, 1.0} == {x for row in expected for x in row}
