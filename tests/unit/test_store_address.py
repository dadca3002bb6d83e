"""Where the store listens that the ranks of a process group meet at."""

from __future__ import annotations

import importlib
import socket
import subprocess
import sys

import pytest

from slime.backends.sglang_utils import engine_patches

SCRIPT = """
import sys
import psutil, torch.distributed as dist
from slime.backends.sglang_utils import engine_patches
engine_patches.serve_store_at_its_address()
for _ in range(2):  # a port is free again once its group has ended
    dist.init_process_group("gloo", init_method=sys.argv[1], rank=0, world_size=1)
    listening = [one.laddr for one in psutil.Process().net_connections("tcp") if one.status == "LISTEN"]
    print(*{address.ip for address in listening if address.port == int(sys.argv[1].rpartition(":")[2])})
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_the_store_of_an_engines_ranks_listens_at_its_address_alone(address: str) -> None:
    with socket.create_server((address, 0)) as server:
        port = server.getsockname()[1]
    command = [sys.executable, "-c", SCRIPT, f"tcp://{address}:{port}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["127.0.0.1", "127.0.0.1"], done.stderr


def test_an_address_of_no_interface_and_a_client_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """192.0.2.0/24 is for documentation: no interface has it. The stand-in shows what torch would be asked for."""
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    monkeypatch.setattr(rendezvous, "TCPStore", lambda host, port, **options: (host, port, options))
    engine_patches.serve_store_at_its_address()
    server = rendezvous.TCPStore("192.0.2.77", 1, is_master=True, multi_tenant=True)
    assert server == ("192.0.2.77", 1, {"is_master": True, "multi_tenant": True})
    assert rendezvous.TCPStore("127.0.0.1", 1, is_master=False) == ("127.0.0.1", 1, {"is_master": False})
