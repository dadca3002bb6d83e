"""examples/coding_agent_rl/load_tasks.py: what rows of SWE-bench and task folders become, run by a shell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.coding_agent_rl import load_tasks, swe
from slime.utils.types import Sample

TEST_PATCH = """diff --git a/tests/test_a.py b/tests/test_a.py
--- a/tests/test_a.py
+++ b/tests/test_a.py
@@ -1,4 +1,4 @@
 from a import two
 
 def test_two():
-    assert two() == 1
+    assert two() == 2
diff --git a/tests/test_b.py b/tests/test_b.py
new file mode 100644
--- /dev/null
+++ b/tests/test_b.py
@@ -0,0 +1,2 @@
+def test_new():
+    pass
"""
ROW = {
    "instance_id": "psf__Requests-1",
    "repo": "psf/requests",
    "test_patch": TEST_PATCH,
    "problem_statement": "two() is 1",
    "FAIL_TO_PASS": '["tests/test_a.py::test_two"]',
    "PASS_TO_PASS": "[]",
}


def bash(command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(cwd)}
    return subprocess.run(["bash", "-c", command], cwd=cwd, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(("value", "passed"), [(2, True), (1, False)])
def test_a_row_of_swe_bench_runs_its_own_tests_whatever_the_agent_made_of_them(tmp_path, value, passed):
    (tmp_path / "tests").mkdir()
    (tmp_path / "a.py").write_text("def two():\n    return 1\n")
    (tmp_path / "tests/test_a.py").write_text("from a import two\n\ndef test_two():\n    assert two() == 1\n")
    git = "git -c user.name=a -c user.email=a@b"
    base = bash(f"git init -q . && git add -A && {git} commit -qm base && git rev-parse HEAD", tmp_path).stdout.strip()
    (tmp_path / "a.py").write_text(f"def two():\n    return {value}\n")
    (tmp_path / "tests/test_a.py").write_text("def test_two():\n    pass\n")
    metadata = load_tasks.swe_bench_row(ROW | {"base_commit": base})["metadata"]
    assert metadata["image"] == "swebench/sweb.eval.x86_64.psf_1776_requests-1:latest"
    done = bash(metadata["eval_cmd"].replace(load_tasks.TESTBED, "true"), tmp_path)
    assert ("PASSED tests/test_a.py::test_two" in done.stdout.splitlines()) == passed
    assert "PASSED tests/test_b.py::test_new" in done.stdout, done.stderr
    md = swe.get_metadata(Sample(metadata=metadata), "scaleswe")
    assert swe.evaluability_check(md) is None and md["expected"] == ["tests/test_a.py::test_two"]


def test_django_has_a_runner_of_its_own_and_unread_forms_are_left_out():
    row = ROW | {"repo": "django/django", "base_commit": "abc"}
    command = load_tasks.swe_bench_row(row)["metadata"]["eval_cmd"]
    assert command.endswith(f"{load_tasks.DJANGO} test_a test_b")
    assert "git checkout abc -- tests/test_a.py &&" in command, "the new file is not in the base"
    with pytest.raises(ValueError, match="reports of sympy/sympy's tests are not read"):
        load_tasks.swe_bench_row(row | {"repo": "sympy/sympy"})
    with pytest.raises(ValueError, match="its tests have .* bytes"):
        load_tasks.swe_bench_row(row | {"test_patch": TEST_PATCH * 400})


def make_tasks(folder: Path) -> None:
    """A Harbor task with an image and one that is to be built, and one of Terminal-Bench."""
    harbor = f"if test -f hello.txt; then echo 1; else echo 0; fi > {load_tasks.REWARD}\n"
    for name, image in (("Ready", 'docker_image = "me/ready:1"\n'), ("build-me", "")):
        (folder / name / "tests").mkdir(parents=True)
        (folder / name / "environment").mkdir()
        (folder / name / "task.toml").write_text(f'version = "1.0"\n[environment]\n{image}')
        (folder / name / "instruction.md").write_text("Make hello.txt.\n")
        (folder / name / "environment/Dockerfile").write_text("FROM x\nWORKDIR /work\n")
        (folder / name / "tests/test.sh").write_text(harbor)
    (folder / "terminal/tests").mkdir(parents=True)
    (folder / "terminal/task.yaml").write_text("instruction: |\n  Make hello.txt.\n")
    (folder / "terminal/run-tests.sh").write_text('test -f "$(cat $TEST_DIR/name)"\n')
    (folder / "terminal/tests/name").write_text("hello.txt")
    (folder / "no-task").mkdir()


def test_tasks_are_judged_by_their_own_scripts(tmp_path, monkeypatch, capsys):
    make_tasks(tmp_path / "tasks")
    output = tmp_path / "tasks.jsonl"
    monkeypatch.setattr(sys, "argv", ["load_tasks.py", "--output", str(output), "--tasks", str(tmp_path / "tasks")])
    load_tasks.main()
    rows = {row["metadata"]["instance_id"]: row for row in map(json.loads, output.read_text().splitlines())}
    shown = {name: (row["metadata"]["image"], row["metadata"]["workdir"]) for name, row in rows.items()}
    assert shown == {
        "Ready": ("me/ready:1", "/work"),
        "build-me": ("build-me:latest", "/work"),
        "terminal": ("terminal:latest", "/app"),
    }
    assert {row["prompt"] for row in rows.values()} == {"Make hello.txt."}
    said = capsys.readouterr().out
    assert f"docker build -t build-me:latest {tmp_path}/tasks/build-me/environment" in said and "3 rows" in said
    work = tmp_path / "work"
    work.mkdir()
    for name, row in rows.items():
        # Elsewhere than at the root of this machine: both names stand in the command, and in the script of the task.
        command = row["metadata"]["eval_cmd"].replace("/tests", f"{tmp_path}/{name}/tests")
        command = command.replace(load_tasks.REWARD, f"{tmp_path}/{name}/reward").replace("/logs/verifier", str(work))
        script = f"sed -i s#{load_tasks.REWARD}#{tmp_path}/{name}/reward# {tmp_path}/{name}/tests/*.sh"
        command = command.replace("TEST_DIR=", f"{script} && TEST_DIR=")
        assert bash(command, work).returncode != 0, name
        (work / "hello.txt").write_text("")
        assert bash(command, work).returncode == 0, name
        (work / "hello.txt").unlink()
