"""What changed between two versions of weights on a GPU: found there, and the same delta as of weights on the host."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slime.backends.megatron_utils.update_weight.from_disk import DeltaWriter, WholeWriter
from slime.backends.sglang_utils.bucket_load import ElementCopies
from slime.weights.delta import ENCODINGS, bytes_of, decode, encode
from slime.weights.names import files_of

pytestmark = pytest.mark.gpu


def versions() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """bf16 of several pieces, of one and of an odd number of bytes; 1% of the elements change."""
    generator = torch.Generator("cuda").manual_seed(0)
    old = {
        "large": torch.randn(3 * 2**24 + 7, generator=generator, device="cuda").bfloat16(),
        "small": torch.randn(5, 3, generator=generator, device="cuda").to(torch.float8_e4m3fn),
        "same": torch.ones(4, device="cuda"),
    }
    new = {name: tensor.clone() for name, tensor in old.items()}
    for name in ("large", "small"):
        bits = new[name].view(torch.uint8)
        bits ^= (torch.rand(bits.shape, generator=generator, device="cuda") < 0.01).byte()
    new["small"].view(torch.uint8).view(-1)[-1] ^= 1
    return old, new


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_delta_of_weights_on_a_gpu_gives_the_new_version(tmp_path: Path, encoding: str) -> None:
    from safetensors.torch import load_file

    old, new = versions()
    held: dict[str, torch.Tensor] = {}
    metadata = {"delta_encoding": encoding, "checksum_format": "xxh3-128"}
    how = {"shard_bytes": 2**29, "index_metadata": metadata, "has_manifest": True}
    whole = WholeWriter(held, tmp_path / "v1", None, **how)
    whole.add(old.items())
    whole.finish()
    writer = DeltaWriter(held, tmp_path / "v2", None, **how)
    writer.add(new.items())
    writer.finish()
    (file,) = files_of(tmp_path / "v2")
    deltas = load_file(file)
    assert deltas.keys() == {"large", "small"}
    for name, delta in deltas.items():
        itemsize = new[name].element_size()
        expected, changed = encode(bytes_of(old[name]), bytes_of(new[name]), itemsize=itemsize, encoding=encoding)
        assert changed > 0
        given = {"itemsize": itemsize, "encoding": encoding}
        assert decode(bytes_of(old[name]), delta.numpy().tobytes(), **given).tobytes() == bytes_of(new[name]).tobytes()
        assert decode(bytes_of(old[name]), expected, **given).tobytes() == bytes_of(new[name]).tobytes()
    assert all(held[name].numpy().tobytes() == bytes_of(tensor).tobytes() for name, tensor in new.items())


def test_elements_are_changed_on_a_gpu_as_a_whole_load_changes_them() -> None:
    model = torch.nn.ParameterDict({"fused": torch.zeros(6, 4, device="cuda")}).requires_grad_(False)
    tensors = {name: torch.randn(3, 8) for name in ("a", "b")}

    def load() -> None:
        model["fused"].data[:3].copy_(tensors["a"][:, 4:])
        model["fused"].data[3:].copy_(tensors["b"][:, :4])

    elements = ElementCopies(model)
    elements.load(tensors, load, "one")
    assert elements.knows(["a", "b"], "one")
    for name, tensor in tensors.items():
        where = torch.randperm(24)[:12]
        tensor.view(-1)[where] = torch.randn(12)
        elements.change(name, where.cuda(), tensor.view(-1)[where].view(torch.int32).cuda())
    assert torch.equal(model["fused"].cpu(), torch.cat([tensors["a"][:, 4:], tensors["b"][:, :4]]))
