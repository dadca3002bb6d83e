"""GGUF files to HF directories: what transformers reads of them as a whole, tensor by tensor."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
import torch

from slime.utils.errors import UsageError
from tests.unit.test_hf_weights import tensors_of
from tools import convert_gguf_to_hf


def test_a_file_that_is_none_and_flags_that_cannot_work_are_named(tmp_path, capsys):
    def refused(*more: str) -> str:
        assert convert_gguf_to_hf.main(["--gguf", f"{tmp_path}/some.gguf", "--output", f"{tmp_path}/out", *more]) == 2
        return capsys.readouterr().err

    assert "some.gguf: no such file" in refused()
    (tmp_path / "some.gguf").write_bytes(b"<html>")
    assert "some.gguf is no GGUF file" in refused()
    (tmp_path / "some.gguf").write_bytes(b"GGUF and more")
    assert "--shard-bytes 0 is not above 0" in refused("--shard-bytes", "0")
    assert "some.gguf is cut off" in refused()
    (tmp_path / "out").mkdir()
    assert "--output" in (said := refused()) and "exists" in said


def write_gguf(path: Path, arch: str, *, leaves_out: str = "nothing", has_tokens: bool = True) -> None:
    """A model of one layer with random weights, as llama.cpp stores it, quantised where it would."""
    import gguf
    import numpy

    writer, random = gguf.GGUFWriter(path, arch), numpy.random.default_rng(0)
    hidden, head, heads, groups, ffn, experts = 64, 32, 2, 1, 96, 4
    for key, value in {
        **{"context_length": 64, "embedding_length": hidden, "block_count": 1, "feed_forward_length": ffn},
        **{"head_count": heads, "head_count_kv": groups, "layer_norm_rms_eps": 1e-5, "rope_freq_base": 1e4},
        **{"key_length": head, "value_length": head, "rope_dimension_count": head, "vocab_size": 6},
        **({"expert_count": experts, "expert_used_count": 2} if arch == "qwen3moe" else {}),
        **({"expert_feed_forward_length": 32} if arch == "qwen3moe" else {}),
    }.items():
        getattr(writer, f"add_{key}")(value)
    writer.add_tokenizer_model("gpt2")
    if has_tokens:
        writer.add_token_list(["a", "b", "ab", "<|im_start|>", "<|im_end|>", "aba"])
        writer.add_token_merges(["a b", "ab a"])
    writer.add_eos_token_id(4)
    writer.add_bos_token_id(3)
    shapes = {
        **{"token_embd": (6, hidden), "output_norm": (hidden,), "blk.0.attn_norm": (hidden,)},
        **{"blk.0.ffn_norm": (hidden,), "blk.0.attn_q": (heads * head, hidden), "blk.0.attn_k": (head, hidden)},
        **{"blk.0.attn_v": (head, hidden), "blk.0.attn_output": (hidden, heads * head)},
    }
    if arch != "llama":
        shapes |= {"blk.0.attn_q_norm": (head,), "blk.0.attn_k_norm": (head,)}
    if arch == "qwen3moe":
        shapes |= {"blk.0.ffn_gate_inp": (experts, hidden), "blk.0.ffn_down_exps": (experts, hidden, 32)}
        shapes |= {f"blk.0.ffn_{part}_exps": (experts, 32, hidden) for part in ("gate", "up")}
    else:
        shapes |= {f"blk.0.ffn_{part}": (ffn, hidden) for part in ("gate", "up")} | {"blk.0.ffn_down": (hidden, ffn)}
    for name, shape in shapes.items():
        values = random.standard_normal(shape, dtype=numpy.float32)
        kind = gguf.GGMLQuantizationType.Q8_0 if len(shape) > 1 else gguf.GGMLQuantizationType.F32
        if name != leaves_out:
            writer.add_tensor(f"{name}.weight", gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("arch", ["llama", "qwen3", "qwen3moe"])
def test_a_gguf_file_becomes_what_transformers_reads_of_it_as_a_whole(tmp_path, arch):
    import transformers as hf

    write_gguf(tmp_path / "m.gguf", arch)
    # Two shards: nothing is held beyond a tensor.
    count = convert_gguf_to_hf.convert(tmp_path / "m.gguf", tmp_path / "hf", shard_bytes=60_000)
    found = tensors_of(tmp_path / "hf")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    # Its config alone lacks the width of qwen3's heads, and of experts.
    config = hf.AutoConfig.from_pretrained(tmp_path / "hf")
    whole = hf.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", config=config, dtype=torch.float32)
    read = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert read.state_dict().keys() == whole.state_dict().keys()
    assert all(torch.equal(tensor, whole.state_dict()[name]) for name, tensor in read.state_dict().items())
    assert count == sum(tensor.numel() for tensor in found.values()) == sum(p.numel() for p in whole.parameters())
    assert hf.AutoTokenizer.from_pretrained(tmp_path / "hf").eos_token == "<|im_end|>"
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["architectures"] == [type(whole).__name__]


def test_a_gguf_file_without_a_tensor_or_of_another_family_is_refused_before_anything_is_written(tmp_path):
    write_gguf(tmp_path / "cut.gguf", "qwen3")
    for keep in (0.9, 0.1):
        whole = (tmp_path / "cut.gguf").read_bytes()
        (tmp_path / "cut.gguf").write_bytes(whole[: int(keep * len(whole))])
        with pytest.raises(UsageError, match=r"cut.gguf is cut off, or no GGUF file"):
            convert_gguf_to_hf.convert(tmp_path / "cut.gguf", tmp_path / "hf")
    write_gguf(tmp_path / "m.gguf", "qwen3", leaves_out="blk.0.attn_v")
    with pytest.raises(UsageError, match="lacks model.layers.0.self_attn.v_proj.weight"):
        convert_gguf_to_hf.convert(tmp_path / "m.gguf", tmp_path / "hf")
    write_gguf(tmp_path / "g.gguf", "gemma2")
    with pytest.raises(UsageError, match="model_type 'gemma2' is not converted; known are llama, "):
        convert_gguf_to_hf.convert(tmp_path / "g.gguf", tmp_path / "hf")
    write_gguf(tmp_path / "n.gguf", "nothing_known")
    with pytest.raises(UsageError, match=r"cannot read its config \(.*nothing_known.*\); known are llama, "):
        convert_gguf_to_hf.convert(tmp_path / "n.gguf", tmp_path / "hf")
    write_gguf(tmp_path / "t.gguf", "qwen3", has_tokens=False)
    with pytest.raises(UsageError, match="cannot read its tokenizer"):
        convert_gguf_to_hf.convert(tmp_path / "t.gguf", tmp_path / "hf")
    assert not (tmp_path / "hf").exists() and not (tmp_path / "hf.partial").exists()


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), Exception("No space left on device (os error 28)")]
)
def test_a_full_disk_under_the_tokenizer_is_said_in_one_line(tmp_path, monkeypatch, capsys, error):
    """The second is what the tokenizers package raises."""
    import transformers as hf

    def save(*_: object, **__: object) -> None:
        raise error

    write_gguf(tmp_path / "m.gguf", "qwen3")
    monkeypatch.setattr(hf.PreTrainedTokenizerBase, "save_pretrained", save)
    assert convert_gguf_to_hf.main(["--gguf", f"{tmp_path}/m.gguf", "--output", f"{tmp_path}/hf"]) == 2
    assert "is full; make room" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["m.gguf"]
