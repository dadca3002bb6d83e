"""The MIS example: weights, rejection, veto and normalisation against plain float64 Python."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from examples.train_infer_mismatch_helper import mis
from tests.training.algorithms.loss_world import (
    MASKS,
    advantages_of,
    aggregate,
    log_ratios,
    make_args,
    make_world,
    rows,
    run,
    token_loss,
)
from tests.unit.megatron_fakes import make_args as make_megatron_args
from tests.unit.megatron_fakes import make_hf_model, run_world

SEED = 20
"""Of a world in which every level and mode does something, and nothing is left out as a whole."""
PATH = "examples.train_infer_mismatch_helper.mis.compute_mis"
BOUNDS = {"tis_lower_bound": 0.85, "tis_upper_bound": 1.2}
REJECTION = {"use_rs": True, "rs_lower_bound": 0.7, "rs_upper_bound": 1.4}


@pytest.fixture(autouse=True)
def no_mean_of_another_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mis, "batch_mean", {})


def mis_args(**settings):
    args = make_args(use_tis=settings.pop("use_tis", True), get_mismatch_metrics=True, custom_tis_function_path=PATH)
    vars(args).update(settings)
    return args


def at_level(level, logs, mask):
    """The ratio of each token of a sample."""
    if level == "token":
        return [math.exp(x) for x in logs]
    kept = [x for x, m in zip(logs, mask, strict=True) if m]
    total = math.fsum(kept) / (max(len(kept), 1) if level == "geometric" else 1)
    return [math.exp(total)] * len(logs)


def bounded(mode, w):
    low, high = BOUNDS["tis_lower_bound"], BOUNDS["tis_upper_bound"]
    if mode == "mask":
        return w if low <= w <= high else 0.0
    return min(w, high) if mode == "truncate" else min(max(w, low), high)


def reference(columns, *, level="token", mode="truncate", rs_level=None, veto=None):
    """(weights [S][R], kept [S][R]) of the module's formulas."""
    weights, kept = [], []
    for old, rollout, mask in zip(columns["old"], columns["rollout"], MASKS, strict=True):
        logs = [a - b for a, b in zip(old, rollout, strict=True)]
        weights.append([bounded(mode, w) for w in at_level(level, logs, mask)])
        keep = [bool(m) for m in mask]
        if rs_level:
            keep = [k and 0.7 <= w <= 1.4 for k, w in zip(keep, at_level(rs_level, logs, mask), strict=True)]
        if veto is not None and any(m and math.exp(x) < veto for x, m in zip(logs, mask, strict=True)):
            keep = [False] * len(keep)
        kept.append(keep)
    return weights, kept


def mean(values):
    return aggregate("seq-mean-token-mean", values)


def token_losses(columns, data):
    ratios = log_ratios("grpo", columns["new"], columns["old"])
    return rows(lambda *token: token_loss("grpo", *token), ratios, columns["new"], advantages_of(data))


@pytest.mark.parametrize("level", mis.LEVELS)
@pytest.mark.parametrize("mode", mis.MODES)
def test_each_level_and_mode_weighs_the_loss_as_the_reference(level: str, mode: str):
    logits, columns, tokens = make_world(SEED)
    _, metrics, data = run(mis_args(tis_level=level, tis_mode=mode, **BOUNDS), logits, columns, tokens)
    weights, _ = reference(columns, level=level, mode=mode)
    losses = rows(lambda w, x: w * x, weights, token_losses(columns, data))
    assert metrics["pg_loss"] == pytest.approx(mean(losses), rel=1e-5)
    assert metrics["mis_weight"] == pytest.approx(mean(weights), rel=1e-5)
    exact = [
        at_level(level, [a - b for a, b in zip(old, rollout, strict=True)], mask)
        for old, rollout, mask in zip(columns["old"], columns["rollout"], MASKS, strict=True)
    ]
    changed = rows(lambda a, b: float(a != b), weights, exact)
    assert metrics["mis_clipfrac"] == pytest.approx(mean(changed)) and 0 < mean(changed) < 3
    assert metrics["mis_below"] == pytest.approx(mean(rows(lambda w: float(w < 0.85), exact)))
    assert metrics["mis_above"] == pytest.approx(mean(rows(lambda w: float(w > 1.2), exact)))


