"""--train-backend fsdp: five steps equal those of Megatron, whatever the ranks and options; checkpoints; refusals."""

from __future__ import annotations

import argparse
import json
import math
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from slime.backends.fsdp_utils import weights
from slime.checkpoints.rollout_files import load_dump
from slime.config.parse import CommandLine
from slime.plan.trainer_memory import moment_bytes
from slime.utils.model_shape import ModelShape
from tests.integration.trainer_world import NUM_SAMPLES, make_train_data, resumed_from, trainer_args, with_images
from tests.unit.megatron_fakes import make_hf_model, run_world

NUM_STEPS = 5
MEGATRON = "--adam-eps 1e-5 --make-vocab-size-divisible-by 4"


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """HF directory by name, and beside each what five steps of Megatron make of it."""
    import slime.backends.fsdp_utils.actor  # noqa: F401  (once, before worlds fork)

    root = tmp_path_factory.mktemp("fsdp")
    for name, family, tied in (("qwen3", "qwen3", False), ("tied", "llama", True), ("moe", "qwen3_moe", False)):
        make_hf_model(root / name, family, tied=tied)
        (root / name / "tokenizer_config.json").write_text("{}")
        run(root / name, backend="megatron", out=root / f"{name}.pt")
    teacher = make_hf_model(root / "teacher")
    for parameter in teacher.parameters():
        parameter.data.mul_(1.3)
    teacher.save_pretrained(root / "teacher")
    return {name: root / name for name in ("qwen3", "tied", "moe", "teacher")}


def run(hf: Path, *, backend: str = "fsdp", world: int = 1, out: Path, megatron: str = "", **flags: Any) -> None:
    """Train `num_steps` times in a world, and write rank 0's (records, weights before, weights after) to `out`."""
    num_steps, first = flags.pop("num_steps", NUM_STEPS), flags.pop("first", 0)
    flags = {"lr": 1e-3, "use_kl_loss": True, "kl_loss_coef": 0.1, "ref_load": str(hf), **flags}
    flags = {"fsdp_min_group_params": 1, **flags}
    size = math.prod(map(int, re.findall(r"-parallel-size (\d+)", megatron)))
    args = trainer_args(hf, f"{MEGATRON} {megatron}", dp_size=world // size, train_backend=backend, **flags)
    run_world(world, _rank, args, range(first, first + num_steps), out)


def _rank(args: Any, steps: range, out: Path) -> None:
    from slime.backends.fsdp_utils import actor as actor_module
    from slime.backends.megatron_utils import initialize
    from slime.backends.megatron_utils.actor import MegatronTrainActor
    from slime.backends.megatron_utils.update_weight.hf_weight_iterator import iter_hf_buckets
    from slime.ray.rollout.shares import split_train_data

    make = actor_module.FsdpTrainActor if args.train_backend == "fsdp" else MegatronTrainActor
    actor = make(args, rank=dist.get_rank(), world_size=dist.get_world_size(), master_addr="", master_port=0)
    with mock.patch.object(initialize, "init"):  # run_world has done it
        started = actor.init()
    assert started["start_rollout_id"] == steps.start

    def whole() -> dict[str, torch.Tensor]:
        source = actor.backend._source if args.train_backend == "fsdp" else actor.state.model
        buckets = iter_hf_buckets(args, source, buffer_size=20_000)
        return {name: tensor.clone() for bucket in buckets for name, tensor in bucket}

    before, records = whole(), []
    layout = actor.parallel_config()
    data = with_images(make_train_data()) if args.multimodal_keys else make_train_data()
    share = split_train_data(args, data, layout)[layout["dp_rank"]]
    for step in steps:
        if args.offload_train:
            with mock.patch.object(actor_module, "memory_saver"):  # which moves CUDA memory only
                actor.sleep()
                actor.wake_up()
        records += actor.train_on(step, dict(share))
        if args.save and step == 1:
            actor.save_model(step)
    after = whole()
    if dist.get_rank() == 0:
        torch.save((records, before, after), out)


def assert_equal_runs(reference: Path, found: Path) -> None:
    """Every metric to 1e-5, every weight's update to 1e-3 of its size."""
    (records, before, after), (records2, before2, after2) = torch.load(reference), torch.load(found)
    assert before.keys() == before2.keys()
    assert all(torch.equal(before[name], before2[name]) for name in before)
    assert [step for _, step in records] == [step for _, step in records2]
    for (theirs, _), (ours, _) in zip(records, records2, strict=True):
        theirs.pop("train/lr-pg_2", None)  # Megatron has a group of parameters more for experts
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)
    for name, weight in after.items():
        update = weight - before[name]
        assert update.norm() > 0, name
        assert (after2[name] - weight).norm() <= 1e-3 * update.norm(), name


