"""The converters: what comes out is what went in, bad input is named before anything starts."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_checkpoint
from safetensors.torch import save_file

from slime.backends.megatron_utils.checkpoint import torch_dist_writer
from slime.backends.megatron_utils.checkpoint.torch_dist_reader import TorchDistReader
from slime.checkpoints.paths import MANIFEST_FILE, entries_of
from slime.conversion import writer
from slime.conversion.reader import TensorInfo
from slime.conversion.writer import HfTarget, Job, write_hf
from slime.utils.errors import UsageError
from tests.unit.converter_ways import WAYS, cut_in_the_middle
from tests.unit.megatron_fakes import make_args, make_hf_model, run_world
from tests.unit.test_hf_weights import assert_same_bytes, run_tool, tensors_of
from tools import (
    convert_fsdp_to_hf,
    convert_hf_to_torch_dist,
    convert_k2_thinking_int4_to_bf16,
    convert_torch_dist_to_hf,
    inspect_checkpoint,
)

INT4 = {
    "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 16}}},
}


@pytest.mark.processes
@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe", "glm4_moe_lite"])
def test_experts_go_through_torch_dist_and_come_back_byte_equal(tmp_path, family):
    make_hf_model(tmp_path / "hf", family)
    original = tensors_of(tmp_path / "hf")
    flags = ["--hf-checkpoint", f"{tmp_path}/hf", "--save", f"{tmp_path}/dist", "--model-args-from-hf"]
    run_tool(convert_hf_to_torch_dist, *flags)
    (tmp_path / "hf" / "model.safetensors").unlink()
    back = ["--input-dir", f"{tmp_path}/dist", "--origin-hf-dir", f"{tmp_path}/hf", "--output-dir", f"{tmp_path}/back"]
    run_tool(convert_torch_dist_to_hf, *back)
    assert_same_bytes(tensors_of(tmp_path / "back"), original)


@pytest.mark.processes
def test_what_no_trainer_changes_comes_from_the_origin_and_nothing_may_be_missing(tmp_path, capsys):
    make_hf_model(tmp_path / "hf", "qwen3_5")
    run_tool(convert_hf_to_torch_dist, "--hf-checkpoint", f"{tmp_path}/hf", "--save", f"{tmp_path}/dist")
    base = ["--input-dir", f"{tmp_path}/dist", "--origin-hf-dir", f"{tmp_path}/hf", "--output-dir"]
    assert convert_torch_dist_to_hf.main([*base, f"{tmp_path}/back"]) == 0
    original = tensors_of(tmp_path / "hf")
    assert any(name.startswith("model.visual.") for name in original)
    assert_same_bytes(tensors_of(tmp_path / "back"), original)

    norm = "model.language_model.norm.weight"
    for changed, said in (
        ({"model.language_model.layers.9.mlp.up_proj.weight": torch.zeros(3)}, "lacks 1 tensor(s) of --origin-hf-dir"),
        ({norm: torch.zeros(31)}, f"{norm} is [32] in the checkpoint and [31] in --origin-hf-dir"),
    ):
        save_file(original | changed, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
        capsys.readouterr()
        assert convert_torch_dist_to_hf.main([*base, f"{tmp_path}/x"]) == 2
        assert said in capsys.readouterr().err
    save_file(original | {"model.extra": torch.ones(3)}, tmp_path / "hf" / "model.safetensors")
    assert convert_torch_dist_to_hf.main([*base, f"{tmp_path}/more", "-a"]) == 0
    assert tensors_of(tmp_path / "more")["model.extra"].tolist() == [1, 1, 1]

    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    config["text_config"] |= {"intermediate_size": 64, "linear_num_value_heads": 2}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    assert convert_torch_dist_to_hf.main([*base, f"{tmp_path}/x"]) == 2
    said = capsys.readouterr().err
    assert "ffn_hidden_size 48, not 64; linear_num_value_heads 4, not 2" in said
    assert not (tmp_path / "x").exists() and not (tmp_path / "x.partial").exists()


def load_and_export(args, root, out):
    from slime.backends.megatron_utils.checkpoint.hf_export import save_hf
    from slime.backends.megatron_utils.checkpoint.iterations import CheckpointSource, load_checkpoint
    from slime.backends.megatron_utils.model_provider import get_model_provider_func

    model = [get_model_provider_func(args)()]
    for param in model[0].parameters():
        param.data.fill_(float("nan"))
    load_checkpoint(CheckpointSource(str(root)), model=model)
    save_hf(args, model, out)


@pytest.mark.processes
@pytest.mark.parametrize("flags", ["--expert-model-parallel-size 2", "--expert-tensor-parallel-size 2"])
def test_a_trainer_of_another_layout_loads_what_was_converted(tmp_path, flags):
    make_hf_model(tmp_path / "hf", "qwen3_moe")
    command = ["--hf-checkpoint", f"{tmp_path}/hf", "--save", f"{tmp_path}/dist", "--model-args-from-hf"]
    run_tool(convert_hf_to_torch_dist, *command)
    args = make_args(tmp_path / "hf", flags, update_weight_buffer_size=10**6)
    run_world(args.actor_num_gpus_per_node, load_and_export, args, tmp_path / "dist", tmp_path / "out")
    assert_same_bytes(tensors_of(tmp_path / "out"), tensors_of(tmp_path / "hf"))


def test_a_checkpoint_of_fsdp_becomes_an_hf_directory(tmp_path, capsys):
    make_hf_model(tmp_path / "hf", dtype="bfloat16")
    original = tensors_of(tmp_path / "hf")
    state = {f"model._fsdp_wrapped_module.{name}": tensor for name, tensor in original.items()}
    state |= {f"optim.state.{name}.exp_avg": torch.zeros_like(tensor) for name, tensor in original.items()}
    torch_checkpoint.save(state, checkpoint_id=tmp_path / "run" / "model", no_dist=True)
    base = ["--input-dir", f"{tmp_path}/run", "--origin-hf-dir", f"{tmp_path}/hf", "--output-dir"]
    assert convert_fsdp_to_hf.main([*base, f"{tmp_path}/out"]) == 0
    assert_same_bytes(tensors_of(tmp_path / "out"), original)
    assert convert_fsdp_to_hf.main([*base, f"{tmp_path}/out"]) == 2 and "exists" in capsys.readouterr().err
    more = original | {"model.layers.9.input_layernorm.weight": torch.zeros(32)}
    save_file(more, tmp_path / "hf" / "model.safetensors")
    assert convert_fsdp_to_hf.main([*base, f"{tmp_path}/more"]) == 2
    assert "model.layers.9.input_layernorm.weight" in capsys.readouterr().err
    as_megatron = ["--input-dir", f"{tmp_path}/run/model", *base[2:], f"{tmp_path}/x"]
    assert convert_torch_dist_to_hf.main(as_megatron) == 2
    assert "tools/convert_fsdp_to_hf.py" in capsys.readouterr().err


def test_experts_that_fsdp_keeps_as_one_tensor_become_single_ones(tmp_path):
    model = make_hf_model(tmp_path / "hf", "qwen3_moe", dtype="bfloat16")
    assert "model.layers.0.mlp.experts.gate_up_proj" in model.state_dict()
    torch_checkpoint.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "run", no_dist=True)
    command = ["--input-dir", f"{tmp_path}/run", "--origin-hf-dir", f"{tmp_path}/hf", "--output-dir"]
    assert convert_fsdp_to_hf.main([*command, f"{tmp_path}/out"]) == 0
    assert_same_bytes(tensors_of(tmp_path / "out"), tensors_of(tmp_path / "hf"))


def test_what_is_before_the_names_of_a_model_is_found_whatever_it_sees():
    for before in ("", "model.", "actor.module."):
        for inner in ("", "language_model."):
            names = [f"{before}model.{inner}embed_tokens.weight", f"{before}model.visual.x", f"{before}lm_head.weight"]
            found = convert_fsdp_to_hf.hf_names(names, Path("x"))
            assert [name.removeprefix(before) for name in names] == list(found.values())


def jobs_of(tensors: dict[str, torch.Tensor], made: list[str]) -> list[Job]:
    def job(name: str, tensor: torch.Tensor) -> Job:
        def make() -> list[torch.Tensor]:
            made.append(name)
            return [tensor]

        return Job({name: TensorInfo(tensor.dtype, tuple(tensor.shape))}, make)

    return [job(name, tensor) for name, tensor in tensors.items()]


def test_a_conversion_that_fails_leaves_nothing_and_can_be_repeated(tmp_path):
    tensors = {f"t{i}": torch.full((4,), float(i)) for i in range(6)}
    jobs = jobs_of(tensors, [])
    target = HfTarget(path=tmp_path / "out", flag="--save-dir", shard_bytes=32)
    broken = [*jobs[:4], Job(jobs[4].outputs, lambda: (_ for _ in ()).throw(KeyboardInterrupt)), jobs[5]]
    with pytest.raises(KeyboardInterrupt):
        write_hf(target, broken)
    assert not list(tmp_path.iterdir())
    assert write_hf(target, jobs) == 6 * 16
    assert_same_bytes(tensors_of(target.path), tensors)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["out"]


def test_a_conversion_that_is_started_twice_leaves_what_the_first_one_writes(tmp_path):
    target = HfTarget(path=tmp_path / "out", flag="--save-dir")
    made: list[str] = []
    (job,) = jobs_of({"x": torch.ones(4)}, made)

    def make_twice() -> Sequence[torch.Tensor]:
        with pytest.raises(UsageError, match=r"out.partial, where the result grows, exists: another process"):
            write_hf(target, [job])
        return job.make()

    write_hf(target, [Job(job.outputs, make_twice)])
    assert made == ["x"] and len(tensors_of(target.path)) == 1
    with pytest.raises(UsageError, match="out came into being meanwhile"):
        write_hf(target, [job])
    assert sorted(one.name for one in tmp_path.iterdir()) == ["out"]


@pytest.mark.parametrize("when", ["before", "on the way"])
def test_a_full_disk_leaves_nothing_under_the_final_name_and_says_what_to_do(tmp_path, monkeypatch, when):
    jobs = jobs_of({"x": torch.ones(4), "y": torch.ones(4)}, [])
    target = HfTarget(path=tmp_path / "out", flag="--save-dir", shard_bytes=16)
    with monkeypatch.context() as patch:
        if when == "before":
            usage = shutil.disk_usage(tmp_path)._replace(free=10)
            patch.setattr(writer.shutil, "disk_usage", lambda path: usage)
            said = r"--save-dir: 0.00 GB are still to be written .* make room"
        else:
            real = writer.os.pwrite

            written: list[int] = []

            def pwrite(handle: int, data: memoryview, offset: int) -> int:
                written.append(offset)
                if len(written) == 4:  # two headers, one tensor, and now the other
                    raise OSError(errno.ENOSPC, "No space left on device")
                return real(handle, data, offset)

            patch.setattr(writer.os, "pwrite", pwrite)
            said = r"the disk of .*out.partial is full; make room and run the same command again"
        with pytest.raises(UsageError, match=said):
            write_hf(target, jobs)
    assert not target.path.exists()
    write_hf(target, jobs)
    assert len(tensors_of(target.path)) == 2


@pytest.mark.processes
def test_a_conversion_to_torch_dist_that_fails_leaves_nothing_and_can_be_repeated(tmp_path):
    make_hf_model(tmp_path / "hf", "qwen3")
    command = ["--hf-checkpoint", f"{tmp_path}/hf", "--save", f"{tmp_path}/dist", "--max-workers", "1"]

    class CutOff:
        """The tool, whose third part meets the end of its machine."""

        @staticmethod
        def main(argv: tuple[str, ...]) -> int:

            torch_dist_writer.PART_BYTES = 10_000
            real = torch_dist_writer.write_part

            def write(path: Path, *values: Any) -> Any:
                if path.name == "__0_3.distcp":
                    raise SystemExit("cut off")
                return real(path, *values)

            torch_dist_writer.write_part = write
            try:
                convert_hf_to_torch_dist.main(argv)
            except SystemExit:
                return 0
            return 1

    run_tool(CutOff, *command)
    assert not list((tmp_path / "dist").iterdir())
    run_tool(convert_hf_to_torch_dist, *command)
    back = ["--input-dir", f"{tmp_path}/dist", "--origin-hf-dir", f"{tmp_path}/hf", "--output-dir", f"{tmp_path}/back"]
    assert convert_torch_dist_to_hf.main(back) == 0
    assert_same_bytes(tensors_of(tmp_path / "back"), tensors_of(tmp_path / "hf"))
    assert {one.name for one in (tmp_path / "dist").iterdir()} == {"release", "latest_checkpointed_iteration.txt"}
    release = tmp_path / "dist" / "release"
    listed = json.loads((release / MANIFEST_FILE).read_text())["files"]
    assert listed == entries_of(release, [file for file in release.iterdir() if file.name != MANIFEST_FILE])


_TINY: list[Path] = []


def tiny_model() -> Path:
    """One model for all tests that only damage a copy of it."""
    assert _TINY, "see the fixture"
    return _TINY[0]


@pytest.fixture(scope="module", autouse=True)
def _tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "hf"
    make_hf_model(path)
    _TINY.append(path)
    yield
    _TINY.clear()


@pytest.mark.parametrize("way", ["fp8", "int4"])
def test_a_family_that_is_not_trained_so_is_refused_before_hours_of_quantising(tmp_path, capsys, way):
    shutil.copytree(tiny_model(), tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    for model_type, said in (
        ("gpt_neox", "use llama, qwen2, "),
        ("qwen3_next", f"({way}) of model_type 'qwen3_next'"),
    ):
        (tmp_path / "hf" / "config.json").write_text(json.dumps(config | {"model_type": model_type}))
        assert WAYS[way].tool.main(WAYS[way].command(tmp_path, tmp_path / "out")) == 2
        assert said in capsys.readouterr().err
        assert sorted(one.name for one in tmp_path.iterdir()) == ["hf"]


def test_another_config_is_read_as_it_is_called(tmp_path, capsys):
    shutil.copytree(tiny_model(), tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "other.json").write_text(json.dumps(config | {"quantization_config": INT4}))
    command = ["--model-dir", f"{tmp_path}/hf", "--output-dir", f"{tmp_path}/out", "--config-path"]
    assert convert_k2_thinking_int4_to_bf16.main([*command, f"{tmp_path}/other.json"]) == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config
    assert convert_k2_thinking_int4_to_bf16.main([*command, f"{tmp_path}/none.json", "--overwrite"]) == 2
    assert f"--config-path {tmp_path}/none.json: no such file" in capsys.readouterr().err


@pytest.mark.processes
def test_a_model_of_another_kind_or_shape_is_named_before_anything_is_written(tmp_path, capfd):
    shutil.copytree(tiny_model(), tmp_path / "hf")
    base = ["--hf-checkpoint", f"{tmp_path}/hf", "--save", f"{tmp_path}/dist"]

    def refused(*flags: str) -> str:
        class Tool:
            @staticmethod
            def main(argv: tuple[str, ...]) -> int:
                return 0 if convert_hf_to_torch_dist.main(argv) == 2 else 1

        run_tool(Tool, *base, *flags)
        assert not (tmp_path / "dist").exists()
        return capfd.readouterr().err

    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    tensors = tensors_of(tmp_path / "hf")

    def write(config_changes: dict[str, object], changed: dict[str, torch.Tensor | None]) -> None:
        (tmp_path / "hf" / "config.json").write_text(json.dumps(config | config_changes))
        found = {name: tensor for name, tensor in (tensors | changed).items() if tensor is not None}
        save_file(found, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})

    write({"model_type": "gpt_neox"}, {})
    assert "'gpt_neox'" in (said := refused()) and "llama, qwen2" in said
    write({}, {"model.layers.1.mlp.up_proj.weight": None})
    assert "has no tensor model.layers.1.mlp.up_proj.weight" in refused()
    write({}, {"model.layers.1.mlp.down_proj.weight": torch.zeros(32, 40)})
    assert "model.layers.1.mlp.down_proj.weight of shape [32, 40]" in (said := refused()) and "[32, 48]" in said
    write({}, {"model.layers.1.mlp.extra.weight": torch.zeros(3)})
    assert "1 tensor(s) have no place" in (said := refused()) and "model.layers.1.mlp.extra.weight" in said
    write({}, {})
    for more in ([], ["--model-args-from-hf"]):  # a flag that is given is not overridden
        assert "--vocab-size: the flags say 50, the HF config says 100" in refused("--vocab-size", "50", *more)
    assert "--padded-vocab-size 64 is below the vocabulary of 100" in refused("--padded-vocab-size", "64")
    rows = {name: torch.zeros(104, 32) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    write({}, rows)
    assert "--vocab-size 100, but the embedding" in (said := refused()) and "give --vocab-size 104" in said


def test_a_vocabulary_that_does_not_fit_says_which_would(tmp_path):
    from tools.convert_torch_dist_to_hf import vocab_size

    assert vocab_size(None, 100, 100, 128) == 100 == vocab_size(100, 128, 100, 128)
    with pytest.raises(UsageError, match="give --vocab-size 120 or --vocab-size 100"):
        vocab_size(None, 100, 120, 128)
    with pytest.raises(UsageError, match="has 128 rows, padding included; give --vocab-size 100"):
        vocab_size(200, 100, 100, 128)


def test_a_torch_dist_checkpoint_that_is_not_whole_is_named(tmp_path, capsys):
    torch_checkpoint.save(
        {"model.embed_tokens.weight": torch.ones(64, 64)}, checkpoint_id=tmp_path / "c", no_dist=True
    )
    (file,) = (tmp_path / "c").glob("*.distcp")
    cut_in_the_middle(file)
    with pytest.raises(UsageError, match=f"{file.name} is cut off"):
        TorchDistReader(tmp_path / "c", is_stacked=False)
    file.unlink()
    with pytest.raises(UsageError, match=f"{file.name} is missing"):
        TorchDistReader(tmp_path / "c", is_stacked=False)
    (tmp_path / "c" / ".metadata").write_bytes(b"no pickle")
    with pytest.raises(UsageError, match="cannot be read"):
        TorchDistReader(tmp_path / "c")


def test_two_checkpoints_are_compared_tensor_by_tensor(tmp_path, capsys):
    save = {"a": torch.tensor([1.0, 2.0]), "b": torch.ones(3), "c": torch.ones(2), "n": torch.tensor([float("nan")])}
    changed = {
        "a": torch.tensor([1.0, 2.5]),
        "b": torch.ones(4),
        "d": torch.ones(2),
        "n": torch.tensor([float("nan")]),
    }
    for name, tensors in (("one", save), ("two", changed)):
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")
    assert inspect_checkpoint.main([f"{tmp_path}/one", "--diff", f"{tmp_path}/one"]) == 0
    assert "0 difference(s) in 4 tensors" in capsys.readouterr().out
    assert inspect_checkpoint.main([f"{tmp_path}/one", "--diff", f"{tmp_path}/two", "--json"]) == 1
    rows = {row["name"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert rows.keys() == {"a", "b", "c", "d"}
    assert (rows["a"]["count"], rows["a"]["of"], rows["a"]["largest"]) == (1, 2, 0.5)
    assert rows["a"]["relative"] == pytest.approx((0.5 / 2) / 1.5)
    assert (rows["b"]["first"]["shape"], rows["b"]["second"]["shape"]) == ([3], [4])
    assert (rows["c"]["only in"], rows["d"]["only in"]) == ("the first", "the second")
    assert inspect_checkpoint.main([f"{tmp_path}/one", "--checksums", "--match", "a"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert listed[0].startswith("a  float32  [2]  ") and listed[1].startswith("hf: 1 tensors, ")
    assert inspect_checkpoint.main([f"{tmp_path}/one", "--match", "x*"]) == 2
    assert inspect_checkpoint.main([f"{tmp_path}/none"]) == 2


@pytest.mark.processes
def test_a_converted_checkpoint_differs_nowhere_from_its_origin(tmp_path, capsys):
    shutil.copytree(tiny_model(), tmp_path / "hf")
    run_tool(convert_hf_to_torch_dist, "--hf-checkpoint", f"{tmp_path}/hf", "--save", f"{tmp_path}/dist")
    capsys.readouterr()
    pair = [f"{tmp_path}/hf", "--diff", f"{tmp_path}/dist", "--origin-hf-dir", f"{tmp_path}/hf"]
    assert inspect_checkpoint.main(pair) == 0
    assert f"0 difference(s) in {len(tensors_of(tmp_path / 'hf'))} tensors" in capsys.readouterr().out
    assert inspect_checkpoint.main([f"{tmp_path}/dist"]) == 0
    assert "torch_dist: " in capsys.readouterr().out