@pytest.mark.parametrize("rs_level", mis.LEVELS)
def test_what_is_rejected_has_no_loss_of_any_kind(rs_level: str):
    logits, columns, tokens = make_world(SEED)
    args = mis_args(rs_level=rs_level, **BOUNDS, **REJECTION)
    vars(args).update(entropy_coef=0.1, use_kl_loss=True, kl_loss_coef=0.2)
    gradient, metrics, data = run(args, logits, columns, tokens)
    weights, kept = reference(columns, rs_level=rs_level)
    left = rows(lambda w, k, x: w * k * x, weights, kept, token_losses(columns, data))
    pg_loss = mean(left)
    assert metrics["pg_loss"] == pytest.approx(pg_loss, rel=1e-5)
    entropy, kl = columns["entropy"], rows(lambda a, b: a - b, columns["new"], columns["ref"])
    rest = mean(rows(lambda k, h, d: k * (-0.1 * h + 0.2 * d), kept, entropy, kl))
    assert metrics["loss"] == pytest.approx(pg_loss + rest, rel=1e-5)
    trained, start = torch.zeros(gradient.shape[1], dtype=torch.bool), 0
    for sample, keep in zip(tokens, kept, strict=True):
        trained[start + 1 : start + 1 + len(keep)] = torch.tensor(keep)
        start += len(sample)
    assert torch.equal(gradient[0].any(1), trained)
    rejected = rows(lambda k, m: float(m and not k), kept, MASKS)
    assert 0 < mean(rejected) < 3 and metrics["mis_rejected"] == pytest.approx(mean(rejected))


@pytest.mark.parametrize(("threshold", "samples"), [(0.1, 0), (0.6, 1), (0.95, 2)])
def test_a_token_below_the_threshold_takes_its_sample_out(threshold: float, samples: int):
    logits, columns, tokens = make_world(SEED)
    logs = rows(lambda a, b: a - b, columns["old"], columns["rollout"])
    columns["rollout"][0][1] = columns["old"][0][1] + 50  # a masked token vetoes nothing
    _, metrics, data = run(mis_args(rs_veto_threshold=threshold, **BOUNDS), logits, columns, tokens)
    weights, kept = reference(columns, veto=threshold)
    trained = [[x for x, m in zip(row, mask, strict=True) if m] for row, mask in zip(logs, MASKS, strict=True)]
    lowest = [math.exp(min(row, default=0)) for row in trained]
    assert [any(keep) for keep in kept] == [w >= threshold and any(m) for w, m in zip(lowest, MASKS, strict=True)]
    losses = rows(lambda w, k, x: w * k * x, weights, kept, token_losses(columns, data))
    assert metrics["pg_loss"] == pytest.approx(mean(losses), rel=1e-5)
    gone = [[float(w < threshold)] * len(m) for w, m in zip(lowest, MASKS, strict=True)]
    assert metrics["mis_vetoed"] == pytest.approx(mean(gone))
    assert sum(w < threshold for w in lowest) == samples


def test_without_use_tis_it_measures_and_rejects_but_weighs_nothing():
    logits, columns, tokens = make_world(SEED)
    _, metrics, data = run(mis_args(use_tis=False, **BOUNDS), logits, columns, tokens)
    assert metrics["pg_loss"] == pytest.approx(mean(token_losses(columns, data)), rel=1e-5)
    logs = rows(lambda a, b: a - b, columns["old"], columns["rollout"])
    assert metrics["mis_ratio"] == pytest.approx(mean(rows(math.exp, logs)), rel=1e-5)
    assert metrics["mis_kl"] == pytest.approx(-mean(logs), rel=1e-4)
    assert metrics["mis_k3_kl"] == pytest.approx(mean(rows(lambda x: math.exp(x) - 1 - x, logs)), rel=1e-3)


def tensors(rows_of_floats):
    return [torch.tensor(row) for row in rows_of_floats]


def measure(args, columns, samples):
    data = {"log_probs": columns["old"], "rollout_log_probs": columns["rollout"], "loss_masks": MASKS}
    mis.measure_batch(args, 0, {name: tensors(column[i] for i in samples) for name, column in data.items()})


