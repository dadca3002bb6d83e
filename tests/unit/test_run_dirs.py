"""Two runs are never mixed in a directory: the second goes on with the first, moves it aside, or is refused."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from slime.config.parse import Checked
from slime.config.problems import Problems
from slime.config.rules.run_dirs import claim_run_dirs, line_to_go_on, move_earlier_runs
from slime.processes import sweeper
from slime.processes.directories import EarlierRun, earlier_run, is_claimed
from slime.utils.errors import UsageError
from tests.unit.argument_lines import Check, base, check, command_line, has

__all__ = ["base", "check", "command_line"]
BEGUN = time.mktime((2026, 1, 2, 3, 4, 0, 0, 0, -1))


def leave_run(directory: str, *, records: int = 0, iterations: tuple[int, ...] = ()) -> Path:
    """What a run leaves that has recorded so many rollouts, a minute each, and saved these iterations."""
    root = Path(directory)
    root.mkdir(parents=True, exist_ok=True)
    lines = [{"step_key": "rollout/step", "time": BEGUN + 60 * i, "rollout/step": i} for i in range(records)]
    (root / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for iteration in iterations:
        (root / f"iter_{iteration:07d}").mkdir()
        (root / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return root


def leave_release(directory: str) -> Path:
    """What a converter leaves."""
    root = Path(directory)
    (root / "release").mkdir(parents=True)
    (root / "latest_checkpointed_iteration.txt").write_text("release")
    return root


@pytest.fixture(autouse=True)
def _no_other_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeper.tempfile, "gettempdir", lambda: str(tmp_path))


def test_the_same_command_again_is_refused_and_names_the_run_and_the_remedies(check: Check) -> None:
    leave_run("out", records=12, iterations=(3, 7, 11))
    (sentence,) = check("--save out").problems.environment
    assert sentence == (
        "--save out holds another run (begun at 2026-01-02 03:04, last rollout 11 at 2026-01-02 03:15, "
        "checkpoints 3 to 11): --resume auto goes on after rollout 11; --load out does the same; --fresh-output moves "
        f"it to {Path.cwd() / 'out.1'} and begins anew."
    )
    assert check("--save out --load hf").problems.environment == [sentence], "another checkpoint is not gone on with"
    assert check("--save out --resume never").problems.environment == [sentence]
    assert check("--save elsewhere").problems == Problems()


@pytest.mark.parametrize("way", ["--resume auto", "--load out", "--load ./out/", "--load out --resume never"])
def test_a_run_that_says_so_goes_on_where_another_was(check: Check, way: str) -> None:
    leave_run("out", records=12, iterations=(3, 11))
    assert check(f"--save out {way}").problems == Problems()
    leave_run("curves", records=2)
    assert check(f"--save out --output-dir curves {way}").problems == Problems()


def test_a_run_that_goes_on_from_anothers_checkpoint_has_its_own_directory(check: Check) -> None:
    leave_run("other", records=12, iterations=(11,))
    assert check("--load other --save branch").problems == Problems()
    leave_run("branch", records=1)
    has(check("--load other --save branch").problems.environment, "--save branch holds another run")
    assert check("--load other --output-dir other --save new").problems == Problems(), "metrics go on"


def test_a_run_that_was_killed_before_its_first_checkpoint_is_not_repeated_unasked(check: Check) -> None:
    leave_run("out", records=2)
    (sentence,) = check("--save out").problems.environment
    has(
        [sentence],
        "last rollout 1 at 2026-01-02 03:05): --resume auto begins again, for --save out holds no checkpoint;",
    )
    for way in ("--resume auto", "--load out"):
        checked = check(f"--save out {way}")
        assert checked.problems == Problems()
        has(checked.warnings(), "this one begins at rollout 0: rollouts that are done again get a second record in")
    leave_run("out", records=2, iterations=(1,))
    assert not any("second record" in sentence for sentence in check("--save out --load out").warnings())
    has(check("--save out --load out --resume never").warnings(), "and their checkpoints are replaced")


def test_what_is_no_run_is_in_nobodys_way(check: Check) -> None:
    leave_release("converted")
    assert check("--save converted --load converted").problems == Problems()
    assert check("--save converted --ref-load converted --fresh-output").problems == Problems()
    assert check("--save absent --load absent").problems == Problems()
    leave_run("failed")
    assert check("--save failed").problems == Problems(), "it ended before its first record"
    leave_run("converted", iterations=(1,))
    has(check("--save converted").problems.environment, "--save converted holds another run (checkpoint 1)")


def test_an_output_directory_without_checkpoints_is_a_run_too(check: Check) -> None:
    leave_run("out", records=2)
    (sentence,) = check("--output-dir out").problems.environment
    assert "--output-dir out holds another run" in sentence and "--resume" not in sentence, "there is no --save"
    has([sentence], "out.1 and begins anew; another --output-dir leaves it alone.")
    assert len(check("--save new --output-dir out").problems.environment) == 1


def test_the_critics_own_directory_is_looked_at(check: Check) -> None:
    leave_run("value", iterations=(4,))
    Path("two.yaml").write_text("megatron:\n  - {name: c, role: critic, overrides: {save: value}}\n")
    ppo = "--advantage-estimator ppo --megatron-config-path two.yaml --save new"
    has(check(ppo).problems.environment, "the critic's --save value holds another run (checkpoint 4)")
    assert check(f"{ppo} --resume auto").problems == Problems()


def test_a_fresh_output_moves_the_earlier_runs_aside_and_begins_anew(check: Check) -> None:
    leave_run("out", records=2, iterations=(1,))
    leave_run("curves", records=3)
    Path("link").symlink_to("out")
    for number in (1, 2):
        checked = check("--save link --output-dir curves --fresh-output --save-hf out/hf")
        assert checked.problems == Problems()
        has(checked.warnings(), f"which is moved to {Path.cwd() / f'out.{number}'}.")
        has(checked.warnings(), f"which is moved to {Path.cwd() / f'curves.{number}'}.")
        assert Path("out/iter_0000001").is_dir(), "a check moves nothing"
        move_earlier_runs(checked.args)
        assert list(Path("out").iterdir()) == list(Path("curves").iterdir()) == []
        assert Path(f"out.{number}/iter_0000001").is_dir() and Path(f"curves.{number}/metrics.jsonl").is_file()
        leave_run("out", records=2, iterations=(1,))
        leave_run("curves", records=3)
    leave_run("curves/saved", iterations=(3,))
    move_earlier_runs(check("--save curves/saved --output-dir curves --fresh-output").args)
    assert Path("curves.3/saved/iter_0000003").is_dir() and not Path("curves/saved").exists()
    move_earlier_runs(check("--save curves").args)
    assert not Path("curves.4").exists(), "not without the flag"


def test_a_fresh_output_never_moves_what_the_run_reads(check: Check) -> None:
    leave_run("out", records=2, iterations=(1,))

    def reasons(changes: str) -> list[str]:
        return check(f"--save out --fresh-output {changes}").problems.environment

    has(reasons("--load out"), "--fresh-output cannot move --save out: --load is in it; name another directory")
    has(reasons("--ref-load out"), "--ref-load is in it")
    Path("out/data.jsonl").write_text(Path("data.jsonl").read_text())
    has(reasons("--prompt-data out/data.jsonl@[0:1]"), "--prompt-data is in it")
    has(reasons("--eval-prompt-data a out/data.jsonl --eval-interval 1"), "--eval-prompt-data is in it")
    Path("out/hooks.py").write_text(Path("hooks.py").read_text())
    has(reasons("--custom-rm-path out/hooks.py:reward"), "--custom-rm-path is in it")
    Path("out/dump").mkdir()
    assert reasons("--save-debug-rollout-data out/dump/{rollout_id}.pt --dump-details out/dump") == [], (
        "it writes there"
    )
    has(reasons("--load-debug-rollout-data out/dump/{rollout_id}.pt"), "--load-debug-rollout-data is in it")
    shutil.copytree("hf", "out/hf")
    has(reasons("--hf-checkpoint out/hf"), "--hf-checkpoint is in it")
    assert reasons("--load hf") == []


def test_a_fresh_output_moves_neither_the_working_directory_nor_a_run_that_lives(check: Check) -> None:
    leave_run("out", records=2)
    leave_run(".", records=2)
    has(check("--save . --fresh-output").problems.environment, "it is the working directory, or holds it")
    _, lock = sweeper.begin_record("1234", Path.cwd() / "out")
    assert lock is not None
    has(check("--save out --fresh-output").problems.environment, "a run is still going on there")
    os.close(lock)
    assert check("--save out --fresh-output").problems == Problems()


def test_a_fresh_output_that_cannot_be_moved_is_one_error(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_run("out", records=2)
    args = check("--save out --fresh-output").args

    def refuse(*_: object) -> None:
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr("slime.config.rules.run_dirs.os.rename", refuse)
    with pytest.raises(UsageError, match=r"--fresh-output cannot move .*/out to .*/out\.1: Device or resource busy"):
        move_earlier_runs(args)


def test_a_run_either_goes_on_or_begins_anew(check: Check) -> None:
    has(check("--save out --fresh-output --resume auto").problems.environment, "--resume auto goes on: leave one of")


@pytest.mark.parametrize("flags", ["--save out", "--save out --fresh-output", "--save out --resume auto"])
def test_two_runs_never_write_to_one_directory_at_once(check: Check, flags: str) -> None:
    leave_run("out", records=2, iterations=(1,))
    first, second = (check("--save out --resume auto --output-dir curves").args for _ in range(2))
    claimed = claim_run_dirs(first)
    assert len(claimed) == 2 and Path("curves").is_dir()
    for where in (flags, "--save new --output-dir curves"):
        name = "--output-dir curves" if "new" in where else "--save out"
        assert check(where).problems.environment == [
            f"{name}: another run is writing there now; wait for its end, or name another directory."
        ]
    with pytest.raises(UsageError, match="--save out: another run is writing there now"):
        claim_run_dirs(second)  # begun in the same second, both were checked before
    for descriptor in claimed:
        os.close(descriptor)
    assert check("--save out --resume auto --output-dir curves").problems == Problems()
    assert len(claim_run_dirs(second)) == 2


def test_a_directory_that_cannot_be_written_is_one_error(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    args = check("--save out").args

    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("slime.config.rules.run_dirs.Path.mkdir", refuse)
    with pytest.raises(UsageError, match="--save out cannot be written: Read-only file system"):
        claim_run_dirs(args)


def test_a_job_that_slurm_requeues_goes_on_with_its_own_run(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm repeats the command line; each start of it would move away what the one before has saved."""
    line = "--save out --fresh-output --load hf --resume never"

    def start(job: str, restarts: str | None) -> Checked:
        monkeypatch.setenv("SLURM_JOB_ID", job)
        monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
        if restarts is not None:
            monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
        checked = check(line)
        assert checked.problems.environment == []
        if checked.args.fresh_output:
            move_earlier_runs(checked.args)
        for descriptor in claim_run_dirs(checked.args):
            os.close(descriptor)
        return checked

    leave_run("out", records=2, iterations=(1,))
    assert start("7", None).args.fresh_output and Path("out.1").is_dir(), "another job's run is moved"
    leave_run("out", records=2)
    assert start("7", "1").args.fresh_output and Path("out.2").is_dir(), "it has saved nothing"
    leave_run("out", records=4, iterations=(1, 3))
    for restarts in ("2", "4"):
        went_on = start("7", restarts)
        has(
            went_on.warnings(),
            "--fresh-output: Slurm has requeued this job, whose own run is in --save out: it goes on.",
        )
        assert (went_on.args.load, went_on.args.finetune, went_on.args.fresh_output) == ("out", False, False)
    assert start("7", "4").args.fresh_output and Path("out.3").is_dir(), "the same start of the job runs it again"
    leave_run("out", records=2, iterations=(1,))
    assert start("8", "5").args.fresh_output and Path("out.4").is_dir(), "another job"
    leave_run("out", records=2, iterations=(1,))
    Path("out/slurm_job.json").write_text('{"half a l')
    assert start("8", "6").args.fresh_output and Path("out.5").is_dir()


