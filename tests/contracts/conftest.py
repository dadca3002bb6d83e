"""Fixtures of the hook contracts: the scripted world, and the user's package on the Python path."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

# A file is named relative to the working directory, which fixture `user_path` sets.
PATH_FORMS = {
    "dot": "user_package.{module}.{attribute}",
    "colon": "user_package.{module}:{attribute}",
    "file": "user_package/{module}.py:{attribute}",
}


@pytest.fixture
def user_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's package can be imported, and the working directory is the one it lies in."""
    from slime.utils.misc import load_function

    here = Path(__file__).parent
    monkeypatch.syspath_prepend(str(here))
    monkeypatch.chdir(here)
    load_function.cache_clear()
    yield here
    load_function.cache_clear()
    for name in [name for name in sys.modules if name.split(".")[0] == "user_package"]:
        del sys.modules[name]
    for name in [name for name in sys.modules if name.startswith("slime_hook_")]:
        del sys.modules[name]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, user_path: Path) -> Iterator[object]:
    """`rollout_world.World` with an engine that runs for this test."""
    from slime.observability import logging_utils
    from slime.ray.rollout import manager as manager_module
    from slime.rollout import data_source
    from slime.rollout.eval import EvalDatasets
    from slime.rollout.sampling import generation
    from tests.contracts.rollout_world import TextTokenizer, World
    from tests.unit.rollout_fakes import FakeEngine

    for owner in (generation.GenerateState, EvalDatasets):
        owner.clear_instances()
    for module in (generation, data_source):
        monkeypatch.setattr(module, "load_tokenizer", lambda name, **kw: TextTokenizer())
    monkeypatch.setattr(manager_module.ray, "put", lambda value: value)
    logging_utils.init_tracking(SimpleNamespace(), primary=False)
    logging_utils.take_pending()
    with FakeEngine().serve() as engine:
        yield World(engine, tmp_path)
    for owner in (generation.GenerateState, EvalDatasets):
        owner.clear_instances()


@pytest.fixture(params=PATH_FORMS)
def path(request: pytest.FixtureRequest, user_path: Path) -> Callable[[str], str]:
    """name of a function of user_package.hooks -> its path, in one of the three forms."""
    return lambda name: PATH_FORMS[request.param].format(module="hooks", attribute=name)


@pytest.fixture
def calls(user_path: Path):
    """The calls so far; `calls.of(name)` are those of one hook."""
    import user_package.calls as recorder

    recorder.CALLS.clear()
    return recorder