def check_mean_over_ranks(megatron_args, settings, expected, rank_of_sample):
    args, (_, columns, _) = mis_args(**settings), make_world(SEED)
    rank = torch.distributed.get_rank()
    measure(args, columns, [i for i, owner in enumerate(rank_of_sample) if owner == rank])
    assert mis.batch_mean["mean"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("level", mis.LEVELS)
@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_normalised_weights_have_mean_one_over_what_is_kept_of_the_batch(level, mode, monkeypatch):
    alone = SimpleNamespace(size=lambda: 1)
    monkeypatch.setattr("megatron.core.parallel_state.get_data_parallel_group", lambda: alone)
    logits, columns, tokens = make_world(SEED)
    settings = {"tis_level": level, "tis_mode": mode, "tis_batch_normalize": True, **BOUNDS, **REJECTION}
    measure(mis_args(**settings), columns, range(len(MASKS)))
    weights, kept = reference(columns, level=level, mode=mode, rs_level="geometric")
    expected = mean_weight(level, weights, kept)
    assert mis.batch_mean["mean"] == pytest.approx(expected, rel=1e-5) and abs(expected - 1) > 0.01
    _, metrics, data = run(mis_args(**settings), logits, columns, tokens)
    losses = rows(lambda w, k, x: w / expected * k * x, weights, kept, token_losses(columns, data))
    assert metrics["pg_loss"] == pytest.approx(mean(losses), rel=1e-5)
    assert metrics["mis_batch_mean"] == pytest.approx(mean([[expected] * len(mask) for mask in MASKS]), rel=1e-5)


def mean_weight(level, weights, kept):
    values = [[w for w, k in zip(*pair, strict=True) if k and w] for pair in zip(weights, kept, strict=True)]
    counted = [w for row in values for w in (row if level == "token" else row[:1])]
    return math.fsum(counted) / len(counted)


def test_the_mean_is_that_of_all_data_parallel_ranks(tmp_path: Path):
    make_hf_model(tmp_path)
    settings = {"tis_level": "geometric", "tis_batch_normalize": True, **BOUNDS}
    weights, kept = reference(make_world(SEED)[1], level="geometric")
    expected = mean_weight("geometric", weights, kept)
    run_world(2, check_mean_over_ranks, make_megatron_args(tmp_path), settings, expected, [0, 1, 1, 1])


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"tis_level": "batch"}, "tis_level 'batch' is none of token, sequence, geometric"),
        ({"tis_mode": None}, "tis_mode None is none of truncate, clip, mask"),
        ({"tis_levle": "token"}, "tis_levle is no setting of MIS; it has rs_level, "),
        ({"tis_upper_bound": "2"}, "tis_upper_bound '2' is no number of at least 0"),
        ({"rs_upper_bound": 0}, "rs_upper_bound 0 leaves nothing; give a bound above 0"),
        ({"tis_lower_bound": 3.0}, "tis_lower_bound 3.0 is above the upper bound 2.0; lower it"),
        ({"use_rs": "yes"}, "use_rs 'yes' is not true or false"),
        ({"rs_veto_threshold": -1}, "rs_veto_threshold -1 is no number of at least 0"),
    ],
)
def test_a_wrong_setting_is_one_sentence(settings, sentence: str):
    (found,) = mis.check_args(mis_args(**settings))
    assert found.startswith(f"--custom-config-path: {sentence}")


def test_normalisation_says_what_it_lacks():
    logits, columns, tokens = make_world(SEED)
    args = mis_args(tis_batch_normalize=True)
    with pytest.raises(ValueError, match="needs --rollout-data-postprocess-path examples.train_infer_mismatch_helper"):
        run(args, logits, columns, tokens)
    with pytest.raises(ValueError, match="needs log_probs of the whole rollout: add --recompute-old-log-probs"):
        mis.measure_batch(args, 0, {"rollout_log_probs": [], "loss_masks": []})


def test_far_ratios_stay_finite_and_reject():
    columns = [[torch.full((400,), x)] for x in (-1.0, -3.0)]
    for level, expected in (("sequence", math.exp(20)), ("token", math.exp(2))):
        settings = mis.Settings(tis_level=level, tis_upper_bound=1e30, use_rs=True, rs_level=level, rs_upper_bound=5.0)
        found = mis.correction(settings, *columns, [torch.ones(400)])
        assert found.weight[0].tolist() == pytest.approx([expected] * 400)
        assert not found.kept[0].any()
