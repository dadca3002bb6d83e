"""The stand-ins are idempotent, let sglang import, and hash as the definition of MurmurHash3 says."""

from __future__ import annotations

import struct
import subprocess
import sys

import pytest
import torch

from slime.backends.sglang_utils import cpu_standins

needs_cpu_only = pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is installed on a machine with CUDA")


def reference_murmur3(data: bytes) -> int:
    """MurmurHash3_x86_32 with seed 0, for whole blocks of four bytes, in plain integers."""
    state = 0
    for (block,) in struct.iter_unpack("<I", data):
        block = block * 0xCC9E2D51 % 2**32
        block = (block << 15 | block >> 17) % 2**32 * 0x1B873593 % 2**32
        state ^= block
        state = ((state << 13 | state >> 19) % 2**32 * 5 + 0xE6546B64) % 2**32
    state ^= len(data)
    state = (state ^ state >> 16) * 0x85EBCA6B % 2**32
    state = (state ^ state >> 13) * 0xC2B2AE35 % 2**32
    return state ^ state >> 16


def test_the_hash_is_murmur3_of_seed_position_and_column() -> None:
    seeds, positions, columns = [0, 42, 2**31 - 1, 2**40 + 7], [0, 3, 8191, 5], [0, 1, 151935]
    hashed = cpu_standins.murmur_hash32(torch.tensor(seeds), torch.tensor(positions), torch.tensor(columns))
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        for column_index, column in enumerate(columns):
            assert hashed[row, column_index] == reference_murmur3(struct.pack("<QII", seed, position, column))


def test_the_hash_takes_the_unsigned_seeds_sglang_passes() -> None:
    seeds, positions, columns = torch.tensor([7, 8]), torch.tensor([1, 2]), torch.arange(5)
    signed = cpu_standins.murmur_hash32(seeds, positions, columns)
    assert torch.equal(cpu_standins.murmur_hash32(seeds.to(torch.uint64), positions, columns), signed)


@pytest.mark.processes
@needs_cpu_only
def test_sglang_imports_after_install_and_a_second_install_changes_nothing() -> None:
    code = (
        "import sys\n"
        "from slime.backends.sglang_utils import cpu_standins\n"
        "cpu_standins.install_deterministic()\n"
        "before = {name: id(sys.modules[name]) for name in ('triton', 'torchvision', 'sgl_kernel')}\n"
        "cpu_standins.install_deterministic()\n"
        "assert before == {name: id(sys.modules[name]) for name in before}\n"
        "from sglang.srt import server_args\n"
        "assert server_args.DETERMINISTIC_ATTENTION_BACKEND_CHOICES.count('torch_native') == 1\n"
        "from sglang.srt.layers import sampler\n"
        "assert sampler.murmur_hash32 is cpu_standins.murmur_hash32\n"
        "import sgl_kernel\n"
        "try:\n"
        "    sgl_kernel.top_k_renorm_prob()\n"
        "except NotImplementedError as error:\n"
        "    print(error)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert "sgl_kernel.top_k_renorm_prob has no CPU stand-in" in ran.stdout


def test_a_shared_expert_is_added_by_its_gate():
    hidden, shared, total = (torch.randn(5, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))
    gate = torch.randn(8, generator=torch.Generator().manual_seed(3))
    expected = torch.stack([t + torch.sigmoid(gate.dot(h)) * s for h, s, t in zip(hidden, shared, total, strict=True)])
    cpu_standins.add_gated(hidden, gate, shared, total)
    torch.testing.assert_close(total, expected)
