"""A rank's share of a rollout on its way to the trainer, through the object store and over NIXL."""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from typing import Any

import numpy as np
import pytest
import ray
import torch

from slime.config.rules import devices
from slime.ray.rollout import shares
from slime.utils.train_data import restore_columns

pytestmark = pytest.mark.processes

SHARE = {
    "tokens": [[5, 6, 21], [5, 6]],
    "loss_masks": [[1], [0]],
    "rewards": [1.0, 0.0],
    "teacher_log_probs": [[], []],
}


def fetched(values: dict[str, Any]) -> dict[str, Any]:
    return {name: [np.asarray(v).tolist() for v in column] for name, column in restore_columns(values).items()}


@pytest.mark.parametrize("transport", ["object-store", "nixl"])
def test_a_share_arrives_as_it_was_sent(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = {}

    def put(values: Any, **options: Any) -> str:
        sent.update(values=values, options=options)
        return "ref"

    monkeypatch.setattr(shares.ray, "put", put)
    assert shares.put_share(SHARE, transport).inner == "ref"
    is_nixl = transport == "nixl"
    assert sent["options"] == ({"_tensor_transport": "nixl"} if is_nixl else {})
    assert isinstance(sent["values"]["tokens"].values, torch.Tensor if is_nixl else np.ndarray)
    assert isinstance(sent["values"]["teacher_log_probs"].values, np.ndarray), "nothing to read: no tensor"
    assert fetched(sent["values"]) == SHARE


@pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed")
def test_nixl_carries_a_share_between_two_actors() -> None:
    class Sender:
        def send(self) -> list[Any]:
            return [shares.put_share(SHARE, "nixl")]

    class Receiver:
        def receive(self, boxes: list[Any]) -> Any:
            return fetched(ray.get(boxes[0].inner, timeout=60))

    ray.init(address="local", num_cpus=2, include_dashboard=False)
    try:
        sender, receiver = ray.remote(Sender).remote(), ray.remote(Receiver).remote()
        assert ray.get(receiver.receive.remote(ray.get(sender.send.remote()))) == SHARE
    finally:
        ray.shutdown()


def test_nixl_is_refused_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    args = Namespace(rollout_data_transport="nixl")
    for spec, refused in ((object(), False), (None, True)):
        monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name, spec=spec: spec)
        sentences = list(devices.MISSING_TRANSPORT(args))
        assert ["--rollout-data-transport nixl needs the package nixl" in s for s in sentences] == [True] * refused
