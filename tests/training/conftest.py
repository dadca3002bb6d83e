"""The model that the tests of training begin with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.megatron_fakes import make_hf_model


@pytest.fixture(scope="module")
def hf_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny HF model, whose output layer is not its embedding."""
    path = tmp_path_factory.mktemp("hf")
    make_hf_model(path)
    return path
