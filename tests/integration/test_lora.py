"""LoRA in the trainer against PEFT: steps, gradient norms, exports, checkpoints of adapters alone, in several layouts.

The reference is a Hugging Face model with PEFT's adapters and torch's AdamW. It starts from the PEFT directory that a
trainer wrote before its first step, so both have the same A. B starts at 0, so A moves from the second step on.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader

from slime.checkpoints.paths import iteration_dir
from slime.utils.errors import UsageError
from tests.integration.test_train_step_parity import (
    CLIP,
    FLAGS,
    LR,
    Reference,
    clipped,
    load_hf,
    per_rollout_denominators,
)
from tests.integration.trainer_world import (
    NUM_ROLLOUTS,
    NUM_SAMPLES,
    make_train_data,
    parameters,
    resumed_from,
    train,
    train_and_save,
    train_once_more,
    trainer_args,
)
from tests.unit.megatron_fakes import make_hf_model

STEPS = 3
LORA: dict[str, Any] = {"lora_rank": 4, "lora_alpha": 12.0}
SOME = ("q_proj", "k_proj", "v_proj", "down_proj", "lm_head")
WITH_HEAD = {"lora_target_modules": ("all-linear", "lm_head")}
IN_CHUNKS = {"recompute_loss_function": True, **WITH_HEAD}
KL = {"use_kl_loss": True, "kl_loss_coef": 0.2, "kl_loss_type": "k3"}


@pytest.fixture(scope="module")
def hf_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hf")
    make_hf_model(path)
    return path


def lora_args(hf_path: Path, flags: str = "", **changes: Any) -> Any:
    base = {"lr": LR, "clip_grad": CLIP, "ref_load": str(hf_path), **LORA, **KL}
    return trainer_args(hf_path, f"{FLAGS} {flags}", **(base | changes))


def write_start(actor: Any, records: list[Any], out: Path) -> None:
    from slime.backends.megatron_utils.layers.lora import save_adapter

    save_adapter(actor.args, actor.state.model, out)


class LinearExperts(torch.nn.ModuleList):
    """HF's experts as linear layers, one by one: PEFT gives no adapters to tensors of three dimensions."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        for gate_up, down in zip(experts.gate_up_proj.detach(), experts.down_proj.detach(), strict=True):
            weights = {"gate_proj": gate_up.chunk(2)[0], "up_proj": gate_up.chunk(2)[1], "down_proj": down}
            expert = torch.nn.Module()
            for name, weight in weights.items():
                linear = torch.nn.Linear(*reversed(weight.shape), bias=False)
                linear.weight = torch.nn.Parameter(weight.clone())
                expert.add_module(name, linear)
            self.append(expert)

    def forward(self, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        outputs = [e.down_proj(torch.nn.functional.silu(e.gate_proj(rows)) * e.up_proj(rows)) for e in self]
        shares = torch.nn.functional.one_hot(chosen, len(self)) * weights[..., None]
        return torch.einsum("ebh,bke->bh", torch.stack(outputs), shares.to(rows.dtype))


def load_base(path: Path) -> torch.nn.Module:
    """The HF model; experts have linear layers of their own."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            layer.mlp.experts = LinearExperts(layer.mlp.experts)
            model.config.model_type = "linear_experts"  # PEFT has rules of its own for those it knows
    return model


def peft_model(hf_path: Path, adapter: Path, *, is_trainable: bool = False) -> Any:
    from peft import PeftModel

    return PeftModel.from_pretrained(load_base(hf_path), str(adapter), is_trainable=is_trainable)


def peft_steps(hf_path: Path, adapter: Path) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """(loss, gradient norm) of each of the reference's steps, and PEFT's tensors after them."""
    from peft import get_peft_model_state_dict

    data, reference = make_train_data(), Reference(peft_model(hf_path, adapter, is_trainable=True))
    with torch.no_grad(), reference.model.disable_adapter():
        of_base = [reference.log_p(i)[1] for i in range(NUM_SAMPLES)]

    def token_loss(i: int, _: torch.Tensor, picked: torch.Tensor) -> torch.Tensor:
        kl = (of_base[i] - picked).exp() - 1 - (of_base[i] - picked)
        return clipped((picked - picked.detach()).exp(), data["rewards"][i]) + 0.2 * kl

    denominators = per_rollout_denominators(NUM_ROLLOUTS)
    log = [reference.step(list(range(NUM_SAMPLES)), token_loss, denominators) for _ in range(STEPS)]
    return log, get_peft_model_state_dict(reference.model, save_embedding_layers=False)


@pytest.fixture(scope="module")
def reference(hf_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], Any]:
    """From target modules: PEFT's directory of the start, the reference's steps, its tensors after them."""

    @functools.cache
    def of(targets: tuple[str, ...] | None) -> Any:
        start = tmp_path_factory.mktemp("start") / "adapter"
        train(lora_args(hf_path, lora_target_modules=targets), write_start, start, num_rollouts=0)
        return start, *peft_steps(hf_path, start)

    return of


def check_steps(
    actor: Any, records: list[Any], start: Path, log: list[tuple[float, float]], after: Any, out: Path
) -> None:
    """Steps and tensors are the reference's; the base has kept its bits."""
    from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights
    from slime.backends.megatron_utils.layers.lora import save_adapter

    steps = [metrics for metrics, key in records if key == "train/step"]
    for metrics, (loss, norm) in zip(steps, log, strict=True):
        assert metrics["train/loss"] == pytest.approx(loss, rel=1e-5, abs=1e-7)
        assert metrics["train/grad_norm"] == pytest.approx(norm, rel=1e-5)
    save_adapter(actor.args, actor.state.model, out)
    torch.distributed.barrier()
    before, ours = (load_file(path / "adapter_model.safetensors") for path in (start, out))
    assert ours.keys() == after.keys() == before.keys()
    for name, expected in after.items():
        moved = (expected - before[name]).norm()
        assert moved > 0 or ".experts." in name, name  # no token may have come to an expert
        assert (ours[name] - expected).norm() <= 1e-3 * moved, name
    trained = parameters(actor)
    load_hf_weights(actor.args, actor.state.model, actor.args.hf_checkpoint)
    for name, weight in parameters(actor).items():
        assert torch.equal(weight, trained[name]), name


OVERLAPPED = "--overlap-grad-reduce --overlap-param-gather"
FULL = "--recompute-granularity full --recompute-method"
OFFLOAD = "--fine-grained-activation-offloading --offload-modules"
LAYOUTS = {
    "one rank": ("", 1, {}),
    "full recomputation": (
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        1,
        WITH_HEAD,
    ),
    "block": (f"{FULL} block --recompute-num-layers 1", 1, IN_CHUNKS),
    "selective": ("--recompute-granularity selective --recompute-modules core_attn mlp", 1, {}),
    "TP 2": ("--tensor-model-parallel-size 2", 1, {"max_tokens_per_gpu": 40}),
    "TP 2 with sequence parallelism": ("--tensor-model-parallel-size 2 --sequence-parallel", 1, {}),
    "some projections": ("--tensor-model-parallel-size 2 --sequence-parallel", 1, {"lora_target_modules": SOME}),
    "activations in host memory": (f"{OFFLOAD} core_attn qkv_linear attn_proj", 1, {}),
    "optimizer in host memory": ("--optimizer-cpu-offload --use-precision-aware-optimizer", 1, {}),
    "PP 2": ("--pipeline-model-parallel-size 2", 1, {"max_tokens_per_gpu": 40}),
    "output layer, CP 2": ("--context-parallel-size 2", 1, {"max_tokens_per_gpu": 40, **WITH_HEAD}),
    "output layer": ("", 1, WITH_HEAD),
    "output layer, TP 2": ("--tensor-model-parallel-size 2", 1, {"max_tokens_per_gpu": 40, **WITH_HEAD}),
    "output layer in chunks, TP 2": ("--tensor-model-parallel-size 2", 1, IN_CHUNKS),
    "output layer in chunks, SP": ("--tensor-model-parallel-size 2 --sequence-parallel", 1, IN_CHUNKS),
    "output layer, PP 2": ("--pipeline-model-parallel-size 2", 1, {"max_tokens_per_gpu": 40, **WITH_HEAD}),
    "output layer, DP 2": (OVERLAPPED, 2, {"max_tokens_per_gpu": 24, **WITH_HEAD}),
    "output layer in chunks, DP 2": (OVERLAPPED, 2, {"max_tokens_per_gpu": 24, **IN_CHUNKS}),
}

PRODUCTS = {
    "PP 2, TP 2, sequence parallel, block": (
        f"--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel {FULL} block "
        "--recompute-num-layers 1",
        1,
        {"max_tokens_per_gpu": 40},
    ),
    "CP 2, PP 2, uniform": (
        f"--context-parallel-size 2 --pipeline-model-parallel-size 2 {FULL} uniform --recompute-num-layers 1",
        1,
        {"max_tokens_per_gpu": 40},
    ),
}
"""Several at once: four processes each."""


@pytest.mark.parametrize("layout", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.slow) for name in PRODUCTS)])
def test_adapters_are_trained_as_peft_trains_them(hf_path: Path, tmp_path: Path, reference: Any, layout: str):
    flags, dp_size, changes = (LAYOUTS | PRODUCTS)[layout]
    start, log, after = reference(changes.get("lora_target_modules"))
    args = lora_args(hf_path, flags, dp_size=dp_size, **changes)
    train(args, check_steps, start, log, after, tmp_path / "out", num_rollouts=STEPS, dp_size=dp_size)


