"""The losses without process groups: all of the vocabulary and of the data is here."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from slime.backends.megatron_utils import loss


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    alone = SimpleNamespace(
        get_tensor_model_parallel_group=lambda: None,
        get_context_parallel_group=lambda check_initialized=True: None,
        get_data_parallel_group=lambda with_context_parallel=False: None,
    )
    monkeypatch.setattr(loss, "parallel_state", alone)
    monkeypatch.setattr(loss, "parallel_state", alone)
