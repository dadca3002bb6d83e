"""The --sglang-* and --router-* flags; one test imports the real SGLang (seconds), in a process of its own."""

from __future__ import annotations

import argparse
import subprocess
import sys
import textwrap

import pytest

from slime.backends.sglang_utils import arguments as sglang
from slime.utils.arguments.flags import Parser, add_flags
from slime.utils.errors import UsageError

OWN = ["--sglang-router-ip", "--sglang-router-port", "--sglang-server-concurrency"]


@pytest.mark.parametrize(
    ("line", "needs"),
    [
        ("", False),
        ("--seed 1", False),
        ("--sglang-router-port 30000", False),
        ("--sglang-max-running-requests 4 --sglang-disable-radix-cache --sglang-dtype=float32", False),
        ("--sglang-tp-size 2", False),  # slime's own: answered without SGLang
        ("--sglang-max-total-tokens 4k", True),  # only SGLang knows its suffixes
        ("--sglang-dtype flaot32", True),
        ("--sglang-max-runing-requests 4", True),
        ("--no-sglang-lora-strict-loading", True),
        ("--router-policy random", True),
    ],
)
def test_sglang_is_asked_only_where_it_alone_knows(line: str, needs: bool) -> None:
    assert sglang.needs_installed_options(line.split(), OWN) is needs


def parse(line: str) -> argparse.Namespace:
    parser, args = Parser(), argparse.Namespace(rollout_num_gpus_per_engine=4)
    add_flags(parser, sglang.SglangFlags)
    sglang.add_common_arguments(parser)
    assert parser.parse_all(line.split(), args, explain_unknown=sglang.explain_owned) == []
    own = [name for name in vars(args) if name in sglang.SglangFlags.__dataclass_fields__]
    vars(args).update(sglang.derive_sglang(args, parser.explicit(line.split()), own))
    return args


def test_only_explicit_options_are_overrides() -> None:
    args = parse("--sglang-dtype=float32 --sglang-disable-radix-cache --sglang-router-port 1")
    assert args.sglang_overrides == {"dtype": "float32", "disable_radix_cache": True}
    assert args.sglang_max_running_requests is None, "what slime reads exists without being given"
    assert args.router_overrides == {"log_level": "warn", "balance_abs_threshold": 10, "balance_rel_threshold": 1.2}


def test_sizes_exist_under_both_names() -> None:
    args = parse("")
    assert args.sglang_tp_size == args.sglang_tensor_parallel_size == 4
    assert args.sglang_pp_size == args.sglang_pipeline_parallel_size == 1


def test_data_parallel_engines_need_dp_attention() -> None:
    args = parse("")
    args.sglang_dp_size = 2
    (problem,) = sglang.sglang_problems(args, port_is_free=lambda port: True)
    assert "needs --sglang-enable-dp-attention" in problem


def test_pipeline_size_must_divide_an_engine() -> None:
    args = parse("")
    args.sglang_pp_size = 3
    (problem,) = sglang.sglang_problems(args, port_is_free=lambda port: True)
    assert "--sglang-pp-size 3 does not divide --rollout-num-gpus-per-engine 4" in problem


def test_without_sglang_the_common_flags_work_and_others_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang, "is_installed", lambda: False)
    assert parse("--sglang-dtype float32").sglang_dtype == "float32"
    with pytest.raises(UsageError, match="sglang or sglang-router is not installed"):
        sglang.add_installed_arguments(Parser())


REAL = """
import argparse
from slime.backends.sglang_utils import arguments as sglang
from slime.utils.arguments.flags import Parser

parser = Parser()
sglang.add_installed_arguments(parser)
options = parser.options()

for entry in sglang.COMMON:
    action = options[entry.option]
    assert (action.dest, action.default) == ("sglang_" + entry.dest, entry.default), entry
    for value in {int: ["3"], float: ["0.5"], bool: [], str: entry.plain}[entry.kind]:
        args = argparse.Namespace()
        assert parser.parse_all([entry.option, value], args, explain_unknown=lambda name: None) == [], (entry, value)
        assert vars(args)[action.dest] == entry.kind(value), (entry, value)

from sglang.srt.server_args import ServerArgs
from sglang_router.router_args import RouterArgs
fields = {field for field in ServerArgs.__dataclass_fields__}
assert set(sglang.OWNED) - {"config"} <= fields, "an owned option no longer exists in SGLang"
dests = {action.dest for action in options.values()}
assert not {"sglang_" + name for name in sglang.OWNED} & dests
assert not set(sglang.ROUTER_OWNED) & dests
assert "--sglang-model-path" not in options and "--sglang-tensor-parallel-size" not in options
assert parser.get_default("router_balance_abs_threshold") == 10

line = "--sglang-max-total-tokens 4k --sglang-ep-size 2 --sglang-stream-output --router-policy random"
line += " --sglang-max-runing-requests 1"
args = argparse.Namespace(rollout_num_gpus_per_engine=1)
problems = parser.parse_all(line.split(), args, explain_unknown=sglang.explain_owned)
assert problems == ["unknown flag --sglang-max-runing-requests: did you mean --sglang-max-running-requests?"], problems
derived = sglang.derive_sglang(args, parser.explicit(line.split()), [])
assert derived["sglang_overrides"] == {"max_total_tokens": 4000, "ep_size": 2, "incremental_streaming_output": True}
assert derived["router_overrides"]["policy"] == "random"
assert derived["sglang_ep_size"] == derived["sglang_expert_parallel_size"] == 2
text = parser.format_help()
assert "--sglang-mem-fraction-static FLOAT" in text and "Router: Routing Policy" in text
"""


def test_the_common_table_agrees_with_the_installed_sglang() -> None:
    # A process of its own: SGLang's stand-ins on a CPU replace modules that other tests import.
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(REAL)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
