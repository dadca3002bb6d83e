"""A block of ports belongs to one holder, while its server can listen in it."""

from __future__ import annotations

import socket
import threading

import pytest

from slime.ray.rollout import router

HOST = "127.0.0.1"


def test_two_reservations_never_share_a_block() -> None:
    # Held at the same time by many threads, as engines of one node start at the same time.
    blocks: list[router.PortBlock] = []
    threads = [threading.Thread(target=lambda: blocks.append(router.reserve_block(HOST))) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({block.first for block in blocks}) == 20
    for block in blocks:
        block.release()


def test_a_server_listens_on_a_reserved_port_and_a_second_server_does_not() -> None:
    block = router.reserve_block(HOST)
    with socket.create_server((HOST, block[0])):  # with SO_REUSEADDR, as every asyncio server has
        assert not router.is_free(HOST, block[0])
        with pytest.raises(OSError, match="in use"):
            socket.create_server((HOST, block[0]))
    block.release()
    assert router.is_free(HOST, block[0])


def test_a_block_whose_needed_port_is_taken_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    # Two blocks in all, which nothing else of this machine listens in (an engine of another test may).
    first = next(
        first
        for first in range(router.FIRST_PORT, router.LAST_PORT - 2 * router.BLOCK, router.BLOCK)
        if all(router.is_free(HOST, first + offset) for offset in (0, 1, router.BLOCK, router.BLOCK + 1))
    )
    firsts = (first, first + router.BLOCK)
    monkeypatch.setattr(router, "FIRST_PORT", first)
    monkeypatch.setattr(router, "LAST_PORT", first + 3 * router.BLOCK)
    with socket.create_server((HOST, firsts[0] + 1)):
        for _ in range(8):  # the search starts at random
            block = router.reserve_block(HOST, needed=(0, 1))
            assert block.first == firsts[1]
            block.release()
        with pytest.raises(RuntimeError, match="no block of 64 free ports"):
            router.reserve_block(HOST, needed=(0, 1), avoid=[firsts[1]])


def test_ports_lie_below_those_the_kernel_gives_to_outgoing_connections() -> None:
    block = router.reserve_block(HOST)
    assert router.FIRST_PORT <= block[0] < block[router.BLOCK - 1] < 32768
    block.release()