def assert_equal_dumps(theirs: list[dict[str, Any]], ours: list[dict[str, Any]]) -> None:
    """All samples of a dump of a train step, in order, with the same columns and, within 1e-5, the same numbers."""
    assert len(ours) == len(theirs) == NUM_SAMPLES
    for sample, other in zip(theirs, ours, strict=True):
        assert sample.keys() == other.keys() >= {"tokens", "log_probs", "ref_log_probs", "advantages"}
        for name, value in sample.items():
            if name != "data_parallel_rank":
                assert other[name] == pytest.approx(value, rel=1e-5, abs=1e-5), name


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "world", "flags"),
    [
        ("qwen3", 1, {"max_tokens_per_gpu": 24}),
        ("tied", 2, {"recompute_loss_function": True, "fsdp_min_group_params": 10**6}),
        ("moe", 2, {}),
        ("tied", 1, {"offload_train": True}),
        ("qwen3", 2, {"attn_implementation": "sdpa", "fsdp_reshard_after_forward": False, "max_tokens_per_gpu": 24}),
        ("moe", 4, {"megatron": "--context-parallel-size 2", "max_tokens_per_gpu": 24}),
        ("qwen3", 2, {"fsdp_replicate_size": 2, "fsdp_forward_prefetch": True, "max_tokens_per_gpu": 4}),
        ("qwen3", 2, {"fsdp_cpu_offload": True, "megatron": "--recompute-granularity full", "max_tokens_per_gpu": 24}),
        ("moe", 2, {"megatron": "--recompute-granularity full", "fsdp_min_group_params": 10**6}),
    ],
    ids=str,
)
def test_five_steps_equal_those_of_megatron(
    families: dict[str, Path], tmp_path: Path, name: str, world: int, flags: dict[str, Any]
) -> None:
    run(families[name], world=world, out=tmp_path / "out.pt", **flags)
    assert_equal_runs(families[name].with_suffix(".pt"), tmp_path / "out.pt")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("flags", "parallel"),
    [
        ({"entropy_coef": 0.05, "ref_update_interval": 1, "rollout_top_p": 0.8, "rollout_temperature": 0.7}, True),
        ({"use_opd": True, "opd_type": "megatron", "opd_kl_coef": 0.5, "global_batch_size": 6}, False),
    ],
    ids=["moving reference, entropy, top-p", "teacher, two steps"],
)
def test_what_a_loss_asks_for_is_that_of_megatron(
    families: dict[str, Path], tmp_path: Path, flags: dict[str, Any], parallel: bool
) -> None:
    flags = {"recompute_old_log_probs": True, "num_steps": 2, **flags}
    flags |= {"opd_teacher_load": str(families["teacher"])} if "use_opd" in flags else {}
    dump = "save_debug_train_data"
    run(
        families["qwen3"],
        backend="megatron",
        out=tmp_path / "megatron.pt",
        **flags,
        **{dump: f"{tmp_path}/megatron-{{rollout_id}}.pt"},
    )
    flags[dump] = f"{tmp_path}/fsdp-{{rollout_id}}.pt"
    more = {"megatron": "--context-parallel-size 2", "recompute_loss_function": True, "max_tokens_per_gpu": 24}
    run(families["qwen3"], world=2, out=tmp_path / "fsdp.pt", **flags, **(more if parallel else {}))
    assert_equal_runs(tmp_path / "megatron.pt", tmp_path / "fsdp.pt")
    assert_equal_dumps(*(load_dump(tmp_path / f"{backend}-1.pt")["samples"] for backend in ("megatron", "fsdp")))
    if "use_opd" in flags:
        assert abs(torch.load(tmp_path / "fsdp.pt")[0][-1][0]["train/opd_reverse_kl"]) > 0.01, "it teaches"


