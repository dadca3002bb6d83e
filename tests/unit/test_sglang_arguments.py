"""The --sglang-* and --router-* flags. The real SGLang (seconds) is imported in a process of its own only."""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slime.config.parser import Parser, add_flags, defaults_of, explicit_flags
from slime.config.problems import Problems, broken
from slime.config.sglang import engine_flags as sglang
from slime.config.sglang import options

ROOT = Path(__file__).resolve().parents[2]
OWN = list(defaults_of(sglang.SglangFlags))


def make_parser() -> Parser:
    parser = Parser()
    add_flags(parser, sglang.SglangFlags)
    sglang.add_sglang_arguments(parser, sglang.sglang_tables())
    return parser


@pytest.fixture(scope="module")
def parser() -> Parser:
    """With all options of the installed packages."""
    return make_parser()


def parse(parser: Parser, line: str, *, gpus_per_engine: int = 4) -> argparse.Namespace:
    args = argparse.Namespace(
        accelerator="cuda",
        colocate=False,
        debug_rollout_only=False,
        debug_train_only=False,
        hf_checkpoint=None,
        actor_num_gpus_per_node=8,
        actor_num_nodes=1,
        num_gpus_per_node=8,
        prometheus_port=None,
        reward_model_num_gpus=None,
        reward_model_path=None,
        rollout_external="--rollout-external" in line,
        rollout_external_engine_addrs=None,
        rollout_num_gpus=8,
        rollout_num_gpus_per_engine=gpus_per_engine,
    )
    assert parser.parse_all(line.split(), args, explain_unknown=sglang.explain_unknown) == []
    vars(args).update(sglang.derive_sglang(args, explicit_flags(parser, line.split()), OWN))
    return args


def refusals(parser: Parser, line: str) -> list[str]:
    return parser.parse_all(line.split(), argparse.Namespace(), explain_unknown=sglang.explain_unknown)


def problems_of(parser: Parser, line: str, *, taken: tuple[int, ...] = ()) -> Problems:
    return sglang.sglang_problems(parse(parser, line), port_is_free=lambda port: port not in taken)


def test_the_parser_has_every_option(parser: Parser) -> None:
    assert len(parser.options()) > 500
    assert "--sglang-mem-fraction-static FLOAT" in parser.format_help()
    assert "Router: Routing Policy" in parser.format_help()


def test_only_explicit_options_are_overrides(parser: Parser) -> None:
    args = parse(parser, "--sglang-dtype=float32 --sglang-disable-radix-cache --sglang-router-port 1")
    assert args.sglang_overrides == {"dtype": "float32", "disable_radix_cache": True}
    assert args.router_overrides == {"log_level": "warn", "balance_abs_threshold": 10, "balance_rel_threshold": 1.2}


def test_every_attribute_exists_with_the_installed_default(parser: Parser) -> None:
    args = parse(parser, "")
    assert (args.sglang_max_running_requests, args.sglang_dtype, args.sglang_schedule_policy) == (None, "auto", "fcfs")
    assert (args.router_log_level, args.router_balance_abs_threshold, args.router_policy) == (
        "warn",
        10,
        "cache_aware",
    )
    assert args.sglang_enable_deterministic_inference is False


def test_what_slime_reads_of_sglang_exists_without_it_too() -> None:
    given = {*OWN, "sglang_overrides", "sglang_model_routers"}
    derived = {options.PREFIX + name for name in sglang.engine_sizes(1, {})}
    read, guarded = set(), set()
    for path in (ROOT / "slime").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            # A rule's condition calls them `a`; one with `given` is asked only where that flag was given.
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("a", "args"):
                read |= {node.attr} if node.attr.startswith(options.PREFIX) else set()
            elif isinstance(node, ast.keyword) and node.arg == "given" and isinstance(node.value, ast.Constant):
                guarded |= set(str(node.value.value).split())
    assert read - given - derived - guarded == {options.PREFIX + name for name in options.READ_BY_SLIME}


def test_switches_have_their_no_form(parser: Parser) -> None:
    assert parse(parser, "--no-sglang-lora-strict-loading").sglang_overrides == {"lora_strict_loading": False}
    assert parse(parser, "--sglang-lora-strict-loading").sglang_overrides == {"lora_strict_loading": True}


def test_numbers_have_suffixes(parser: Parser) -> None:
    assert parse(parser, "--sglang-max-total-tokens 4k").sglang_overrides == {"max_total_tokens": 4000}
    assert parse(parser, "--sglang-context-length 2Ki").sglang_overrides == {"context_length": 2048}
    (refused,) = refusals(parser, "--sglang-context-length 4x")
    assert refused == "--sglang-context-length: '4x' is no number such as 4096, 4k, 1.5M or 4Ki"


