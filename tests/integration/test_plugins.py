"""What is refused and planned with packages that add rows (examples/plugin_package); test_own_driver has a run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.contracts.plugin_package import install, install_example
from tests.integration.launch import ROOT, grpo_flags, make_model, train, write_prompts

pytestmark = pytest.mark.timeout(600)


def test_a_plan_shows_the_transport_and_a_broken_package_is_one_sentence(tmp_path: Path):
    site = install_example(tmp_path / "site")
    install(site, "broken", {"slime.trackers": {"bad": "no_such_module:Tracker"}})
    path = os.pathsep.join([str(ROOT), str(site)])
    flags = grpo_flags(make_model(tmp_path / "model"), write_prompts(tmp_path / "prompts.jsonl"))
    place = flags.index("--custom-rm-path")
    line = [*flags[:place], *flags[place + 2 :], "--rm-type", "digits", "--colocate", "--num-rollout", 1, "--dry-run"]
    line += ["--update-weight-transport", "noted_files", "--update-weight-disk-dir", tmp_path / "weights"]
    planned = train(tmp_path / "out", *line, check=False, PYTHONPATH=path)
    assert planned.status == 0 and "files, each version noted" in planned.printed, planned.printed
    refused = train(tmp_path / "out", *line, "--tracker", "bad", check=False, PYTHONPATH=path)
    assert refused.status == 2
    assert "slime.trackers: bad of package broken: cannot load 'no_such_module:Tracker'" in refused.printed