def save_base(actor: Any, records: list[Any]) -> None:
    actor.save_model(0)


def test_the_base_may_be_a_megatron_checkpoint_of_another_layout(hf_path: Path, tmp_path: Path, reference: Any):
    root = str(tmp_path / "base")
    train(trainer_args(hf_path, FLAGS, save=root), save_base, num_rollouts=0)
    start, log, after = reference(None)
    args = lora_args(hf_path, "--tensor-model-parallel-size 2 --sequence-parallel", load=root, ref_load=root)
    train(args, check_steps, start, log, after, tmp_path / "out", num_rollouts=STEPS)


EP_2 = "--expert-model-parallel-size 2"
EXPERTS = {
    "experts": ("", 1, {}),
    "experts as one product": ("--moe-grouped-gemm", 1, {}),
    "EP 2": (EP_2, 2, {}),
    "ETP 2": ("--tensor-model-parallel-size 2 --sequence-parallel", 1, {}),
    "EP 2 with TP 2": (
        f"{EP_2} --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 --sequence-parallel",
        1,
        {},
    ),
    "EP 2 with CP 2": (f"{EP_2} --context-parallel-size 2", 1, {"max_tokens_per_gpu": 40}),
    "EP 2 with PP 2": (f"{EP_2} --pipeline-model-parallel-size 2", 2, {}),
}
OF_PRODUCTS = ("EP 2 with TP 2", "EP 2 with CP 2", "EP 2 with PP 2")