def test_deprecated_options_do_what_their_successors_do(parser: Parser, caplog: pytest.LogCaptureFixture) -> None:
    args = parse(parser, "--sglang-cuda-graph-bs 1 2 --sglang-stream-output --sglang-prefill-round-robin-balance")
    assert args.sglang_overrides == {"cuda_graph_bs_decode": [1, 2], "incremental_streaming_output": True}
    assert "--sglang-cuda-graph-bs is deprecated: use --sglang-cuda-graph-bs-decode" in caplog.text
    assert "--sglang-prefill-round-robin-balance is deprecated\n" in caplog.text, "and has no effect"


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--sglang-max-runing-requests 1", "did you mean --sglang-max-running-requests?"),
        ("--router-polcy random", "did you mean --router-policy?"),
        ("--sglang-dtype flaot32", "--sglang-dtype: invalid choice: 'flaot32'"),
        ("--sglang-mem-fraction-static x", "--sglang-mem-fraction-static: invalid float value"),
        ("--sglang-tp-size 2", "--sglang-tp-size is set by slime: use --rollout-num-gpus-per-engine."),
        ("--sglang-tensor-parallel-size 2", "is set by slime: use --rollout-num-gpus-per-engine."),
        ("--sglang-model-path m", "--sglang-model-path is set by slime: use --hf-checkpoint."),
        ("--router-prefill u", "--router-prefill is set by slime: slime registers its engines."),
        ("--sglang-lora-paths {}", "--sglang-lora-paths: invalid value: '{}' looks like a JSON str"),
    ],
)
def test_a_wrong_flag_is_refused_by_name(parser: Parser, line: str, sentence: str) -> None:
    (refused,) = refusals(parser, line)
    assert sentence in refused


def test_owned_options_are_left_out(parser: Parser) -> None:
    dests = {action.dest for action in parser.options().values()}
    owned = {options.PREFIX + name for name in options.OWNED} - {"sglang_config"}  # slime has one of its own
    assert not (owned | set(options.ROUTER_OWNED)) & dests


SIZES = {
    "tp_size": "tensor_parallel_size",
    "pp_size": "pipeline_parallel_size",
    "dp_size": "data_parallel_size",
    "ep_size": "expert_parallel_size",
    "moe_dp_size": "moe_data_parallel_size",
}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("", {"tp_size": 8, "pp_size": 1, "dp_size": 1, "ep_size": 1, "moe_dp_size": 1}),
        ("--sglang-pp-size 2", {"tp_size": 4, "pp_size": 2}),
        ("--sglang-pipeline-parallel-size 4", {"tp_size": 2, "pp_size": 4}),
        ("--sglang-dp-size 2 --sglang-enable-dp-attention", {"tp_size": 8, "dp_size": 2}),
        ("--sglang-expert-parallel-size 8", {"ep_size": 8}),
        ("--sglang-moe-dp-size 2", {"moe_dp_size": 2}),
    ],
)
def test_sizes_exist_under_both_names(parser: Parser, line: str, expected: dict[str, int]) -> None:
    args = vars(parse(parser, line, gpus_per_engine=8))
    assert {name: args["sglang_" + name] for name in expected} == expected
    for short, long in SIZES.items():
        assert args["sglang_" + short] == args["sglang_" + long]


@pytest.mark.parametrize(("pp_size", "gpus", "is_wrong"), [(1, 4, False), (2, 4, False), (3, 4, True), (0, 4, True)])
def test_pipeline_size_must_divide_an_engine(parser: Parser, pp_size: int, gpus: int, is_wrong: bool) -> None:
    args = parse(parser, f"--sglang-pp-size {pp_size}", gpus_per_engine=gpus)
    sentence = f"--sglang-pp-size {pp_size} does not divide --rollout-num-gpus-per-engine {gpus}."
    assert list(broken(sglang.RULES, args)) == ([sentence] if is_wrong else [])


def test_data_parallel_engines_need_dp_attention(parser: Parser) -> None:
    assert problems_of(parser, "--sglang-dp-size 2").wrong == [
        "--sglang-dp-size 2 needs --sglang-enable-dp-attention."
    ]
    assert not problems_of(parser, "--sglang-dp-size 2 --sglang-enable-dp-attention").all()


@pytest.mark.parametrize(
    ("given", "as_in_a_url"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("fe80::1", "[fe80::1]"),
        ("[fe80::1]", "[fe80::1]"),
        ("router.local", "router.local"),
    ],
)
def test_an_ipv6_router_address_is_wrapped_for_urls(parser: Parser, given: str, as_in_a_url: str) -> None:
    assert parse(parser, f"--sglang-router-ip {given} --sglang-router-port 1").sglang_router_ip == as_in_a_url
    assert parse(parser, "").sglang_router_ip is None