@pytest.mark.processes
def test_per_token_losses_equal_those_of_megatron(families: dict[str, Path], tmp_path: Path) -> None:
    flags = {"calculate_per_token_loss": True, "loss_agg_mode": "token-mean", "num_steps": 2}
    run(families["qwen3"], backend="megatron", out=tmp_path / "megatron.pt", **flags)
    parallel = {"world": 4, "megatron": "--context-parallel-size 2", "max_tokens_per_gpu": 24}
    run(families["qwen3"], out=tmp_path / "fsdp.pt", **parallel, **flags)
    assert_equal_runs(tmp_path / "megatron.pt", tmp_path / "fsdp.pt")


@pytest.mark.processes
def test_a_resumed_run_is_bit_by_bit_the_same_and_another_number_of_ranks_can_resume(
    families: dict[str, Path], tmp_path: Path
) -> None:
    hf, root = families["qwen3"], tmp_path / "save"
    run(hf, world=2, out=tmp_path / "whole.pt", save=str(root), save_hf=str(tmp_path / "hf"))
    assert_equal_runs(hf.with_suffix(".pt"), tmp_path / "whole.pt")
    records, _, after = torch.load(tmp_path / "whole.pt")
    from transformers import AutoModelForCausalLM

    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").state_dict()
    rest = {"first": 2, "num_steps": NUM_STEPS - 2, **resumed_from(str(root))}
    run(hf, world=2, out=tmp_path / "rest.pt", **rest)
    records2, before2, after2 = torch.load(tmp_path / "rest.pt")
    assert all(torch.equal(exported[name], before2[name]) for name in before2)
    assert records[-len(records2) :] == records2
    assert all(torch.equal(after[name], after2[name]) for name in after)
    for world in (1, 4):
        run(hf, world=world, out=tmp_path / "other.pt", **rest)
        assert_equal_runs(tmp_path / "rest.pt", tmp_path / "other.pt")


@pytest.mark.processes
def test_biases_of_routers_are_loaded_sent_and_saved(tmp_path: Path) -> None:
    """They are buffers of transformers' model, not parameters."""
    make_hf_model(tmp_path / "hf", "glm4_moe")
    args = trainer_args(tmp_path / "hf", MEGATRON, dp_size=2, train_backend="fsdp")
    run_world(2, _biases, args, tmp_path / "weights")


def _biases(args: Any, directory: Path) -> None:
    from slime.backends.fsdp_utils.checkpoint import load_tensors, save_weights, weights
    from slime.backends.fsdp_utils.model import build_policy, make_mesh
    from slime.backends.fsdp_utils.weights import WeightSource, load_hf
    from slime.conversion.reader import SafetensorsReader

    policy, name = build_policy(args, make_mesh(args)), "model.layers.1.mlp.gate.e_score_correction_bias"
    with mock.patch("slime.backends.fsdp_utils.weights.READ_BYTES", 100):  # a row or two at a time
        load_hf(policy, args.load)
    sent = dict(pair for tensors in WeightSource(policy, torch.float32, args.load).full_tensors() for pair in tensors)
    reader = SafetensorsReader(args.load)
    assert len(sent) > 20 and all(torch.equal(tensor, reader.get(stored)) for stored, tensor in sent.items())
    expected = reader.get(name)
    assert expected.any() and torch.equal(sent[name], expected)
    save_weights(directory, policy)
    live = weights(policy)[f"model.{name}"].zero_()
    load_tensors(directory, weights(policy))
    assert torch.equal(live, expected)


@pytest.mark.processes
def test_a_loss_of_the_users_own_gets_logits(families: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "def loss(args, batch, logits, sum_of_sample_mean):\n"
        "    rows = logits.squeeze(0).float().log_softmax(-1)[batch['response_rows']]\n"
        "    loss = -sum_of_sample_mean(rows.gather(1, batch['response_tokens'][:, None])[:, 0])\n"
        "    return loss, {'loss': loss}\n"
    )
    own: dict[str, Any] = {
        "loss_type": "custom_loss",
        "custom_loss_function_path": f"{tmp_path / 'own.py'}:loss",
        "num_steps": 2,
    }
    run(families["qwen3"], backend="megatron", out=tmp_path / "megatron.pt", **own)
    run(families["qwen3"], world=2, out=tmp_path / "fsdp.pt", **own)
    assert_equal_runs(tmp_path / "megatron.pt", tmp_path / "fsdp.pt")


