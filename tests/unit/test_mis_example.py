"""The MIS example as a user meets it: the YAML file on the command line, the script, the summary."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from examples.train_infer_mismatch_helper import mis, summarize
from slime.config.problems import Problems
from tests.unit.argument_lines import Check, check, command_line, has

__all__ = ["check", "command_line"]  # fixtures

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/train_infer_mismatch_helper"


def test_the_file_sets_flags_and_settings(check: Check):
    checked = check(f"--custom-config-path {EXAMPLE}/mis.yaml")
    assert checked.problems == Problems()
    args = checked.args
    assert (args.use_tis, args.recompute_old_log_probs) == (True, True)
    assert args.custom_tis_function_path == f"{mis.__name__}.compute_mis"
    assert args.rollout_data_postprocess_path == f"{mis.__name__}.measure_batch"
    settings = mis.Settings.of(args)
    assert settings.bounds() == settings.bounds(of_rejection=True) == (0.5, 2.0)
    assert (settings.tis_level, settings.rs_level, settings.rs_veto_threshold) == ("token", "geometric", 1e-4)
    assert settings.tis_batch_normalize and settings.use_rs


def test_every_setting_is_in_the_file_and_in_the_readme():
    readme, file = (EXAMPLE / "README.md").read_text(), (EXAMPLE / "mis.yaml").read_text()
    for name in vars(mis.Settings()):
        assert f"\n{name}: " in file and f"`{name}`" in readme, name


def test_the_settings_without_a_correction_are_refused(check: Check):
    Path("mis.yaml").write_text((EXAMPLE / "mis.yaml").read_text().replace("use_tis: true", "use_tis: false"))
    problems = check("--custom-config-path mis.yaml").problems
    has(problems.wrong, "--custom-tis-function-path")


def test_the_script_starts_from_what_it_is_told_to():
    subprocess.run(["bash", "-n", str(EXAMPLE / "run-mis.sh")], check=True)


def test_the_summary_shows_what_was_logged(tmp_path: Path):
    lines = [{"train/step": step, "train/mis_ratio": ratio} for step, ratio in enumerate((1.0, 1.5, 1.25))]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line | {"step_key": "train/step"}) + "\n" for line in lines))
    assert summarize.table(path)[2:] == ["| train/mis_ratio | 1 | 1.25 | 1 | 1.5 |"]


@pytest.mark.parametrize(
    ("right", "wrong", "sentence"),
    [
        ("tis_level: token", "tis_level: tokens", "tis_level 'tokens' is none of token, sequence, geometric."),
        ("tis_mode: truncate", "tis_mod: clip", "tis_mod is no setting of MIS; it has rs_level, rs_lower_bound, "),
        ("recompute_old_log_probs: true", "", "tis_batch_normalize needs --recompute-old-log-probs: the mean"),
        ("rollout_data_postprocess_path:", "x:", "tis_batch_normalize needs --rollout-data-postprocess-path ex"),
    ],
)
def test_a_wrong_setting_is_found_before_anything_starts(check: Check, right: str, wrong: str, sentence: str):
    text = (EXAMPLE / "mis.yaml").read_text()
    assert text.count(right) == 1
    Path("mis.yaml").write_text(text.replace(right, wrong))
    has(check("--custom-config-path mis.yaml").problems.wrong, f"--custom-config-path: {sentence}")