def test_only_one_flag_describes_the_engines(parser: Parser) -> None:
    addresses = ["10.0.0.1:30000", "10.0.0.2:30000"]

    def sentences(config: str | None, num_prefill: int | None, external: list[str] | None) -> list[str]:
        args = parse(parser, "")
        args.sglang_config, args.prefill_num_servers, args.rollout_external_engine_addrs = (
            config,
            num_prefill,
            external,
        )
        return list(broken(sglang.RULES, args))

    for alone in [("e.yaml", None, None), (None, 1, None), (None, None, addresses), (None, None, None)]:
        assert sentences(*alone) == []
    assert sentences("e.yaml", 1, None) == [
        "--sglang-config e.yaml and --prefill-num-servers 1 exclude each other; "
        "keep the one that describes the engines."
    ]
    (sentence,) = sentences("e.yaml", 2, addresses)
    assert "--rollout-external-engine-addrs 10.0.0.1:30000 10.0.0.2:30000" in sentence


def test_a_taken_port_is_the_environments_fault_and_an_impossible_one_the_lines(parser: Parser) -> None:
    line = "--sglang-router-port 30000 --router-prometheus-port 70000"
    problems = problems_of(parser, line, taken=(30000,))
    assert problems.wrong == ["--router-prometheus-port 70000 is no port; choose one from 1 to 65535."]
    (taken,) = problems.environment
    assert taken.startswith("--sglang-router-port 30000 is taken on this host; choose another")
    assert not problems_of(parser, "--sglang-router-port 30000").all()


def test_the_port_of_a_router_that_runs_is_taken_by_it(parser: Parser) -> None:
    line = "--sglang-router-ip 127.0.0.1 --sglang-router-port 30000"
    assert not problems_of(parser, line, taken=(30000,)).all()
    (missing,) = problems_of(parser, "--sglang-router-ip 127.0.0.1").wrong
    assert missing == "--sglang-router-ip 127.0.0.1 needs --sglang-router-port too."


@pytest.fixture
def no_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "is_installed", lambda package: False)


LINE = (
    "--seed 1 --sglang-dtype float32 --sglang-cuda-graph-bs 1 2 --sglang-router-port 5 --router-policy=random --lr 3"
)


@pytest.mark.usefixtures("no_sglang")
@pytest.mark.parametrize("why", ["--debug-train-only", "--load-debug-rollout-data=x"])
def test_without_sglang_a_run_without_engines_takes_its_flags_unread(
    why: str, caplog: pytest.LogCaptureFixture
) -> None:
    kept = sglang.set_aside([*LINE.split(), why], make_parser().options())
    assert kept == ["--seed", "1", "--sglang-router-port", "5", "--lr", "3", why]
    (record,) = caplog.records
    assert record.getMessage().endswith(": --sglang-dtype, --sglang-cuda-graph-bs, --router-policy")


@pytest.mark.usefixtures("no_sglang")
def test_without_sglang_a_run_with_engines_is_told_to_install_it() -> None:
    parser = make_parser()
    assert sglang.set_aside(LINE.split(), parser.options()) == LINE.split()
    (refused,) = refusals(parser, "--sglang-dtype float32")
    assert refused.startswith(
        "--sglang-dtype cannot be checked, for sglang is not installed: run scripts/setup_env.sh"
    )
    assert "--sglang-tp-size is set by slime" in refusals(parser, "--sglang-tp-size 2")[0]
    (missing,) = problems_of(parser, "").environment
    assert missing.startswith(
        "sglang and sglang_router not installed, but engines need sglang and sglang_router: run scripts/setup_env.sh"
    )


@pytest.mark.usefixtures("no_sglang")
def test_without_sglang_what_slime_reads_has_sglangs_defaults() -> None:
    args = parse(make_parser(), "")
    assert args.sglang_load_format == "auto" and args.sglang_speculative_algorithm is None


def test_with_sglang_unknown_flags_are_refused_in_every_run(parser: Parser) -> None:
    tokens = ["--debug-train-only", "--sglang-dtpye", "float32"]
    assert sglang.set_aside(tokens, parser.options()) == tokens


@pytest.mark.processes
@pytest.mark.timeout(700)
def test_every_option_reaches_its_field_of_the_real_server_and_router() -> None:
    # A process of its own: SGLang's stand-ins on a CPU replace modules that other tests import.
    program = Path(__file__).with_name("sglang_passthrough.py")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    counts = json.loads(done.stdout.splitlines()[-1])
    assert counts["server"] > 400 and counts["router"] > 80
