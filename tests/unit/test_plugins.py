"""Tables of named rows: those of installed packages, when they are imported, and what is wrong with them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from slime import plugins
from slime.algorithms.advantages import Advantages
from slime.algorithms.estimators import ESTIMATORS, Estimator
from slime.models.families import FAMILIES, family_of
from slime.plugins import TRACKERS, Table
from slime.rollout.rm_hub import RM_TYPES, async_rm
from slime.utils.errors import UsageError
from slime.utils.misc import load_function
from slime.weights.transports import TRANSPORTS, transport_of
from tests.contracts.plugin_package import install, install_example

TABLES = (ESTIMATORS, RM_TYPES, FAMILIES, TRANSPORTS, TRACKERS)


@pytest.fixture(autouse=True)
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A folder of installed packages; what tests load from it is forgotten."""
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    for table in TABLES:
        monkeypatch.setattr(table, "_rows", {})
    caches = (plugins.installed, load_function)
    for cache in caches:
        cache.cache_clear()
    yield tmp_path / "site"
    for cache in caches:
        cache.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] in ("slime_more", "broken_rows")]:
        del sys.modules[name]


def test_each_table_has_the_row_of_the_package_and_names_are_read_without_importing_it(site: Path):
    install_example(site)
    added = [set(table) - set(table.own) for table in TABLES]
    assert added == [{"median"}, {"digits"}, {"mistral"}, {"noted_files"}, {"csv"}]
    assert "median" in ESTIMATORS and "mean" not in ESTIMATORS and len(ESTIMATORS) == len(ESTIMATORS.own) + 1
    assert not any(name.startswith("slime_more") for name in sys.modules)
    assert ESTIMATORS["median"].baseline == "slime_more.estimators:group_median"
    assert "slime_more.rewards" not in sys.modules, "only the row that was asked for"
    assert FAMILIES["mistral"] is family_of("Mistral-7B-v0.3") is FAMILIES.get("mistral")
    assert transport_of("noted_files", "full", colocated=True).updater == "slime_more.updater:NotedFiles"
    assert transport_of("noted_files", "delta").sends_changes, "refused by a rule: it has no such way"


async def reward_of(name: str) -> object:
    from types import SimpleNamespace

    from slime.utils.types import Sample

    sample = Sample(response="1a<|im_end|>", metadata={"rm_type": name})
    return await async_rm(SimpleNamespace(custom_rm_path=None, rm_type=None), sample)


def test_a_reward_gets_the_response_without_the_stop_token(site: Path):
    import asyncio

    install_example(site)
    assert asyncio.run(reward_of("digits")) == 0.5


def test_returns_and_losses_may_be_functions_of_the_package(site: Path):
    import torch

    site.mkdir()
    (site / "broken_rows.py").write_text(
        "def half(rewards, kl, masks, coef, gamma):\n    return [0.5 * k for k in kl]\n"
    )
    row = Estimator("half the KL", returns="broken_rows:half")
    assert row.takes_kl and row.discounts and not row.needs_critic
    mask = torch.ones(3)
    data = {"loss_masks": [mask], "rewards": [1.0], "log_probs": [3 * mask], "ref_log_probs": [mask]}
    Advantages(row)(data, None)
    assert data["advantages"][0].tolist() == [1.0] * 3


def test_without_packages_there_is_nothing_but_slimes_own():
    assert all(list(table) == list(table.own) for table in TABLES)
    with pytest.raises(KeyError):
        ESTIMATORS["median"]


@pytest.mark.parametrize(
    ("rows", "source", "sentence"),
    [
        (
            {"x": "broken_rows:X"},
            None,
            r"slime.estimators: x of package more: cannot load 'broken_rows:X': no module 'broken_rows'",
        ),
        ({"x": "broken_rows:Y"}, "X = 1", r"of package more: cannot load .*no attribute 'Y'"),
        ({"x": "broken_rows:X"}, "1 / 0", r"of package more broken_rows:X: loading it raised ZeroDivisionError"),
        ({"x": "broken_rows:X"}, "import no_such_package", r"imports 'no_such_package', which is not installed"),
        ({"x": "broken_rows:X"}, "X = 1", r"x of package more: broken_rows:X is of type int, not Estimator"),
        (
            {"x": "broken_rows:X"},
            "from slime.algorithms.estimators import Estimator\nX = Estimator('', returns='twice')",
            r"Estimator.returns is 'twice', not one of broadcast, discounted, minus_kl, gae or the path of a function",
        ),
        (
            {"x": "broken_rows:X"},
            "from slime.algorithms.estimators import Estimator\nX = Estimator('', returns='nowhere:f')",
            r"broken_rows:X has a returns that cannot be used: cannot load 'nowhere:f'",
        ),
        ({"grpo": "broken_rows:X"}, "X = 1", r"grpo is the name of 2 rows, of slime and more"),
    ],
)
def test_what_is_wrong_with_a_row_is_one_sentence(site: Path, rows, source: str | None, sentence: str):
    install(site, "more", {"slime.estimators": rows})
    if source is not None:
        (site / "broken_rows.py").write_text(source)
    [name] = rows
    with pytest.raises(UsageError, match=sentence):
        ESTIMATORS[name]
    assert len(ESTIMATORS.problems(name)) == 1 and ESTIMATORS.problems("rloo") == []


def test_two_packages_may_not_have_one_name(site: Path):
    for package in ("one", "two"):
        install(site, package, {"slime.rewards": {"x": "broken_rows:X"}})
    with pytest.raises(UsageError, match="x is the name of 2 rows, of (one and two|two and one)"):
        RM_TYPES["x"]


def test_rewards_and_families_are_checked_for_what_they_are_called_with_and_as(site: Path):
    groups = {"slime.rewards": {"x": "broken_rows:two"}, "slime.families": {"x": "slime.models.family:LLAMA"}}
    install(site, "more", groups)
    (site / "broken_rows.py").write_text("def two(args, sample):\n    return 1.0\n")
    with pytest.raises(UsageError, match=r"two is called with \(args, response, sample\): too many positional"):
        RM_TYPES["x"]
    with pytest.raises(UsageError, match="LLAMA has the model_type 'llama', which must be its name"):
        FAMILIES["x"]


def test_the_class_of_a_transport_and_the_name_of_a_tracker_are_checked(site: Path):
    groups = {"slime.transports": {"x": "broken_rows:WAY"}, "slime.trackers": {"wandb": "broken_rows:sink"}}
    install(site, "more", groups)
    (site / "broken_rows.py").write_text(
        "from slime.weights.transports import WeightTransport\n\n"
        "WAY = WeightTransport('nowhere:Updater')\n\n\ndef sink(args):\n    return None\n"
    )
    with pytest.raises(UsageError, match="WAY has an updater that cannot be used: cannot load 'nowhere:Updater'"):
        TRANSPORTS["x"]
    with pytest.raises(UsageError, match="sink has the name of a tracker of slime; name it otherwise"):
        TRACKERS["wandb"]


def test_a_table_is_of_one_kind():
    table = Table("slime.nothing", int, {"one": 1})
    assert dict(table) == {"one": 1}
