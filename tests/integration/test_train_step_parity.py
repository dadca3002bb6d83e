"""Our trainer against an independent one: Hugging Face model, sample by sample, torch's AdamW.

The reference shares no code with slime: log_softmax, the loss written out, torch's gradient clipping. Weight decay is
large and the clip binds, so a norm that is decayed or a gradient that is scaled wrongly shows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.trainer_world import NUM_ROLLOUTS, NUM_SAMPLES, make_train_data, parameters, train, trainer_args
from tests.unit.megatron_fakes import make_hf_model

FLAGS = "--make-vocab-size-divisible-by 16 --adam-eps 1e-5 --adam-beta2 0.95 --weight-decay 0.1"
LR, EPS, WEIGHT_DECAY, BETAS, CLIP = 1e-3, 1e-5, 0.1, (0.9, 0.95), 0.05


class Reference:
    """One optimizer, and steps of a loss that is a function of (sample, log_p [R, V], log_p of the tokens [R])."""

    def __init__(self, model: torch.nn.Module, *, temperature: float = 1.0) -> None:
        self.model, self.temperature, self.data = model, temperature, make_train_data()
        groups = [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)

    def log_p(self, sample: int) -> tuple[torch.Tensor, torch.Tensor]:
        """log p of every token [R, V], and of the response's tokens [R]."""
        tokens = torch.tensor(self.data["tokens"][sample])
        length = self.data["response_lengths"][sample]
        logits = self.model(tokens[None]).logits[0, -length - 1 : -1] / self.temperature
        log_p = logits.log_softmax(-1)
        return log_p, log_p.gather(1, tokens[-length:, None])[:, 0]

    def step(self, samples: list[int], token_loss: Any, denominators: list[float]) -> tuple[float, float]:
        """Step on token_loss summed over trained tokens, by each sample's denominator; returns loss, gradient norm."""
        self.optimizer.zero_grad()
        total = 0.0
        for sample in samples:
            log_p, picked = self.log_p(sample)
            mask = torch.tensor(self.data["loss_masks"][sample])
            loss = (token_loss(sample, log_p, picked) * mask).sum() / denominators[sample]
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP).item()
        self.optimizer.step()
        return total, norm


def per_rollout_denominators(rollouts_per_step: int) -> list[float]:
    return [max(n, 1) * rollouts_per_step for n in make_train_data()["rollout_mask_sums"]]


def clipped(ratio: torch.Tensor, advantage: float) -> torch.Tensor:
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)


@pytest.fixture(scope="module")
def hf_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hf")
    make_hf_model(path)
    return path


def load_hf(path: Path) -> torch.nn.Module:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

    return Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")


def compare(actor: Any, records: list[Any], log: list[tuple[float, float]], after: str) -> None:
    """Every tensor of this rank moved as the reference's did; loss and gradient norm of every step agree."""
    from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights

    steps = [metrics for metrics, key in records if key == "train/step"]
    assert len(steps) == len(log)
    for metrics, (loss, norm) in zip(steps, log, strict=True):
        assert metrics["train/loss"] == pytest.approx(loss, rel=1e-5, abs=1e-7)
        assert metrics["train/grad_norm"] == pytest.approx(norm, rel=1e-5)
    ours = parameters(actor)
    load_hf_weights(actor.args, actor.state.model, actor.args.load)
    before = parameters(actor)
    load_hf_weights(actor.args, actor.state.model, after)
    for name, expected in parameters(actor).items():
        moved = (expected - before[name]).norm()
        assert moved > 0, name
        assert (ours[name] - expected).norm() <= 1e-3 * moved, (name, ((ours[name] - expected).norm() / moved).item())