def expected_of(family: str, work: Path, *, tied: bool = False, **changes: Any) -> tuple[Path, tuple[Any, ...]]:
    """A model of a family; the adapters that training starts from, and what PEFT makes of them."""
    make_hf_model(work / "hf", family, tied=tied)
    args = lora_args(work / "hf", "--expert-model-parallel-size 1", **changes)
    train(args, write_start, work / "start", num_rollouts=0)
    return work / "hf", (work / "start", *peft_steps(work / "hf", work / "start"))


@pytest.fixture(scope="module")
def of_experts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[Any, ...]]:
    return expected_of("qwen3_moe", tmp_path_factory.mktemp("experts"))


@pytest.fixture(scope="module")
def of_latent_attention(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[Any, ...]]:
    return expected_of("deepseek_v3", tmp_path_factory.mktemp("latent"))


@pytest.mark.parametrize("layout", [pytest.param(n, marks=[pytest.mark.slow] * (n in OF_PRODUCTS)) for n in EXPERTS])
def test_adapters_of_experts_are_trained_as_peft_trains_them(
    of_experts: tuple[Path, tuple[Any, ...]], tmp_path: Path, layout: str
):
    (flags, dp_size, changes), (hf, expected) = EXPERTS[layout], of_experts
    args = lora_args(hf, flags, dp_size=dp_size, **changes)
    train(args, check_steps, *expected, tmp_path / "out", num_rollouts=STEPS, dp_size=dp_size)