def test_metrics_cut_by_a_kill_are_read_as_far_as_they_go(tmp_path: Path) -> None:
    root = leave_run(str(tmp_path / "out"), records=3)
    with (root / "metrics.jsonl").open("a") as file:
        file.write('{"step_key": "train/step", "time": 9, "train/step": 3}\n{"step_key": "roll')
    found = earlier_run(root)
    assert found is not None and (found.first["rollout/step"], found.last["rollout/step"]) == (0, 2)
    (root / "metrics.jsonl").write_text('{"step_key": "eval/step", "eval/step": 0}\n')
    assert str(earlier_run(root)) == "begun, last record"
    assert earlier_run(tmp_path / "absent") is None
    assert str(EarlierRun({}, {}, (4, 5))) == "checkpoints 4 to 5"


def test_the_line_that_goes_on_keeps_how_the_run_began() -> None:
    line = ["train.py", "--save", "out"]
    on = ["--resume", "auto"]
    assert line_to_go_on([*line, "--resume", "auto", "--fresh-output"]) == [*line, *on]
    assert line_to_go_on([*line, "--resume=other"]) == [*line, "--load", "other", *on]
    weights_alone = ["--finetune", "--no-load-optim", "--no-load-rng"]
    assert line_to_go_on([*line, "--load", "x", "--resume", "never"]) == [*line, "--load", "x", *weights_alone, *on]


def test_a_name_that_is_no_path_is_claimed_by_nobody():
    assert not is_claimed("out\0put")