LAYOUTS = {
    "one rank, one pack": ("", 1, {}),
    "one rank, small packs": ("", 1, {"max_tokens_per_gpu": 24}),
    "one rank, one sample each": ("", 1, {"use_dynamic_batch_size": False, "micro_batch_size": 1}),
    "TP 2": ("--tensor-model-parallel-size 2", 1, {"max_tokens_per_gpu": 40}),
    "TP 2 with sequence parallelism": ("--tensor-model-parallel-size 2 --sequence-parallel", 1, {}),
    "DP 2": ("", 2, {"max_tokens_per_gpu": 24}),
    "DP 2, overlapped": ("--overlap-grad-reduce --overlap-param-gather", 2, {"max_tokens_per_gpu": 24}),
    "DP 2, a micro-batch twice": ("", 2, {"max_tokens_per_gpu": 4}),  # 13 samples, none fits beside another
    "DP 2, balanced": ("", 2, {"max_tokens_per_gpu": 24, "balance_data": True}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_grpo_step_equals_the_references(hf_path: Path, tmp_path: Path, layout: str):
    data = make_train_data()
    reference = Reference(load_hf(hf_path))
    log = [
        reference.step(
            list(range(NUM_SAMPLES)),
            lambda i, _, picked: clipped((picked - picked.detach()).exp(), data["rewards"][i]),
            per_rollout_denominators(NUM_ROLLOUTS),
        )
    ]
    reference.model.save_pretrained(tmp_path / "after")
    flags, dp_size, changes = LAYOUTS[layout]
    args = trainer_args(hf_path, f"{FLAGS} {flags}", dp_size=dp_size, lr=LR, clip_grad=CLIP, **changes)
    train(args, compare, log, str(tmp_path / "after"), dp_size=dp_size)


def two_steps_with_everything(hf_path: Path, after: Path, temperature: float) -> list[tuple[float, float]]:
    """Two updates per rollout, two rollouts: old log-probs before each rollout, KL from the start, entropy bonus."""
    data = make_train_data()
    reference, start = (
        Reference(load_hf(hf_path), temperature=temperature),
        Reference(load_hf(hf_path), temperature=temperature),
    )
    halves = [[i for i in range(NUM_SAMPLES) if data["rollout_ids"][i] // 6 == half] for half in (0, 1)]
    with torch.no_grad():
        ref = [start.log_p(i)[1] for i in range(NUM_SAMPLES)]
    log = []
    for _ in range(2):
        with torch.no_grad():
            old = [reference.log_p(i)[1] for i in range(NUM_SAMPLES)]

        def token_loss(
            i: int, log_p: torch.Tensor, picked: torch.Tensor, old: list[torch.Tensor] = old
        ) -> torch.Tensor:
            entropy = -(log_p.exp() * log_p).sum(-1)
            kl = (ref[i] - picked).exp() - 1 - (ref[i] - picked)
            return clipped((picked - old[i]).exp(), data["rewards"][i]) - 0.01 * entropy + 0.2 * kl

        log += [reference.step(half, token_loss, per_rollout_denominators(6)) for half in halves]
    reference.model.save_pretrained(after)
    return log


@pytest.mark.parametrize(
    ("flags", "dp_size"),
    [("", 1), ("--tensor-model-parallel-size 2", 2), ("--overlap-grad-reduce --overlap-param-gather", 2)],
)
def test_several_steps_with_kl_entropy_and_temperature_equal_the_references(hf_path, tmp_path, flags, dp_size):
    log = two_steps_with_everything(hf_path, tmp_path / "after", temperature=0.8)
    changes = {
        "rollout_temperature": 0.8,
        "entropy_coef": 0.01,
        "use_kl_loss": True,
        "kl_loss_coef": 0.2,
        "kl_loss_type": "k3",
        "ref_load": str(hf_path),
        "global_batch_size": 6,
        "max_tokens_per_gpu": 50,
    }
    args = trainer_args(hf_path, f"{FLAGS} {flags}", dp_size=dp_size, lr=LR, clip_grad=CLIP, **changes)
    train(args, compare, log, str(tmp_path / "after"), num_rollouts=2, dp_size=dp_size)


@pytest.mark.parametrize(("dp_size", "max_tokens"), [(1, 4096), (2, 24), (2, 4)])
def test_a_per_token_loss_is_the_mean_over_the_steps_tokens(hf_path, tmp_path, dp_size, max_tokens):
    data = make_train_data()
    trained = sum(map(sum, data["loss_masks"]))
    reference = Reference(load_hf(hf_path))
    log = [
        reference.step(
            list(range(NUM_SAMPLES)),
            lambda i, _, picked: clipped((picked - picked.detach()).exp(), data["rewards"][i]),
            [trained] * NUM_SAMPLES,
        )
    ]
    reference.model.save_pretrained(tmp_path / "after")
    changes = {"calculate_per_token_loss": True, "max_tokens_per_gpu": max_tokens}
    args = trainer_args(hf_path, FLAGS, dp_size=dp_size, lr=LR, clip_grad=CLIP, **changes)
    train(args, compare, log, str(tmp_path / "after"), dp_size=dp_size)


@pytest.mark.parametrize(("dp_size", "max_tokens"), [(1, 24), (2, 4096)])
def test_an_sft_step_equals_the_references(hf_path, tmp_path, dp_size, max_tokens):
    reference = Reference(load_hf(hf_path))
    log = [
        reference.step(list(range(NUM_SAMPLES)), lambda i, _, picked: -picked, per_rollout_denominators(NUM_ROLLOUTS))
    ]
    reference.model.save_pretrained(tmp_path / "after")
    changes = {"loss_type": "sft_loss", "max_tokens_per_gpu": max_tokens}
    args = trainer_args(hf_path, FLAGS, dp_size=dp_size, lr=LR, clip_grad=CLIP, **changes)
    train(args, compare, log, str(tmp_path / "after"), dp_size=dp_size)