@pytest.mark.parametrize("layout", ["", "--tensor-model-parallel-size 2 --sequence-parallel"])
def test_adapters_of_latent_attention_are_trained_as_peft_trains_them(
    of_latent_attention: tuple[Path, tuple[Any, ...]], tmp_path: Path, layout: str
):
    hf, (start, log, after) = of_latent_attention
    assert {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"} <= {name.split(".")[-3] for name in after}
    args = lora_args(hf, f"{layout} --expert-tensor-parallel-size 1")
    train(args, check_steps, start, log, after, tmp_path / "out", num_rollouts=STEPS)


@pytest.fixture(scope="module")
def of_tied(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, tuple[Any, ...]]:
    return expected_of("qwen3", tmp_path_factory.mktemp("tied"), tied=True, **WITH_HEAD)


@pytest.mark.parametrize(
    ("layout", "dp_size", "changes"),
    [
        ("--tensor-model-parallel-size 2", 1, IN_CHUNKS),
        ("--pipeline-model-parallel-size 2", 1, IN_CHUNKS),
        (f"--pipeline-model-parallel-size 2 {OVERLAPPED}", 2, {"max_tokens_per_gpu": 24, **WITH_HEAD}),
        ("--context-parallel-size 2", 1, WITH_HEAD),
    ],
)
def test_an_output_layer_that_is_the_embedding_has_an_adapter_apart_from_it(
    of_tied: tuple[Path, tuple[Any, ...]], tmp_path: Path, layout: str, dp_size: int, changes: dict[str, Any]
):
    hf, (start, log, after) = of_tied
    assert any("lm_head" in name for name in after)
    args = lora_args(hf, layout, dp_size=dp_size, **changes)
    train(args, check_steps, start, log, after, tmp_path / "out", num_rollouts=STEPS, dp_size=dp_size)


def write_steps(actor: Any, records: list[Any], out: Path) -> None:
    from slime.ray.rollout.shares import split_train_data

    (share,) = split_train_data(actor.args, make_train_data(), {"dp_size": 1, "cp_size": 1})
    torch.manual_seed(1)  # the first values of the base, which is loaded over them, took other draws in each layout
    steps = [metrics for number in range(STEPS) for metrics, _ in actor.train_on(number, dict(share))]
    if torch.distributed.get_rank() == 0:
        torch.save(steps, out)


BY_COLUMN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head")


@pytest.mark.parametrize(
    ("targets", "flags", "changes"),
    [
        (BY_COLUMN, "--tensor-model-parallel-size 2", {}),
        (BY_COLUMN, "--tensor-model-parallel-size 2", {"recompute_loss_function": True}),
        (None, f"{FULL} uniform --recompute-num-layers 1", {}),
    ],
)
def test_ranks_that_share_an_input_and_layers_that_are_computed_again_drop_the_same_of_it(
    hf_path: Path, tmp_path: Path, targets: tuple[str, ...] | None, flags: str, changes: dict[str, Any]
):
    """A row-parallel layer's ranks have other channels each, so that its masks are those of no other layout."""
    lora = {"lora_target_modules": targets, "lora_dropout": 0.5, "lr": 1e-2}
    for name, of_run in (("one", ""), ("other", flags)):
        rows = {"data_pad_size_multiplier": 64 if "tensor" in of_run else 128}  # of each rank: as many draws in both
        args = lora_args(hf_path, of_run, **lora, **rows, **changes)
        train(args, write_steps, tmp_path / name, num_rollouts=0)
    one, other = (torch.load(tmp_path / name) for name in ("one", "other"))
    for expected, found in zip(one, other, strict=True):
        assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)


