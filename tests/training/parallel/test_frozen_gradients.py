"""Gradients of a model that is trained in part are those of the HF model, whatever is recomputed and in every layout.

What is trained has the gradient that transformers and autograd give the whole model; what is frozen has none.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.trainer_world import make_train_data
from tests.training.parallel.hf_parity import of_hf_model, of_layout
from tests.training.parallel.layout_world import Case, Job, run_jobs
from tests.unit.megatron_fakes import make_hf_model

TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2"
FULL = "--recompute-granularity full --recompute-method"
SELECTIVE = "--recompute-granularity selective --recompute-modules"
RECOMPUTED = {
    "every layer": f"{FULL} uniform --recompute-num-layers 1",
    "two layers at once": f"{FULL} uniform --recompute-num-layers 2",
    "a block": f"{FULL} block --recompute-num-layers 1",
    "attention": f"{SELECTIVE} core_attn mlp",
}


@dataclass(frozen=True)
class Choice:
    """Parameters to train: slime's flag for Megatron's names, and which these are by HF names."""

    flags: Mapping[str, list[str]]
    trained: str


BEHIND_EMBEDDING = Choice({"freeze_params_name_list": ["embedding"]}, r"^(?!model\.embed)")
SECOND_LAYER = Choice({"only_train_params_name_list": [r"layers\.1\."]}, r"layers\.1\.")


@dataclass(frozen=True)
class Model:
    """A family of HF models, and what is recomputed and trained of it."""

    layouts: Mapping[str, str]
    recomputed: Mapping[str, str]
    choices: Mapping[str, Choice]
    config: Mapping[str, Any]


MODELS = {
    "qwen2": Model(
        {"one rank": "", "PP 2": PP2, "TP 2": TP2},
        RECOMPUTED,
        {
            "all behind the embedding": BEHIND_EMBEDDING,
            "the second layer": SECOND_LAYER,
            "biases of frozen weights": Choice({"only_train_params_name_list": ["bias"]}, "bias"),
        },
        {"num_hidden_layers": 4},
    ),
    "deepseek_v3": Model(
        {"one rank": ""},
        {
            "every layer": RECOMPUTED["every layer"],
            "experts": f"{SELECTIVE} moe mla_up_proj mlp",
            "shared experts": f"{SELECTIVE} shared_experts core_attn",
            "activations": f"{SELECTIVE} moe_act --moe-grouped-gemm",
        },
        {
            "all behind the embedding": BEHIND_EMBEDDING,
            "experts": Choice({"only_train_params_name_list": [r"expert"]}, r"expert"),
            "routers": Choice({"only_train_params_name_list": [r"router"]}, r"mlp\.gate\.weight"),
            "projections": Choice({"only_train_params_name_list": [r"up_proj"]}, r"(q|kv)_b_proj"),
        },
        {},
    ),
    "tied qwen3": Model(
        {"one rank": "", "PP 2": PP2},
        {"every layer": RECOMPUTED["every layer"]},
        {
            "all behind the embedding": BEHIND_EMBEDDING,
            "the second layer": SECOND_LAYER,
            "the embedding": Choice({"only_train_params_name_list": ["embedding"]}, r"embed"),
        },
        {"tied": True},
    ),
}


def gradients_of(_: argparse.Namespace, combinations: Mapping[str, argparse.Namespace]) -> dict[str, Any]:
    """Of several runs in one layout, one after the other in one world."""
    return {name: of_layout(args)["gradients"] for name, args in combinations.items()}


@pytest.mark.parametrize("name", MODELS)
def test_trained_parameters_have_the_gradients_of_the_whole_model(name: str, tmp_path: Path):
    model, hf_path = MODELS[name], tmp_path / "hf"
    hf_model = make_hf_model(hf_path, name.rpartition(" ")[2], **model.config)
    expected = of_hf_model(hf_model, tmp_path / "gradients")["gradients"]
    for layout, flags in model.layouts.items():
        combinations = {
            (recomputed, choice): Case(f"{flags} {more}", changes=trained.flags).args(hf_path)
            for recomputed, more in model.recomputed.items()
            for choice, trained in model.choices.items()
        }
        run_jobs([Job(layout, Case(flags).args(hf_path), gradients_of, (combinations,))], tmp_path)
        errors = tmp_path / f"{layout}.error"
        assert not errors.exists(), errors.read_text()
        for (recomputed, choice), found in torch.load(tmp_path / f"{layout}.pt", weights_only=False).items():
            for tensor, gradient in expected.items():
                wanted = gradient if re.search(model.choices[choice].trained, tensor) else torch.zeros_like(gradient)
                case = f"{layout}, {recomputed} recomputed, only {choice} trained: {tensor}"
                assert (found[tensor] - wanted).norm() <= 1e-4 * wanted.norm(), case


def copies_of_the_embedding(args: argparse.Namespace) -> list[torch.Tensor]:
    """Both pipeline stages' copies after two train steps."""
    from slime.backends.megatron_utils import actor as actor_module
    from slime.backends.megatron_utils.model_provider import unwrap
    from slime.ray.rollout.shares import split_train_data

    actor = actor_module.MegatronTrainActor(args, rank=0, world_size=0, master_addr="", master_port=0)
    with mock.patch.object(actor_module.initialize, "init"):  # the world has done it
        actor.init()
    (share,) = split_train_data(args, make_train_data(), actor.parallel_config())
    records = actor.train_on(0, share)
    assert sum(axis == "train/step" for _, axis in records) == 2
    copies: list[Any] = [None, None]
    weight = unwrap(actor.state.model[0]).shared_embedding_or_output_weight()
    torch.distributed.all_gather_object(copies, weight.detach().clone())
    return copies


def test_both_copies_of_a_tied_embedding_are_trained_or_neither_is(tmp_path: Path):
    make_hf_model(tmp_path / "hf", tied=True)
    start = load_file(tmp_path / "hf" / "model.safetensors")["model.embed_tokens.weight"]
    choices = {"trained": ["embedding"], "frozen": [r"layers\.1\."]}
    for name, patterns in choices.items():
        args = Case(PP2, changes={"only_train_params_name_list": patterns}).args(tmp_path / "hf")
        run_jobs([Job(name, args, copies_of_the_embedding)], tmp_path)
        assert not (tmp_path / f"{name}.error").exists(), (tmp_path / f"{name}.error").read_text()
        first, last = torch.load(tmp_path / f"{name}.pt")
        assert torch.equal(first, last)
        assert torch.equal(first[: len(start)], start) == (name == "frozen")
