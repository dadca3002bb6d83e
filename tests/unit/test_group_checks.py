"""Flags of Megatron's process groups: optimizer instances, NCCL's settings, SHARP; what reaches Megatron, and what is
refused."""

from __future__ import annotations

import inspect
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from megatron.core import parallel_state

from slime.backends.megatron_utils import initialize
from slime.config.megatron import training_checks
from slime.config.megatron.arguments import megatron_problems
from slime.config.megatron.layout_checks import layout_problems
from tests.unit.megatron_fakes import make_args
from tests.unit.test_megatron_layout import EXPERTS, parse

INSTANCES = "--num-distributed-optimizer-instances"


def test_megatron_makes_its_groups_with_what_the_flags_say(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, Any] = {}
    monkeypatch.setattr(parallel_state, "initialize_model_parallel", lambda **given: made.update(given))
    flags = f"{INSTANCES} 4 --nccl-communicator-config-path n.yaml --use-sharp --sharp-enabled-group dp_replica"
    initialize.initialize_model_parallel(make_args(flags=flags))
    expected = {
        "num_distributed_optimizer_instances": 4,
        "nccl_communicator_config_path": "n.yaml",
        "use_sharp": True,
        "sharp_enabled_group": "dp_replica",
    }
    assert {name: made[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("2", None),
        ("8", None),
        (
            "3",
            "the 8 data-parallel x context-parallel ranks do not divide into --num-distributed-optimizer-instances 3",
        ),
        ("16", "the nearest that works: 8."),
        ("2 --context-parallel-size 2 --tensor-model-parallel-size 4", None),  # the two of CP
        (f"4 {EXPERTS} --expert-model-parallel-size 4", "the 2 expert-data-parallel ranks do not divide into"),
        ("2 --ddp-reduce-scatter-with-fp32-accumulation", "does not go with --ddp-reduce-scatter-with-fp32-accum"),
        ("2 --overlap-grad-reduce", None),
    ],
)
def test_copies_of_the_model_divide_into_instances(flags: str, sentence: str | None) -> None:
    args, _ = parse(f"{INSTANCES} {flags}")
    problems = [problem for problem in layout_problems(args, None) if "instances" in problem]
    assert len(problems) == bool(sentence) and all(sentence in problem for problem in problems if sentence)


def test_instances_overlap_on_cuda_only() -> None:
    args, _ = parse(f"{INSTANCES} 2 --overlap-grad-reduce", accelerator="cpu")
    (problem,) = (problem for problem in layout_problems(args, None) if "instances" in problem)
    assert "with --overlap-grad-reduce needs CUDA streams" in problem


def test_the_names_of_groups_are_those_that_megatron_looks_up() -> None:
    source = inspect.getsource(parallel_state.initialize_model_parallel)
    assert set(re.findall(r"""get_nccl_options\(["'](\w+)["']""", source)) == set(training_checks.GROUPS)
    read = inspect.getsource(parallel_state.get_nccl_options)
    assert set(re.findall(r"""\[pg_name\](?:\.get\(|\[)["'](\w+)["']""", read)) == set(training_checks.SETTINGS)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "tp: {cga_cluster_size: 2, max_ctas: 8}\ndp: {net_name: SOCKET, is_high_priority_stream: yes}",
            None,
        ),
        ("tp: {}\nxy: {max_ctas: 8}", ":2: xy: unknown key; known are cp, dp, "),
        ("tp: {max_cats: 8}", ":1: tp.max_cats: unknown key; did you mean max_ctas"),
        ("tp: {max_ctas: many}", "tp.max_ctas: 'many' is not a whole number."),
        ("tp: {max_ctas: true}", "tp.max_ctas: true is not a whole number."),
        ("tp: {net_name: wifi}", "tp.net_name: 'wifi' is none of 'ib', 'socket'."),
        ("tp: 8", "tp: 8 is not a mapping"),
        ("- tp", "is no mapping; it needs keys of cp, dp, "),
        ("tp: {", "is no valid YAML"),
    ],
)
def test_settings_of_nccl_that_megatron_would_not_read_are_refused(
    tmp_path: Path, text: str, sentence: str | None
) -> None:
    path = tmp_path / "nccl.yaml"
    path.write_text(text)
    args = Namespace(nccl_communicator_config_path=str(path), accelerator="cuda")
    problems = training_checks.nccl_problems(args).wrong
    assert len(problems) == bool(sentence)
    assert all(f"--nccl-communicator-config-path {path}" in p and sentence in p for p in problems if sentence)


def test_a_file_of_nccl_settings_has_to_be_there_and_a_gpu_to_use_it() -> None:
    for accelerator, part in (("cuda", "there is no such file"), ("cpu", "has no effect with --accelerator cpu")):
        args = Namespace(nccl_communicator_config_path="gone.yaml", accelerator=accelerator)
        (problem,) = training_checks.nccl_problems(args).environment
        assert part in problem


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--sharp-enabled-group dp", "--sharp-enabled-group dp has no effect without --use-sharp."),
        ("--use-sharp --sharp-enabled-group dp_replica", "give --num-distributed-optimizer-instances 2 or more"),
        ("--use-sharp", None),
        (f"--use-sharp --sharp-enabled-group dp_replica {INSTANCES} 2", None),
    ],
)
def test_groups_that_reduce_in_the_switch(
    flags: str, sentence: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "libsharp_coll.so").touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/nowhere:{tmp_path}")
    args, explicit = parse(flags)
    found = megatron_problems(args, None, explicit)
    about = [problem for problem in found.all() if "sharp" in problem]
    assert len(about) == bool(sentence) and all(sentence in problem for problem in about if sentence)


def test_sharp_is_refused_where_its_library_is_not_and_where_groups_do_not_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(training_checks, "has_sharp", lambda: False)
    args, _ = parse("--use-sharp")
    (problem,) = training_checks.check_sharp_library(args)
    assert "--use-sharp needs NVIDIA's SHARP library (libsharp_coll.so" in problem
    args.accelerator, args.offload_train = "cpu", True
    assert ["needs NCCL" in p for p in training_checks.check_sharp_library(args)] == [True]
    assert ["does not go with --offload-train" in p for p in training_checks.check_sharp(args)] == [True]