@pytest.mark.processes
def test_a_gradient_that_is_not_finite_ends_the_run(families: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "def loss(args, batch, logits, sum_of_sample_mean):\n"
        "    loss = logits.sum() * float('nan')\n"
        "    return loss, {'loss': loss}\n"
    )
    own: dict[str, Any] = {
        "loss_type": "custom_loss",
        "custom_loss_function_path": f"{tmp_path / 'own.py'}:loss",
        "num_steps": 1,
    }
    with pytest.raises(AssertionError, match="train step 0 has the norm nan, and weights would be lost"):
        run(families["qwen3"], out=tmp_path / "out.pt", **own)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("flags", "replicas"),
    [
        ("", 1),
        ("", 2),
        ("--optimizer sgd", 1),
        ("--optimizer muon --muon-momentum 0.95 --muon-use-nesterov --muon-scale-mode shape_scaling", 1),
        ("--optimizer muon --muon-extra-scale-factor 0.2 --muon-num-ns-steps 3", 2),
    ],
)
def test_the_optimizer_clips_and_steps_as_torchs_and_leaves_out_a_gradient_that_is_not_finite(
    families: dict[str, Path], flags: str, replicas: int
) -> None:
    world = {"dp_size": 2, "train_backend": "fsdp", "fsdp_replicate_size": replicas}
    run_world(2, _optimizer, trainer_args(families["qwen3"], f"{MEGATRON} {flags}", **world))


def _optimizers_of_torch(args: Any, named: list[tuple[str, Any]], theirs: list[Any]) -> list[torch.optim.Optimizer]:
    """Of whole parameters: the same as in the papers, by torch."""
    maps = [args.optimizer == "muon" and p.ndim == 2 and not re.search("embed|lm_head", name) for name, p in named]
    rest = [p for p, is_map in zip(theirs, maps, strict=True) if not is_map]
    decayed = {"params": [p for p in rest if p.ndim > 1]}
    groups = [decayed, {"params": [p for p in rest if p.ndim <= 1], "weight_decay": 0.0}]
    if args.optimizer == "sgd":
        return [torch.optim.SGD(groups, lr=args.lr, momentum=args.sgd_momentum, weight_decay=args.weight_decay)]
    adam = torch.optim.AdamW(groups, lr=args.lr, betas=(args.adam_beta1, args.adam_beta2), eps=args.adam_eps,
                             weight_decay=args.weight_decay)  # fmt: skip
    if args.optimizer == "adam":
        return [adam]
    # a fifth of Megatron's "spectral" is torch's "match_rms_adamw"
    scale = {"spectral": "match_rms_adamw", "shape_scaling": "original"}[args.muon_scale_mode]
    moved = [p for p, is_map in zip(theirs, maps, strict=True) if is_map]
    assert len(moved) == 14, "7 matrices in each of 2 layers"
    return [adam, torch.optim.Muon(
        moved, lr=args.lr, weight_decay=args.weight_decay, momentum=args.muon_momentum,
        nesterov=args.muon_use_nesterov, ns_steps=args.muon_num_ns_steps, adjust_lr_fn=scale,
    )]  # fmt: skip


def _optimizer(args: Any) -> None:
    from slime.backends.fsdp_utils.model import build_policy, make_mesh
    from slime.backends.fsdp_utils.optimizer import OPTIMIZERS
    from slime.backends.fsdp_utils.weights import load_hf, named_parameters

    policy = build_policy(args, make_mesh(args))
    load_hf(policy, args.load)
    named = named_parameters(policy)
    optimizer = OPTIMIZERS[args.optimizer](args, named)
    moments = [moment for _, parameter in named for moment in optimizer.moments(parameter).values()]
    shape, trained = ModelShape.of(args), sum(parameter.numel() for _, parameter in named)
    assert shape and moment_bytes(args, shape, trained) == 4 * sum(moment.numel() for moment in moments), "the plan's"
    optimizer.param_groups[1]["weight_decay"] *= optimizer.param_groups[1]["wd_mult"]  # as Megatron's scheduler does
    theirs = [torch.nn.Parameter(parameter.full_tensor().detach()) for _, parameter in named]
    of_torch = _optimizers_of_torch(args, named, theirs)
    torch.manual_seed(0)
    directions = [torch.randn(p.shape) for p in theirs]
    for step, value in enumerate((1.0, float("nan"), 0.001)):
        for (_, parameter), other, direction in zip(named, theirs, directions, strict=True):
            whole = direction * value + value * step
            parameter.grad = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
            other.grad = whole.clone()
        norm = optimizer.update(clip_grad=1.0, skip_nan=True)
        assert all(parameter.grad is None for _, parameter in named)
        assert optimizer.num_steps == max(step, 1)
        if value != value:
            assert norm != norm
            continue
        assert norm == pytest.approx(float(torch.nn.utils.clip_grad_norm_(theirs, 1.0)), rel=1e-5)
        for one in of_torch:
            one.step()
    # orthogonalisation is in bf16: a momentum that differs in its last bit differs there by up to 2^-8 of the step
    tolerance = args.lr / 50 if args.optimizer == "muon" else 1e-7
    for (name, parameter), other in zip(named, theirs, strict=True):
        assert torch.allclose(parameter.full_tensor(), other, rtol=1e-6, atol=tolerance), name


