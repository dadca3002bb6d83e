"""--lora-rank with --train-backend fsdp: Megatron's adapters, PEFT's gradients, checkpoints and exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader

from slime.checkpoints.paths import iteration_dir
from slime.config.megatron.lora_plan import LoraPlan
from slime.config.parse import CommandLine
from slime.utils.misc import needed
from tests.integration.trainer_world import resumed_from, trainer_args
from tests.unit.megatron_fakes import make_hf_model, run_world
from tests.unit.test_fsdp import MEGATRON, NUM_STEPS, run

WITH_HEAD = {"lora_target_modules": ["all-linear", "lm_head"]}
LORA: dict[str, Any] = {"lora_rank": 4, "lora_alpha": 12.0, "lora_serve": "merged"}

RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import slime.backends.fsdp_utils.actor  # noqa: F401  (once, before worlds fork)

    path = tmp_path_factory.mktemp("lora") / "hf"
    make_hf_model(path, tied=True)
    (path / "tokenizer_config.json").write_text("{}")
    return path


@pytest.mark.processes
@pytest.mark.parametrize(
    ("world", "flags"),
    [
        (1, RECOMPUTE),
        (2, {"lora_target_modules": ["q_proj", "k_proj", "v_proj", "down_proj"], "lora_init": "gaussian"}),
        (2, {"lora_target_modules": ["o_proj", "lm_head"], "recompute_loss_function": True}),
    ],
)
def test_five_steps_of_adapters_equal_those_of_megatron(
    hf: Path, tmp_path: Path, world: int, flags: dict[str, Any]
) -> None:
    """The KL loss is to the base, which is the reference of both."""
    run(hf, backend="megatron", out=tmp_path / "megatron.pt", **LORA, **flags)
    run(hf, world=world, out=tmp_path / "fsdp.pt", **LORA, **flags)
    (records, before, after), (records2, before2, after2) = (
        torch.load(tmp_path / f"{backend}.pt") for backend in ("megatron", "fsdp")
    )
    for (theirs, _), (ours, _) in zip(records, records2, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)
    kl = [record["train/kl_loss"] for record, _ in records if "train/kl_loss" in record]
    assert len(kl) == NUM_STEPS and kl[0] == 0 and abs(kl[-1]) > 1e-3
    trained = {name for name, weight in after.items() if not weight.equal(before[name])}
    targets = flags.get("lora_target_modules") or ["_proj"]
    assert trained == {name for name in after if any(target in name for target in targets)}
    for name, weight in after2.items():
        assert weight.equal(before2[name]) == (name not in trained), name
        assert (weight - after[name]).norm() <= 1e-3 * (after[name] - before[name]).norm(), name


@pytest.mark.processes
def test_gradients_are_those_of_peft(hf: Path) -> None:
    run_world(2, _gradients, trainer_args(hf, MEGATRON, dp_size=2, train_backend="fsdp", **LORA | WITH_HEAD))


def _gradients(args: Any) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from slime.backends.fsdp_utils.lora import HALVES, adapters_of
    from slime.backends.fsdp_utils.model import build_policy, make_mesh
    from slime.backends.fsdp_utils.weights import load_hf, named_parameters
    from slime.backends.megatron_utils.data import pack

    policy, samples = build_policy(args, make_mesh(args)), [torch.arange(9), torch.arange(30, 35)]
    load_hf(policy, args.load)
    targets = needed(LoraPlan.of(args)).target_modules
    config = LoraConfig(r=4, lora_alpha=12, target_modules=targets)
    theirs = get_peft_model(AutoModelForCausalLM.from_pretrained(args.load), config)
    expected = dict(theirs.named_parameters())
    torch.manual_seed(1)
    for name, adapter in adapters_of(policy).items():  # at the start B is 0, and with it the gradient of A
        halves = torch.randn(adapter.lora_A.shape), torch.randn(adapter.lora_B.shape)
        adapter.take(0, *halves, source="the test")
        for half, value in zip(HALVES, halves, strict=True):
            expected[f"base_model.model.{name}.{half}.default.weight"].data.copy_(value)
    policy(pack(samples), lambda output: output.of_rows().square().sum()).backward()
    alone = [theirs(sample[None]).logits.square().sum() for sample in samples]
    torch.stack(alone).sum().backward()
    found = {name: parameter for name, parameter in named_parameters(policy) if parameter.requires_grad}
    assert len(found) == 2 * (2 * 7 + 1)
    for name, parameter in found.items():
        ours, peft = parameter.grad.full_tensor(), expected[f"base_model.model.{name}.default.weight"].grad
        assert (ours - peft).norm() <= 1e-5 * peft.norm(), name


@pytest.mark.processes
@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_what_the_trainer_answers_with_and_without_adapters_leaves_it_as_it_was(hf: Path, backend: str) -> None:
    """A lone rank of FSDP2 keeps what it has gathered; that has to be with the adapters again."""
    run_world(1, _asked, trainer_args(hf, MEGATRON, train_backend=backend, lr=1e-2, **LORA))


def _asked(args: Any) -> None:
    from unittest import mock

    from slime.backends.fsdp_utils.actor import FsdpTrainActor
    from slime.backends.megatron_utils import initialize
    from slime.backends.megatron_utils.actor import MegatronTrainActor

    make = FsdpTrainActor if args.train_backend == "fsdp" else MegatronTrainActor
    actor = make(args, rank=0, world_size=1, master_addr="", master_port=0)
    with mock.patch.object(initialize, "init"):  # run_world has done it
        actor.init()
    for name, tensor in actor.backend.named_weights():
        if ".lora_B" in name:
            tensor.data.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
    (live, base), again = actor.backend.answers(range(1, 17)), actor.backend.answers(range(1, 17))
    assert again == (live, base)
    assert torch.tensor(live).sub(torch.tensor(base)).abs().max() > 1e-2


@pytest.mark.processes
def test_what_is_saved_is_what_peft_loads_and_what_a_run_resumes_from(tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    root, hf, flags = tmp_path / "save", tmp_path / "base", LORA | WITH_HEAD
    make_hf_model(hf)
    (hf / "tokenizer_config.json").write_text("{}")
    run(hf, world=2, out=tmp_path / "whole.pt", save=str(root), save_hf=str(tmp_path / "hf"), **flags)
    records, _, after = torch.load(tmp_path / "whole.pt")
    directory = iteration_dir(str(root), 1)
    base, exported = (AutoModelForCausalLM.from_pretrained(path) for path in (hf, tmp_path / "hf"))
    merged = PeftModel.from_pretrained(base, directory / "adapter").merge_and_unload().state_dict()
    for name, weight in exported.state_dict().items():
        assert torch.allclose(merged[name], weight, atol=1e-6), name
    names = FileSystemReader(str(directory)).read_metadata().state_dict_metadata
    assert len(names) == 3 * 2 * (2 * 7 + 1) and all(".lora_" in name for name in names), "the base is not saved again"

    rest = {"first": 2, "num_steps": NUM_STEPS - 2, **resumed_from(str(root)), **flags}
    run(hf, world=2, out=tmp_path / "rest.pt", **rest)
    records2, before2, after2 = torch.load(tmp_path / "rest.pt")
    assert all(exported.state_dict()[name].equal(before2[name]) for name in before2)
    assert records[-len(records2) :] == records2
    assert all(torch.equal(after[name], after2[name]) for name in after)

    adapter = {"lora_adapter_path": str(directory / "adapter"), "num_steps": 1, **flags}
    run(hf, world=1, out=tmp_path / "start.pt", **adapter)
    assert all(torch.allclose(torch.load(tmp_path / "start.pt")[1][name], before2[name]) for name in before2)


@pytest.mark.processes
def test_adapters_over_another_base_are_refused(hf: Path, tmp_path: Path) -> None:
    root, other = tmp_path / "save", tmp_path / "other"
    run(hf, out=tmp_path / "out.pt", save=str(root), num_steps=2, **LORA)
    make_hf_model(other, "llama", tied=True)
    make_hf_model(other, tied=True, rope_theta=5.0)
    weights = other / "model.safetensors"
    from safetensors.torch import load_file, save_file

    save_file({name: tensor * 1.01 for name, tensor in load_file(weights).items()}, weights, {"format": "pt"})
    with pytest.raises(AssertionError, match="holds adapters of another base than the one that was loaded"):
        run(other, out=tmp_path / "out.pt", first=2, num_steps=1, **resumed_from(str(root)), **LORA)


@pytest.mark.processes
def test_a_critic_has_a_head_beside_its_adapters(hf: Path) -> None:
    args = trainer_args(hf, MEGATRON, train_backend="fsdp", advantage_estimator="ppo", **LORA | WITH_HEAD)
    vars(args).update(loss_type="value_loss", untie_embeddings_and_output_weights=True)
    run_world(1, _critic, args)


def _critic(args: Any) -> None:
    from slime.backends.fsdp_utils.checkpoint import weights
    from slime.backends.fsdp_utils.model import build_policy, make_mesh

    policy = build_policy(args, make_mesh(args))
    ours, base = weights(policy), weights(policy, of_base=True)
    assert {name.split(".")[1] for name in ours} == {"model", "value_head"} and not ours.keys() & base.keys()
    assert len(ours) == 2 * 2 * 7 + 2 and len(base) == 2 * 11 + 2
    assert dist.get_world_size() == 1


@pytest.mark.parametrize(
    ("family", "sentence"),
    [("qwen3_moe", "add --lora-exclude-modules experts"), ("olmo2", "its family is none of docs/model_families.md")],
)
def test_models_without_adapters_are_refused(tmp_path: Path, family: str, sentence: str) -> None:
    make_hf_model(tmp_path, family)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    line = f"--train-backend fsdp --accelerator cpu --debug-train-only --hf-checkpoint {tmp_path} --lora-rank 4"
    assert any(sentence in problem for problem in CommandLine().check(line.split()).problems.all())
