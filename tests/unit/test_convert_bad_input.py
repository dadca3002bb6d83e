"""Every converter names what is wrong with its input, in one line, before anything is written."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as torch_checkpoint
from safetensors.torch import save_file

from slime.checkpoints.paths import TRACKER_FILE
from slime.conversion.writer import growing
from slime.weights.formats import Int4Format
from tests.unit.converter_ways import FROM_HF, WAYS, contents, cut_in_the_middle, make_inputs, run_apart, split_in_two
from tests.unit.test_convert_gguf import write_gguf
from tests.unit.test_hf_weights import tensors_of

pytestmark = pytest.mark.processes

FUSED = "model.layers.1.mlp.experts.down_proj"
UP, NORM = "model.layers.1.mlp.up_proj", "model.layers.1.input_layernorm.weight"


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("inputs")
    make_inputs(root)
    return root


@pytest.fixture
def inputs(whole, tmp_path) -> Path:
    return shutil.copytree(whole, tmp_path / "inputs")


def refused(way: str, command: list[str], capfd: pytest.CaptureFixture[str]) -> str:
    """The one line that a tool says."""
    capfd.readouterr()
    status = run_apart(WAYS[way], command)
    said = capfd.readouterr().err
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert status == 2 and len(errors) == 1 and "Traceback" not in said, said
    return errors[0]


def without_weights(hf: Path) -> None:
    for file in hf.glob("*.safetensors*"):
        file.unlink()


def with_a_cut_shard(hf: Path) -> None:
    cut_in_the_middle(hf / "model-00002-of-00002.safetensors")


def with_a_cut_header(hf: Path) -> None:
    os.truncate(hf / "model-00002-of-00002.safetensors", 20)


def with_a_shard_missing(hf: Path) -> None:
    (hf / "model-00002-of-00002.safetensors").unlink()


def with_a_cut_index(hf: Path) -> None:
    without_weights(hf)
    (hf / "model.safetensors.index.json").write_text('{"weight_map": {"model.')


def with_a_wrong_index(hf: Path) -> None:
    index = json.loads((hf / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.ghost.weight"] = "model-00001-of-00002.safetensors"
    (hf / "model.safetensors.index.json").write_text(json.dumps(index))


def with_a_cut_config(hf: Path) -> None:
    cut_in_the_middle(hf / "config.json")


def without_config(hf: Path) -> None:
    (hf / "config.json").unlink()


OF_HF = {
    without_weights: "holds no model.safetensors and no model.safetensors.index.json",
    with_a_cut_shard: "model-00002-of-00002.safetensors is cut off",
    with_a_cut_header: "model-00002-of-00002.safetensors is no safetensors file, or cut off",
    with_a_shard_missing: "model-00002-of-00002.safetensors cannot be read",
    with_a_cut_index: "model.safetensors.index.json is no index of safetensors",
    with_a_wrong_index: "model.ghost.weight",
    with_a_cut_config: "config.json is no JSON",
    without_config: "it has no config.json",
}


def cut(pattern: str) -> Callable[[Path], None]:
    """The largest file of a pattern, cut in the middle."""

    def damage(root: Path) -> None:
        cut_in_the_middle(max(root.glob(pattern), key=lambda file: file.stat().st_size))

    return damage


def gone(pattern: str) -> Callable[[Path], None]:
    """The last file of a pattern, removed."""

    def damage(root: Path) -> None:
        max(root.glob(pattern)).unlink()

    return damage


def config_of_origin(**changes: int) -> Callable[[Path], None]:
    def damage(root: Path) -> None:
        config = json.loads((root / "origin" / "config.json").read_text())
        (root / "origin" / "config.json").write_text(json.dumps(config | changes))

    return damage


def without_shape(then: Callable[[Path], None]) -> Callable[[Path], None]:
    """The checkpoint does not say what model it is."""

    def damage(root: Path) -> None:
        (root / "dist" / "release" / "model_shape.json").unlink()
        then(root)

    return damage


def changed(name: str, changes: dict[str, torch.Tensor | None]) -> Callable[[Path], None]:
    """Other tensors in an HF directory or an FSDP checkpoint; None: without."""

    def damage(root: Path) -> None:
        is_fsdp = name == "run/model"
        found = tensors_of(root / ("hf" if is_fsdp else name)) | changes
        tensors = {one: tensor for one, tensor in found.items() if tensor is not None}
        if is_fsdp:
            shutil.rmtree(root / name)
            state = {f"model.{one}": tensor for one, tensor in tensors.items()}
            torch_checkpoint.save(state, checkpoint_id=root / name, no_dist=True)
            return
        without_weights(root / name)
        save_file(tensors, root / name / "model.safetensors", metadata={"format": "pt"})
        split_in_two(root / name)

    return damage


def with_weights_of_origin(then: Callable[[Path], None]) -> Callable[[Path], None]:
    """The origin has weights to compare with."""

    def damage(root: Path) -> None:
        shutil.rmtree(root / "origin")
        shutil.copytree(root / "hf", root / "origin")
        then(root)

    return damage


def with_index_alone(*more: str) -> Callable[[Path], None]:
    """The origin was downloaded without its weights, but with the index, which names so many more tensors."""

    def damage(root: Path) -> None:
        index = json.loads((root / "hf" / "model.safetensors.index.json").read_text())
        index["weight_map"] |= dict.fromkeys(more, "model-00001-of-00002.safetensors")
        (root / "origin" / "model.safetensors.index.json").write_text(json.dumps(index))

    return damage


def with_static_activations(root: Path) -> None:
    file = root / "fp8" / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"]["activation_scheme"] = "static"
    file.write_text(json.dumps(config))


def in_gguf(**leaves_out: str) -> Callable[[Path], None]:
    def damage(root: Path) -> None:
        write_gguf(root / "model.gguf", "qwen3", **leaves_out)

    return damage


OF_CHECKPOINT = {
    cut("*/*.distcp"): ".distcp is cut off",
    gone("*/*.distcp"): ".distcp is missing",
    cut("*/.metadata"): ".metadata cannot be read",
    gone("*/.metadata"): "no .metadata file",
}
OF_ORIGIN = {
    with_weights_of_origin(cut("origin/model-00002*")): "origin/model-00002-of-00002.safetensors is cut off",
    with_weights_of_origin(changed("origin", {NORM: torch.ones(7)})): f"{NORM} is [32] in the checkpoint and [7]",
    with_weights_of_origin(changed("origin", {"x": torch.ones(7)})): "lacks 1 tensor(s) of --origin-hf-dir",
}
OF_ONE_WAY = {
    "torch_dist to hf": OF_ORIGIN
    | {
        cut("dist/release/model_shape.json"): "model_shape.json is no JSON",
        with_index_alone("mtp.norm.weight"): "its index names 1 tensor(s) that the checkpoint does not hold",
        without_shape(config_of_origin(num_attention_heads=6)): "is it the config of another model?",
        without_shape(config_of_origin(num_hidden_layers=3)): "has no layer 2, and the config of --origin-hf-dir",
    },
    "fsdp to hf": OF_ORIGIN
    | {
        with_weights_of_origin(changed("run/model", {NORM: None})): "lacks 1 tensor(s) of --origin-hf-dir",
        config_of_origin(num_hidden_layers=3): "has no layer 2, and the config of --origin-hf-dir",
        config_of_origin(hidden_size=64): "says hidden_size 64; is it one of another model?",
    },
    "gguf to hf": {
        cut("model.gguf"): "model.gguf is cut off, or no GGUF file",
        gone("model.gguf"): "model.gguf: no such file",
        in_gguf(leaves_out="blk.0.attn_v"): "lacks model.layers.0.self_attn.v_proj.weight",
    },
    "int4 by GPTQ": {
        changed("hf", {NORM: None}): f"has no tensor {NORM}",
        changed("hf", {NORM: torch.ones(1)}): f"{NORM} has the shape [1], and [32]",
        changed("hf", {f"{UP}.weight": torch.ones(48, 16)}): f"{UP}.weight has the shape [48, 16], and [48, 32]",
        cut("hf/tokenizer.json"): "has no tokenizer that can be loaded",
        cut("rows/train.jsonl"): "train.jsonl:6: not valid JSON",
    },
    "hf to torch_dist": {
        changed("hf", {NORM: None}): f"has no tensor {NORM}",
        changed("hf", {NORM: torch.ones(1)}): f"{NORM} of shape [1]",
    },
    "from fp8": {
        changed("fp8", {FUSED: torch.zeros(2, 32, 48).to(torch.float8_e4m3fn)}): f"{FUSED} holds all experts",
        with_static_activations: "have no place in a checkpoint in bf16",
        changed("fp8", {f"{UP}.weight_scale_inv": None}): f"{UP}.weight is in fp8, and there are no scales",
        changed("fp8", {f"{UP}.weight_scale_inv": torch.ones(3, 1)}): f"{UP}.weight_scale_inv has the shape [3, 1]",
    },
    "from int4": {
        changed("int4", {f"{UP}.weight_g_idx": torch.zeros(32, dtype=torch.int32)}): f"{UP}.weight_g_idx says which",
        changed("int4", {f"{UP}.weight_scale": None}): f"{UP}.weight_packed has no weight_scale",
        changed("int4", {f"{UP}.weight_scale": torch.ones(48, 5)}): f"{UP}.weight_scale has the shape [48, 5]",
        changed("int4", {f"{UP}.weight_shape": torch.tensor([48, 30])}): f"{UP}.weight_shape says [48, 30]",
    },
}


def damages() -> Iterator[tuple[str, Callable[[Path], None], str]]:
    """(way, damage to the directory of `make_inputs`, what is said)."""
    of_directories = dict.fromkeys(FROM_HF, OF_HF) | dict.fromkeys(("torch_dist to hf", "fsdp to hf"), OF_CHECKPOINT)
    for way, some in of_directories.items():
        for of_directory, said in some.items():
            name = next(iter(WAYS[way].reads.values()))
            yield way, lambda root, of_directory=of_directory, name=name: of_directory(root / name), said
    for way, some in OF_ONE_WAY.items():
        for damage, said in some.items():
            yield way, damage, said


DAMAGES = list(damages())


@pytest.mark.parametrize(("way", "damage", "said"), DAMAGES, ids=[f"{way}-{said}" for way, _, said in DAMAGES])
def test_what_is_wrong_with_an_input_is_named(tmp_path, capfd, inputs, way, damage, said):
    damage(inputs)
    assert said in refused(way, WAYS[way].command(inputs, tmp_path / "out"), capfd)
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("way", ["torch_dist to hf", "fsdp to hf"])
def test_an_origin_without_weights_may_have_their_index(tmp_path, inputs, way):
    with_index_alone()(inputs)
    assert run_apart(WAYS[way], WAYS[way].command(inputs, tmp_path / "out")) == 0
    assert tensors_of(tmp_path / "out").keys() == tensors_of(inputs / "hf").keys()


def test_the_config_says_that_prediction_layers_are_not_quantised_by_gptq(tmp_path, inputs):
    one, name = WAYS["int4 by GPTQ"], "model.layers.2.mlp.up_proj.weight"
    changed("hf", {name: torch.ones(48, 32, dtype=torch.bfloat16)})(inputs)
    assert run_apart(one, one.command(inputs, tmp_path / "out")) == 0
    fmt = Int4Format.of(json.loads((tmp_path / "out" / "config.json").read_text()), where="out")
    assert name in tensors_of(tmp_path / "out") and not fmt.quantizes(name)
    assert fmt.quantizes(f"{UP}.weight")


@pytest.mark.parametrize("way", ["fp8", "int4", "int4 by GPTQ"])
def test_a_weight_that_cannot_be_quantised_is_named(tmp_path, capfd, inputs, way):
    changed("hf", {f"{UP}.weight": torch.full((48, 32), torch.inf)})(inputs)
    assert f"{UP}.weight has" in refused(way, WAYS[way].command(inputs, tmp_path / "out"), capfd)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("way", WAYS)
def test_an_output_that_would_overwrite_an_input_is_refused(tmp_path, capfd, inputs, way):
    one = WAYS[way]
    more = [one.replaces] if one.replaces else []
    before = contents(inputs)
    for flag, name in one.reads.items():
        (tmp_path / "link").symlink_to(inputs / name)
        for output in (inputs / name, inputs / "." / ".." / "inputs" / name, tmp_path / "link"):
            assert f"is {flag}; name another directory" in refused(way, one.command(inputs, output, *more), capfd)
        (tmp_path / "link").unlink()
        if not one.inside:
            assert "has --" in refused(way, one.command(inputs, inputs, *more), capfd)
            (inputs / name).rename(tmp_path / "out.partial")
            (inputs / name).symlink_to(tmp_path / "out.partial")
            assert "where it grows" in refused(way, one.command(inputs, tmp_path / "out", *more), capfd)
            (inputs / name).unlink()
            (tmp_path / "out.partial").rename(inputs / name)
            (tmp_path / ".out.old").symlink_to(inputs / name)
            said = refused(way, one.command(inputs, tmp_path / "out", *more), capfd)
            assert "where what it replaces lies" in said
            (tmp_path / ".out.old").unlink()
    assert contents(inputs) == before


@pytest.mark.parametrize(
    ("way", "given", "inner"), [("torch_dist to hf", "dist", "dist/release"), ("fsdp to hf", "run", "run/model")]
)
def test_an_output_is_not_the_directory_that_was_found_in_the_input(tmp_path, capfd, inputs, way, given, inner):
    one, before = WAYS[way], contents(inputs)
    command = one.command(inputs, inputs / inner, "--force", "--input-dir", str(inputs / given))
    assert "is --input-dir; name another directory" in refused(way, command, capfd)
    assert contents(inputs) == before


@pytest.mark.parametrize("way", WAYS)
def test_an_output_that_is_no_name_is_refused(tmp_path, capfd, monkeypatch, inputs, way):
    one, here = WAYS[way], tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    if not one.inside:
        for output in (".", "..", "/"):
            assert "has no name of its own" in refused(way, one.command(inputs, output), capfd)
    (here / "link").symlink_to(here / "nothing")
    for output in ("link", "link/out"):
        assert "link is a link to nothing" in refused(way, one.command(inputs, output), capfd)
    grows = Path(".release.partial" if one.inside else "out.partial")
    (tmp_path / "elsewhere").mkdir()
    grows.symlink_to(tmp_path / "elsewhere")
    said = refused(way, one.command(inputs, here if one.inside else "out"), capfd)
    assert f"{grows}, where the result grows, exists" in said
    assert sorted(file.name for file in here.iterdir()) == sorted([grows.name, "link"])


def test_the_usual_output_of_a_directory_without_a_name_lies_beside_it(tmp_path, monkeypatch, inputs):
    monkeypatch.chdir(inputs / "int4")
    assert run_apart(WAYS["from int4"], ["--model-dir", "."]) == 0
    assert (inputs / "int4-bf16" / "config.json").is_file()


def test_the_checkpoints_of_a_run_keep_their_tracker(tmp_path, capfd, inputs):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / TRACKER_FILE).write_text("12")
    said = refused("hf to torch_dist", WAYS["hf to torch_dist"].command(inputs, tmp_path / "out"), capfd)
    assert "holds a run's checkpoints" in said and "says 12" in said
    assert contents(tmp_path / "out") == {TRACKER_FILE: b"12"}


@pytest.mark.parametrize("way", WAYS)
def test_one_process_alone_writes_a_directory(tmp_path, capfd, inputs, way):
    one = WAYS[way]
    partial = tmp_path / "out" / ".release.partial" if one.inside else tmp_path / "out.partial"
    with growing(partial):
        said = refused(way, one.command(inputs, tmp_path / "out"), capfd)
        assert f"{partial}, where the result grows, exists: another process is writing it now, or was killed." in said
        assert partial.exists()


@pytest.mark.parametrize("way", [way for way, one in WAYS.items() if not one.inside])
def test_a_directory_of_somebody_else_is_not_grown_over(tmp_path, capfd, inputs, way):
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "mine").write_text("x")
    said = refused(way, WAYS[way].command(inputs, tmp_path / "out"), capfd)
    assert "out.partial, where the result grows, exists" in said
    assert contents(tmp_path / "out.partial") == {"mine": b"x"}