@pytest.mark.processes
@pytest.mark.parametrize(("optimizer", "offload"), [("muon", True), ("sgd", False)])
def test_a_run_with_another_optimizer_resumes_bit_by_bit_and_refuses_adams_state(
    families: dict[str, Path], tmp_path: Path, optimizer: str, offload: bool
) -> None:
    hf, root, flags = families["qwen3"], tmp_path / "save", {"megatron": f"--optimizer {optimizer}", "num_steps": 4}
    flags["fsdp_cpu_offload"] = offload
    run(hf, world=2, out=tmp_path / "whole.pt", save=str(root), **flags)
    records, before, after = torch.load(tmp_path / "whole.pt")
    assert all((after[name] - before[name]).norm() > 0 for name in after)
    rest = flags | {"first": 2, "num_steps": 2, **resumed_from(str(root))}
    run(hf, world=2, out=tmp_path / "rest.pt", **rest)
    records2, _, after2 = torch.load(tmp_path / "rest.pt")
    assert records[-len(records2) :] == records2 and all(torch.equal(after[name], after2[name]) for name in after)
    with pytest.raises(AssertionError, match=f"was saved with --optimizer {optimizer}, .*--no-load-optim"):
        run(hf, out=tmp_path / "other.pt", **{**rest, "megatron": ""})


def test_small_layers_are_one_group_until_they_have_so_many_parameters() -> None:
    from slime.backends.fsdp_utils.model import grouped

    layers = [torch.nn.Linear(2, size, bias=False) for size in (3, 3, 3, 9, 1)]  # 6, 6, 6, 18 and 2 parameters
    assert [[layers.index(layer) for layer in group] for group in grouped(layers, 12)] == [[0, 1], [2, 3], [4]]
    assert len(grouped(layers, 1)) == 5 and grouped([], 12) == []


@pytest.mark.processes
@pytest.mark.parametrize("least", [1, 10**9])
def test_layers_are_sharded_in_groups_of_the_size_of_the_flag(families: dict[str, Path], least: int) -> None:
    args = trainer_args(families["qwen3"], MEGATRON, train_backend="fsdp", fsdp_min_group_params=least)
    run_world(1, _groups, args)


def _groups(args: Any) -> None:
    from slime.backends.fsdp_utils import model

    with mock.patch.object(model, "fully_shard", wraps=model.fully_shard) as shard:
        model.build_policy(args, model.make_mesh(args))
    groups = [call.args[0] for call in shard.call_args_list if isinstance(call.args[0], list)]
    layers = args.num_layers
    assert [len(group) for group in groups] == ([1] * layers if args.fsdp_min_group_params == 1 else [layers])


@pytest.mark.processes
def test_each_rank_reads_the_rows_of_its_own_shards_alone(families: dict[str, Path]) -> None:
    args = trainer_args(families["qwen3"], MEGATRON, dp_size=2, train_backend="fsdp")
    run_world(2, _read_half, args)


def _read_half(args: Any) -> None:
    from slime.backends.fsdp_utils.model import build_policy, make_mesh
    from slime.backends.fsdp_utils.weights import load_hf
    from slime.conversion.reader import RawTensors

    read, num_bytes = RawTensors.read, []

    def noted(self: Any, *where: Any) -> torch.Tensor:
        tensor = read(self, *where)
        num_bytes.append(tensor.nbytes)
        return tensor

    policy = build_policy(args, make_mesh(args))
    with mock.patch.object(RawTensors, "read", noted):
        load_hf(policy, args.load)
    # an odd number of rows gives the first rank one more, of at most 128 bytes, of each of the 25 tensors
    assert 0 < sum(num_bytes) <= RawTensors(args.load).num_bytes / 2 + 25 * 128


