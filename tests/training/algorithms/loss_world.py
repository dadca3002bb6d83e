"""One micro-batch with hand-made logits, and what its loss is by a reference of plain float64 Python.

Samples: a long one with masked tokens inside, one of a single token, one fully masked, one of the same rollout as the
first (fan-out).
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch

from slime.algorithms.estimators import ESTIMATORS
from slime.backends.megatron_utils import loss as losses
from slime.backends.megatron_utils.data import Packing
from slime.training.micro_batches import MicroBatches, to_tensors

VOCAB = 11
MASKS = [[1, 0, 1, 1], [1], [0, 0, 0], [1, 1]]
ROLLOUTS = [0, 1, 2, 0]
REWARDS = [1.5, -2.0, 1e4, -0.75]
"""The sample that is fully masked has a far reward, which must not show anywhere."""
LENGTHS = [len(mask) for mask in MASKS]
NUM_ROLLOUTS = 3
MAX_RESPONSE = 8
GAP = {"old": 0.4, "rollout": 0.6, "ref": 0.5}
"""How far, at most, each kind of log-prob is from the present one."""


def make_args(**changes):
    values = {
        "advantage_estimator": "grpo",
        "calculate_per_token_loss": False,
        "custom_advantage_function_path": None,
        "custom_loss_function_path": None,
        "entropy_coef": 0.0,
        "eps_clip": 0.2,
        "eps_clip_c": None,
        "eps_clip_high": 0.28,
        "gamma": 1.0,
        "kl_coef": 0.0,
        "kl_loss_coef": 0.0,
        "kl_loss_type": "k1",
        "lambd": 0.9,
        "log_probs_chunk_size": -1,
        "loss_type": "policy_loss",
        "normalize_advantages": False,
        "opd_kl_coef": 1.0,
        "recompute_loss_function": False,
        "rollout_temperature": 1.0,
        "rollout_top_p": 1.0,
        "custom_pg_loss_reducer_function_path": None,
        "custom_tis_function_path": None,
        "get_mismatch_metrics": False,
        "loss_agg_mode": "seq-mean-token-mean",
        "opsm_delta": 1e-4,
        "rollout_max_response_len": None,
        "tis_clip": 2.0,
        "tis_clip_low": 0.0,
        "use_opd": False,
        "use_opsm": False,
        "use_tis": False,
        "use_unbiased_kl": False,
        "use_kl_loss": False,
        "use_rollout_logprobs": False,
        "vocab_size": VOCAB,
    }
    assert changes.keys() <= values.keys(), "a flag that no loss reads"
    return SimpleNamespace(**(values | changes))


def make_world(seed=0):
    """(logits, columns [S][R] of floats: the present log-probs and entropies, and the others near them)."""
    generator = torch.Generator().manual_seed(seed)
    tokens = [[1, 2, *range(3, 3 + length)] for length in LENGTHS]
    logits = torch.randn(1, sum(map(len, tokens)), VOCAB, generator=generator)
    log_p = logits[0].double().log_softmax(-1)
    new, entropy, start = [], [], 0
    for sample, length in zip(tokens, LENGTHS, strict=True):
        rows = range(start + 1, start + 1 + length)
        new.append([log_p[row, sample[row - start + 1]].item() for row in rows])
        entropy.append([-(log_p[row].exp() * log_p[row]).sum().item() for row in rows])
        start += len(sample)
    columns = {"new": new, "entropy": entropy}
    for name, gap in GAP.items():
        shift = (torch.rand(sum(LENGTHS), generator=generator).double() * 2 - 1) * gap
        columns[name] = [
            [a + b for a, b in zip(x, y.tolist(), strict=True)] for x, y in zip(new, shift.split(LENGTHS), strict=True)
        ]
    return logits, columns, tokens


def run(args, logits, columns, tokens, *, rewards=REWARDS, num_microbatches=1, dp_size=1):
    """(gradient of the logits, metrics) of the loss of slime, in a step of so many micro-batches and ranks."""
    sums = [sum(sum(MASKS[j]) for j in range(len(MASKS)) if ROLLOUTS[j] == ROLLOUTS[i]) for i in range(len(MASKS))]
    data = {
        "tokens": tokens,
        "response_lengths": LENGTHS,
        "loss_masks": MASKS,
        "rewards": rewards,
        "rollout_log_probs": columns["rollout"],
        "rollout_mask_sums": sums,
        "micro_batch_indices": [list(range(len(MASKS)))],
        "num_microbatches": [1],
        "global_batch_sizes": [NUM_ROLLOUTS],
    }
    data = to_tensors(data, torch.device("cpu"))
    data["log_probs"] = [torch.tensor(x) for x in columns["old"]]
    data["ref_log_probs"] = [torch.tensor(x) for x in columns["ref"]]
    if args.use_opd:
        data["teacher_log_probs"] = [torch.tensor(x) for x in columns["teacher"]]
    if ESTIMATORS[args.advantage_estimator].needs_critic:
        data["values"] = [0.5 - x for x in data["log_probs"]]  # any: the losses are compared at given advantages
    losses.compute_advantages_and_returns(args, data)
    batch = next(iter(MicroBatches(data, Packing()).of_step(None)))
    logits = logits.clone().requires_grad_()
    scale = {"num_microbatches": num_microbatches, "global_batch_size": NUM_ROLLOUTS, "dp_size": dp_size}
    loss, _, report = losses.loss_function(args, batch, logits, **scale)
    loss.backward()
    return logits.grad, dict(zip(report["keys"], report["values"][1:].tolist(), strict=True)), data


def aggregate(mode, values):
    """The sum that a micro-batch reports of values [S][R], by --loss-agg-mode."""
    kept = [[x for x, m in zip(row, mask, strict=True) if m] for row, mask in zip(values, MASKS, strict=True)]
    if mode == "token-mean":
        return math.fsum(x for row in kept for x in row)
    total = 0.0
    for rollout in set(ROLLOUTS):
        tokens = [x for row, owner in zip(kept, ROLLOUTS, strict=True) if owner == rollout for x in row]
        count = {
            "seq-mean-token-mean": max(len(tokens), 1),
            "seq-mean-token-sum": 1,
            "seq-mean-token-sum-norm": MAX_RESPONSE,
        }
        total += math.fsum(tokens) / count[mode]
    return total


def rows(function, *columns):
    """function applied to each token of columns [S][R]."""
    return [[function(*values) for values in zip(*row, strict=True)] for row in zip(*columns, strict=True)]


def log_ratios(estimator, new, old):
    if estimator != "gspo":
        return rows(lambda a, b: a - b, new, old)
    result = []
    for new_row, old_row, mask in zip(new, old, MASKS, strict=True):
        kept = [a - b for a, b, m in zip(new_row, old_row, mask, strict=True) if m]
        result.append([math.fsum(kept) / max(len(kept), 1)] * len(mask))
    return result


def token_loss(estimator, log_ratio, new, advantage):
    ratio = math.exp(log_ratio)
    clipped = min(max(ratio, 1 - 0.2), 1 + 0.28)
    if estimator == "cispo":
        return -clipped * advantage * new
    return max(-ratio * advantage, -clipped * advantage)


def reference_pg_loss(estimator, columns, advantages, mode="seq-mean-token-mean"):
    ratios = log_ratios(estimator, columns["new"], columns["old"])
    values = rows(lambda *token: token_loss(estimator, *token), ratios, columns["new"], advantages)
    return aggregate(mode, values)


def advantages_of(data):
    return [row.double().tolist() for row in data["advantages"]]
