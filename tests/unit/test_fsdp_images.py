"""Models that see images, trained with FSDP2: positions, log-probs and gradients are transformers'; ranks agree."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from slime.config.parse import CommandLine
from tests.integration.trainer_world import make_train_data, resumed_from, trainer_args, with_images
from tests.unit.megatron_fakes import IMAGE_TOKENS, make_hf_model, run_world
from tests.unit.test_fsdp import MEGATRON, assert_equal_runs, run

IMAGES = {"multimodal_keys": {"image": "images"}}
FAMILIES = ("qwen3_vl", "qwen2_5_vl")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    import slime.backends.fsdp_utils.actor  # noqa: F401  (once, before worlds fork)

    root = tmp_path_factory.mktemp("images")
    for family in FAMILIES:
        make_hf_model(root / family, family, tied=family == "qwen3_vl")
        (root / family / "tokenizer_config.json").write_text("{}")
    return {family: root / family for family in FAMILIES}


def loaded(path: Path) -> Any:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")


def theirs(hf: Any, data: dict[str, Any], i: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(positions [3, n], log-probs of the response [R]) of a sample, by transformers alone."""
    tokens, images = torch.tensor(data["tokens"][i])[None], data["multimodal_train_inputs"][i]
    kinds = torch.zeros_like(tokens)
    for start, length in data["image_spans"][i]:
        kinds[0, start : start + length] = 1
    seen = {} if images is None else {name: torch.from_numpy(value) for name, value in images.items()}
    positions = hf.model.get_rope_index(tokens, kinds, image_grid_thw=seen.get("image_grid_thw"))[0][:, 0]
    logits = hf(input_ids=tokens, mm_token_type_ids=kinds, **seen).logits[0]
    count = data["response_lengths"][i]
    return positions, logits[-count - 1 : -1].log_softmax(-1).gather(1, tokens[0, -count:, None])[:, 0]


def rows_of(data: dict[str, Any], rank: int, world: int) -> list[int]:
    """Samples of a rank: all; of two, the second has those without images, and a word in place of an image."""
    if world == 1:
        return [0, 1, 2, 3, 4, 6, 8]
    return [[0, 1, 2, 4, 8], [3, 5, 6]][rank]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("family", "world", "flags"),
    [
        ("qwen3_vl", 1, {}),
        ("qwen3_vl", 2, {"megatron": "--recompute-granularity full"}),
        ("qwen3_vl", 2, {"freeze_vision_tower": True}),
        ("qwen2_5_vl", 2, {}),
        ("qwen2_5_vl", 1, {"attn_implementation": "sdpa"}),
    ],
    ids=str,
)
def test_packed_images_give_the_log_probs_and_gradients_of_transformers(
    models: dict[str, Path], family: str, world: int, flags: dict[str, Any]
) -> None:
    more = dict(flags)
    args = trainer_args(
        models[family], f"{MEGATRON} {more.pop('megatron', '')}", dp_size=world, train_backend="fsdp", **IMAGES, **more
    )
    run_world(world, _compare, args)


def _compare(args: Any) -> None:
    from slime.backends.fsdp_utils.model import build_policy, inputs_of, make_mesh
    from slime.backends.fsdp_utils.weights import load_hf, named_parameters
    from slime.backends.megatron_utils.data import Packing
    from slime.backends.megatron_utils.loss import get_log_probs_and_entropy
    from slime.training.micro_batches import MicroBatches, to_tensors

    rank, world = dist.get_rank(), dist.get_world_size()
    data, hf = with_images(make_train_data()), loaded(args.load)
    # transformers takes the word for an image without pixels, and raises: it looks at another word
    plain = {**data, "tokens": [[*tokens] for tokens in data["tokens"]]}
    plain["tokens"][6][-1] = 7
    policy = build_policy(args, make_mesh(args))
    load_hf(policy, args.load)
    mine = rows_of(data, rank, world)
    share: Any = {name: [column[i] for i in mine] for name, column in plain.items()}
    schedule = {"micro_batch_indices": [list(range(len(mine)))], "num_microbatches": [1], "global_batch_sizes": [1]}
    packing = Packing(multiple=8, merge_size=2)
    (batch,) = MicroBatches(to_tensors(share, torch.device("cpu")) | schedule, packing).of_step(0)  # type: ignore[arg-type]
    ours: list[torch.Tensor] = []

    def read(output: Any) -> torch.Tensor:
        found = get_log_probs_and_entropy(args, batch, output, with_entropy=False)[0]
        ours.append(found.detach())
        return -found.sum()

    policy(inputs_of(batch), read).backward()
    reference = {i: theirs(hf, plain, i) for other in range(world) for i in rows_of(data, other, world)}
    (-torch.cat([log_probs for _, log_probs in reference.values()]).sum()).backward()
    expected = [reference[i] for i in mine]
    positions = torch.cat([positions for positions, _ in expected], dim=1)
    assert torch.equal(batch["position_ids"][1:, 0, : positions.shape[1]], positions)
    torch.testing.assert_close(ours[0], torch.cat([log_probs for _, log_probs in expected]), atol=1e-5, rtol=0)
    gradients = {name: parameter.grad for name, parameter in hf.named_parameters()}
    for name, parameter in named_parameters(policy):
        if args.freeze_vision_tower and ".visual." in name:
            assert parameter.grad is None
            continue
        grad = parameter.grad.full_tensor() * world
        assert gradients[name].abs().max() > 0, name
        assert torch.allclose(grad, gradients[name], atol=1e-4, rtol=1e-4), (
            name,
            (grad - gradients[name]).abs().max(),
        )


