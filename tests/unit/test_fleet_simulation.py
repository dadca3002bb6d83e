"""The fake fleet of benchmarks/fleet_simulation.py answers as engines do, to the code that asks engines."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator

import pytest

from benchmarks import fleet_simulation as fleet
from slime.utils.train_data import flatten_columns

NOTHING = "http://127.0.0.1:1"


@pytest.fixture(scope="module")
def urls() -> Iterator[list[str]]:
    with fleet.running(4) as found:
        yield found


def test_a_look_loses_no_fake_engine_and_finds_one_that_is_not_there(urls: list[str]) -> None:
    assert fleet.health(urls, Namespace())["engines_called_lost"] == 0
    assert fleet.health([*urls, NOTHING], Namespace())["engines_called_lost"] == 1


def test_loads_and_the_calls_of_a_sync_are_answered(urls: list[str]) -> None:
    assert fleet.loads(urls, Namespace())["seconds"] > 0
    assert fleet.sync(urls, Namespace()).keys() == {"first_seconds", "first_cpu_s", "seconds", "cpu_s"}


def test_bytes_of_the_object_store_are_those_of_the_columns() -> None:
    data = fleet.train_data(3)
    lengths = [len(tokens) for tokens in data["tokens"]]
    assert [n - fleet.PROMPT for n in lengths] == data["response_lengths"]
    flat = flatten_columns({"tokens": data["tokens"]})["tokens"]
    assert fleet._num_bytes(flat) == sum(lengths) * flat.values.itemsize