def save_and_export(actor: Any, records: list[Any], out: Path) -> None:
    actor.backend.export_hf(out / "merged")
    before = {name: tensor.clone() for name, tensor in actor.backend.named_weights()}
    torch.save(actor.backend.answers(range(1, 17)), out / "answers")
    assert all(torch.equal(tensor, before[name]) for name, tensor in actor.backend.named_weights())
    train_and_save(actor, records, out / "straight")


def test_what_is_saved_is_what_peft_loads_and_what_engines_get(hf_path: Path, tmp_path: Path):
    args = lora_args(hf_path, "--tensor-model-parallel-size 1", lr=1e-1, save=str(tmp_path / "ckpt"), **WITH_HEAD)
    train(args, save_and_export, tmp_path, num_rollouts=2)
    saved = iteration_dir(tmp_path / "ckpt", 0)
    ids = torch.tensor(make_train_data()["tokens"][0])[None]
    with torch.no_grad():
        base, merged = (load_hf(path)(ids).logits for path in (hf_path, tmp_path / "merged"))
        adapted = peft_model(hf_path, saved / "adapter")(ids).logits
    assert (adapted - base).abs().max() > 1e-2
    assert (adapted - merged).abs().max() <= 1e-5
    probe = torch.tensor([range(1, 17)])
    with torch.no_grad():
        models = peft_model(hf_path, saved / "adapter"), load_hf(hf_path)
        said = [model(probe).logits[0].log_softmax(-1)[range(15), probe[0, 1:]] for model in models]
    for ours, theirs in zip(torch.load(tmp_path / "answers"), said, strict=True):
        assert ours == pytest.approx(theirs.tolist(), abs=1e-5), "with adapters and without"
    names = FileSystemReader(saved).read_metadata().state_dict_metadata
    of_model = [name for name in names if re.search("embedding|layer", name)]
    assert of_model and all(".lora." in name for name in of_model), "the base is in no checkpoint"

    resumed = lora_args(hf_path, lr=1e-1, **resumed_from(str(tmp_path / "ckpt")), **WITH_HEAD)
    train(resumed, train_once_more, tmp_path / "again", num_rollouts=0)
    (straight, weights), (again, weights_again) = (torch.load(tmp_path / name) for name in ("straight", "again"))
    assert straight == again
    assert all(torch.equal(weights[name], weights_again[name]) for name in weights)
    cut = lora_args(
        hf_path, "--tensor-model-parallel-size 2", lr=1e-1, **resumed_from(str(tmp_path / "ckpt")), **WITH_HEAD
    )
    train(cut, check_loaded, saved / "adapter", tmp_path / "cut", num_rollouts=0)

    peft_model(hf_path, saved / "adapter").save_pretrained(tmp_path / "peft")  # with a copy of the base's output layer
    begun = lora_args(
        hf_path, "--pipeline-model-parallel-size 2", lora_adapter_path=str(tmp_path / "peft"), **WITH_HEAD
    )
    train(begun, check_loaded, saved / "adapter", tmp_path / "begun", num_rollouts=0)

    make_hf_model(tmp_path / "other", hidden_act="silu", initializer_range=0.5)
    other = load_hf(tmp_path / "other")
    with torch.no_grad():
        other.model.norm.weight.mul_(1.01)
    other.save_pretrained(tmp_path / "other")
    wrong = lora_args(tmp_path / "other", **resumed_from(str(tmp_path / "ckpt")), **WITH_HEAD)
    with pytest.raises(AssertionError, match=f"{UsageError.__name__}: .*holds adapters of another base"):
        train(wrong, check_loaded, num_rollouts=0)


def check_loaded(actor: Any, records: list[Any], expected: Path, out: Path) -> None:
    from slime.backends.megatron_utils.layers.lora import save_adapter

    save_adapter(actor.args, actor.state.model, out)
    torch.distributed.barrier()
    ours, theirs = (load_file(path / "adapter_model.safetensors") for path in (out, expected))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours) and ours.keys() == theirs.keys()