@pytest.mark.processes
@pytest.mark.parametrize("family", FAMILIES)
def test_the_angles_of_a_towers_positions_are_not_rounded_to_16_bits(models: dict[str, Path], family: str) -> None:
    args = trainer_args(models[family], MEGATRON, train_backend="fsdp", **IMAGES)
    run_world(1, _angles, args)


def _angles(args: Any) -> None:
    from slime.backends.fsdp_utils.model import blank_image, build_policy, make_mesh, tower_of
    from slime.backends.megatron_utils.data import pack

    args.params_dtype = "bfloat16"
    policy = build_policy(args, make_mesh(args))
    found: list[torch.Tensor] = []

    def note(_: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        found.extend((*given[:1], *named["position_embeddings"]))

    tower_of(policy.hf).blocks[1].attn.register_forward_pre_hook(note, with_kwargs=True)
    image = blank_image(policy.hf.config, torch.device("cpu"))
    image["image_grid_thw"], pixels = torch.tensor([[1, 4, 4]]), image.pop("pixel_values")
    batch: Any = pack([torch.tensor([5, 6, 7, 8, 9])]) | {
        "position_ids": torch.arange(5).expand(4, 1, 5),
        "image_rows": torch.arange(4),
        "image_tokens": torch.arange(4),
        "multimodal_train_inputs": image | {"pixel_values": pixels.new_ones(16, pixels.shape[1])},
    }
    policy(batch, lambda output: None)
    assert [x.dtype for x in found] == [torch.bfloat16, torch.float32, torch.float32]


def test_an_images_word_in_a_response_is_a_word() -> None:
    from slime.backends.megatron_utils.data import Packing
    from slime.training.micro_batches import to_tensors

    data: Any = with_images(make_train_data())
    batch = Packing(merge_size=2).micro_batch(to_tensors(data, torch.device("cpu")), [6, 0])
    total = len(data["tokens"][6])
    assert data["tokens"][6][-1] == IMAGE_TOKENS["image_token_id"]
    assert batch["image_rows"].tolist() == [total + 2, total + 3, total + 4, total + 5]


def test_the_images_of_a_prompt_are_seen_once_by_all_its_samples() -> None:
    from slime.backends.megatron_utils.data import Packing
    from slime.training.micro_batches import joined_images, to_tensors

    data: Any = with_images(make_train_data())
    inputs = data["multimodal_train_inputs"]
    joined = joined_images([inputs[i] for i in (1, 3, 2, 0)], torch.device("cpu"))
    assert joined["image_grid_thw"].tolist() == [[1, 4, 4], [1, 2, 4], [1, 4, 4]]
    assert np.array_equal(
        joined["pixel_values"], np.concatenate([inputs[0]["pixel_values"], inputs[2]["pixel_values"]])
    )
    batch = Packing(merge_size=2).micro_batch(to_tensors(data, torch.device("cpu")), [1, 3, 2, 0])
    assert batch["image_tokens"].tolist() == [0, 1, 2, 3, *range(4, 10), 0, 1, 2, 3]


def test_an_image_with_another_number_of_tokens_is_an_error() -> None:
    from slime.backends.megatron_utils.data import mrope_positions

    with pytest.raises(ValueError, match="an image of 1 x 4 x 4 patches makes 4 tokens, not 3"):
        mrope_positions(9, [(1, 3)], [(1, 4, 4)], 2)


@pytest.mark.processes
def test_two_ranks_learn_as_one_and_a_resumed_run_goes_on_with_the_tower(
    models: dict[str, Path], tmp_path: Path
) -> None:
    hf, saved = models["qwen3_vl"], {"save": str(tmp_path / "save"), "save_hf": str(tmp_path / "hf")}
    run(hf, world=1, out=tmp_path / "one.pt", num_steps=3, **IMAGES)
    run(hf, world=2, out=tmp_path / "two.pt", num_steps=3, **IMAGES, **saved)
    assert_equal_runs(tmp_path / "one.pt", tmp_path / "two.pt")
    records, before, after = torch.load(tmp_path / "two.pt")
    assert {name for name in before if torch.equal(before[name], after[name])} == set()
    assert set(before) == {name for name in loaded(hf).state_dict() if name != "lm_head.weight"}
    run(hf, world=2, out=tmp_path / "rest.pt", first=2, num_steps=1, **IMAGES, **resumed_from(saved["save"]))
    records2, before2, after2 = torch.load(tmp_path / "rest.pt")
    exported = loaded(tmp_path / "hf").state_dict()
    assert all(torch.equal(exported[name], before2[name]) for name in before2)
    assert records[-len(records2) :] == records2 and all(torch.equal(after[name], after2[name]) for name in after)


@pytest.mark.processes
def test_a_frozen_tower_stays_and_has_no_optimizer_state(models: dict[str, Path], tmp_path: Path) -> None:
    frozen: dict[str, Any] = {**IMAGES, "freeze_vision_tower": True, "num_steps": 2, "save": str(tmp_path / "save")}
    run(models["qwen3_vl"], world=2, out=tmp_path / "out.pt", **frozen)
    from slime.backends.fsdp_utils.checkpoint import names_in

    _, before, after = torch.load(tmp_path / "out.pt")
    assert all(torch.equal(before[name], after[name]) == name.startswith("model.visual.") for name in before)
    (saved,) = (tmp_path / "save").glob("iter_*")
    assert not [name for name in names_in(saved) if name.startswith("optimizer.model.visual.")]


@pytest.mark.processes
def test_a_model_that_sees_images_learns_from_text_alone(models: dict[str, Path], tmp_path: Path) -> None:
    """On one rank gradients wait for the last of several micro-batches; the tower, which nothing passes, has none."""
    run(models["qwen3_vl"], world=1, out=tmp_path / "one.pt", max_tokens_per_gpu=24, num_steps=2)
    run(models["qwen3_vl"], world=2, out=tmp_path / "two.pt", num_steps=2)
    (records, before, after), (records2, _, after2) = (torch.load(tmp_path / f"{n}.pt") for n in ("one", "two"))
    for (ours, _), (theirs, _) in zip(records, records2, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)
    assert all(torch.equal(before[name], after[name]) == name.startswith("model.visual.") for name in before)
    assert all((after[name] - after2[name]).norm() <= 1e-3 * (after[name] - before[name]).norm() for name in before)


@pytest.mark.processes
def test_newer_names_of_qwen2_5_vl_are_read_and_written_too(models: dict[str, Path], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(models["qwen2_5_vl"], tmp_path / "hf")
    published = load_file(tmp_path / "hf" / "model.safetensors")
    assert "visual.patch_embed.proj.weight" in published and "model.norm.weight" in published
    newer = {
        re.sub("^visual", "model.visual", re.sub("^model", "model.language_model", name)): tensor
        for name, tensor in published.items()
    }
    save_file(newer, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    run(tmp_path / "hf", out=tmp_path / "newer.pt", num_steps=1, **IMAGES)
    run(models["qwen2_5_vl"], out=tmp_path / "published.pt", num_steps=1, **IMAGES)
    (records, before, _), (records2, before2, _) = (torch.load(tmp_path / f"{n}.pt") for n in ("newer", "published"))
    assert set(before) == set(newer) and set(before2) == set(published) and records == records2


@pytest.fixture(scope="module")
def command_line() -> CommandLine:
    return CommandLine()


REFUSED = {
    "--context-parallel-size 2 --actor-num-gpus-per-node 2": "is not built for images (--multimodal-keys)",
    "--train-backend megatron --recompute-granularity full": "full is not built for images of this model",
    "--train-backend megatron --model-args-from-hf --lora-rank 4": "--lora-rank 4 is not built for images",
    "--train-backend megatron --mtp-num-layers 1": "prediction layers are not built for images",
    "--train-backend megatron --custom-model-provider-path a.b": "is not given the images of --multimodal-keys",
    "text": "no part that sees images is known in model_type 'qwen3'",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_images_that_no_trainer_would_see_are_refused(
    models: dict[str, Path], command_line: CommandLine, tmp_path: Path, flags: str
) -> None:
    checkpoint = models["qwen3_vl"]
    if flags == "text":
        checkpoint, flags = tmp_path / "text", ""
        make_hf_model(checkpoint, "qwen3")
    line = ["--train-backend", "fsdp", "--accelerator", "cpu", "--debug-train-only", *flags.split()]
    line += ["--hf-checkpoint", str(checkpoint), "--multimodal-keys", '{"image": "images"}']
    assert any(REFUSED[flags or "text"] in problem for problem in command_line.check(line).problems.all())