@pytest.fixture(scope="module")
def command_line() -> CommandLine:
    return CommandLine()


REFUSED = {
    "--tensor-model-parallel-size 2": "--tensor-model-parallel-size 2 is Megatron's; with --train-backend fsdp every",
    "--context-parallel-size 2": "--context-parallel-size 2 must divide the trainer's ranks",
    "--context-parallel-size 2 --attn-implementation sdpa": "part of a sample alone; give slime_packed",
    "--num-layers 2 --hidden-size 32": "--num-layers, --hidden-size: Megatron's; --train-backend fsdp trains what",
    "--recompute-granularity selective": "recomputes whole layers: give full",
    "--fsdp-replicate-size 3": "--fsdp-replicate-size 3 must divide the trainer's ranks",
    "--optimizer-cpu-offload": "--fsdp-cpu-offload keeps the optimizer in host memory",
    "--accelerator cuda --actor-num-gpus-per-node 2 --fsdp-cpu-offload": "--fsdp-cpu-offload works on one GPU",
    "--optimizer dist_muon": "use muon with --train-backend fsdp",
    "--optimizer muon --lora-rank 4": "--optimizer muon does not go with --lora-rank 4",
    "--optimizer muon --muon-scale-mode unit_rms_norm": "give spectral or shape_scaling",
    "--optimizer muon --muon-momentum 1": "--muon-momentum 1.0 must lie in [0, 1)",
    "--optimizer muon --muon-tp-mode distributed": "--muon-tp-mode distributed is",
    "--train-backend megatron --optimizer muon": "--optimizer muon is not supported with --train-backend megatron",
    "--train-backend megatron --optimizer sgd": "use adam, or --train-backend fsdp",
}


@pytest.mark.processes
@pytest.mark.parametrize("flags", REFUSED)
def test_what_fsdp_does_not_do_is_refused_with_what_does_the_same(
    families: dict[str, Path], command_line: CommandLine, flags: str
) -> None:
    line = f"--train-backend fsdp --accelerator cpu --debug-train-only --hf-checkpoint {families['qwen3']} {flags}"
    assert any(REFUSED[flags] in problem for problem in command_line.check(line.split()).problems.all())


def test_flags_of_another_optimizer_are_named_as_without_effect() -> None:
    from slime.config.rules.losses import without_effect

    args = argparse.Namespace(optimizer="sgd", use_stateless_adam=False, ppo_epochs=1)
    found = next(iter(without_effect(args, {"muon_momentum", "muon_num_ns_steps", "sgd_momentum"})))  # type: ignore[arg-type]
    assert found == "--optimizer sgd leaves these flags without effect: --muon-momentum --muon-num-ns-steps."


@pytest.mark.processes
def test_a_checkpoint_of_the_other_backend_is_refused(
    families: dict[str, Path], command_line: CommandLine, tmp_path: Path
) -> None:
    iteration = tmp_path / "iter_0000001"
    iteration.mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1")
    (iteration / "model_shape.json").write_text(json.dumps({"train_backend": "fsdp"}))
    line = f"--accelerator cpu --debug-train-only --hf-checkpoint {families['qwen3']} --load {tmp_path}"
    problems = command_line.check(line.split()).problems.all()
    (problem,) = [problem for problem in problems if "was written by --train-backend fsdp" in problem]
    assert "turn it into an HF directory with tools/convert_fsdp_to_hf.py" in problem


def _gather_often(args: Any) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = [torch.arange(rows * 32.0).view(rows, 32) for rows in (1, 7, 32, 33, 48, 100)]
    shards = [(str(len(one)), distribute_tensor(one, mesh, [Shard(0)])) for one in whole]
    for _ in range(1500):
        copies = [tensor.clone() for _, tensor in weights.gathered(shards)]
    assert all(map(torch.equal, copies, whole))


@pytest.mark.processes
def test_weights_are_gathered_over_gloo_without_harm_to_memory(families: Any) -> None:
    """All at once, ranks died of it."""
    run_world(2, _gather_often, trainer_args(families["qwen3"], MEGATRON, dp_size=2, train_backend="fsdp"))
