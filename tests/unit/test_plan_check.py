"""A run whose plan does not fit into this machine is refused before anything starts."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest

from slime.config.args import Args
from slime.plan import Facts, make_plan
from slime.plan.times import DEVICES, cpu_device
from slime.ray import driver
from slime.ray.driver import check_plan, dry_run, find_device
from slime.utils.errors import UsageError
from tests.unit.plan_fakes import CUDA, plan_args
from tests.unit.test_plan_dry_run import checked


def run_args(**changes):
    return plan_args(**{"hf_checkpoint": "nowhere", "rollout_max_response_len": 64, **changes})


def needed_by(args) -> int:
    """Of a run on CPU."""
    return make_plan(args, Facts(device=cpu_device(2**40), engines=driver.engine_kinds(args))).fit[0].total


@pytest.fixture
def has_memory(monkeypatch):
    """Give this machine so many bytes."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return lambda size: monkeypatch.setattr(driver, "host_memory", lambda: size)


def test_a_run_that_fits_starts_without_a_word(has_memory, caplog):
    has_memory(needed_by(run_args()))
    check_plan(run_args())
    assert not caplog.messages


def test_a_run_that_takes_over_ten_percent_more_is_refused_with_numbers_and_flags(has_memory):
    needed = needed_by(run_args())
    has_memory(int(needed / 1.11))
    with pytest.raises(UsageError) as caught:
        check_plan(run_args())
    (sentence,) = caught.value.messages
    numbers = f"the host takes {needed / 1e9:.1f} GB while training (1 trainer rank(s) "
    assert sentence.startswith(f"the run does not fit: {numbers}") and f"and has {needed / 1.11e9:.1f} GB" in sentence
    assert "lower --sglang-max-total-tokens" in sentence and "--ignore-plan" in sentence


@pytest.mark.parametrize(
    ("share", "changes", "ray", "says"),
    [
        (1.05, {}, None, "the run may not fit"),
        (2.0, {"ignore_plan": True}, None, "the run does not fit"),
        (2.0, {}, "10.0.0.1:6379", "(planned for cpu, which is assumed)"),
    ],
)
def test_less_than_that_another_machine_or_a_users_will_is_a_warning(
    has_memory, monkeypatch, caplog, share, changes, ray, says
):
    has_memory(int(needed_by(run_args()) / share))
    if ray:
        monkeypatch.setenv("RAY_ADDRESS", ray)
    with caplog.at_level(logging.WARNING):
        check_plan(run_args(**changes))
    (said,) = caplog.messages
    assert says in said


def test_a_gpu_that_is_only_assumed_refuses_nothing(monkeypatch, caplog):
    large = {"num_layers": 200, "hidden_size": 8192, "ffn_hidden_size": 28672}
    args = run_args(**CUDA, **large, actor_num_gpus_per_node=1, rollout_num_gpus=1)
    monkeypatch.setattr(driver, "cuda_is_available", lambda: False)
    check_plan(args)
    assert any("(planned for h100-80gb, which is assumed)" in message for message in caplog.messages)
    device = find_device("cuda")
    monkeypatch.setattr(driver, "cuda_is_available", lambda: True)
    monkeypatch.setattr(driver, "find_device", lambda *_: device)
    with pytest.raises(UsageError, match=r"trainer GPU takes \d+\.\d GB while training .* and has 80.0 GB"):
        check_plan(args)


@pytest.mark.parametrize(
    ("changes", "explicit", "stay"),
    [
        ({}, (), "both"),
        ({}, ("offload_rollout",), "trainer"),
        ({}, ("offload_train",), ""),
        ({}, ("offload",), ""),
        ({"use_critic": True}, (), ""),
        ({"use_fault_tolerance": True}, (), ""),  # an engine that is replaced measures what is free
        ({"sglang_overrides": {}}, (), ""),  # SGLang would take 88%
        ({"sglang_overrides": {"mem_fraction_static": 0.65}}, (), "trainer"),
        ({"sglang_overrides": {"mem_fraction_static": 0.8}}, (), ""),
        ({"plan_device": "h100-80gb"}, (), ""),  # not the GPU of this machine
    ],
)
def test_trainer_and_engines_stay_where_the_plan_has_room_and_no_flag_says_otherwise(
    monkeypatch, caplog, changes, explicit, stay
):
    """0.6 B parameters in bf16 with fp32 masters take 18 bytes each, 11 GB of 80, and the engine half of them."""
    size = {"num_layers": 28, "hidden_size": 1024, "ffn_hidden_size": 3072, "num_attention_heads": 16}
    size |= {"num_query_groups": 8, "kv_channels": 128, "padded_vocab_size": 151936}
    turns = {"colocate": True, "offload_train": True, "offload_rollout": True, "actor_num_gpus_per_node": 1}
    flags = {
        **CUDA,
        **size,
        **turns,
        "rollout_num_gpus": 1,
        "sglang_overrides": {"mem_fraction_static": 0.5},
        **changes,
    }
    device = DEVICES["h100-80gb"]
    monkeypatch.setattr(driver, "cuda_is_available", lambda: True)
    monkeypatch.setattr(driver, "find_device", lambda *_: device)
    with caplog.at_level(logging.INFO):
        args = driver.settle_turns(Args.of(vars(run_args(**flags))), explicit)
    assert args.offload_train is (stay == "")
    assert args.offload_rollout is (stay != "both")
    # --offload would be refused beside --offload-rollout, which may be why the engines leave.
    said = [message for message in caplog.messages if "--offload-train makes both leave" in message]
    assert len(said) == bool(stay)


def test_the_sizes_of_captured_graphs_are_said_where_no_flag_names_them(monkeypatch, caplog):
    monkeypatch.setattr(driver, "cuda_is_available", lambda: False)  # an H100 is assumed
    for overrides in ({}, {"cuda_graph_bs_decode": [3]}):
        with caplog.at_level(logging.INFO):
            check_plan(run_args(**CUDA, sglang_server_concurrency=6, sglang_overrides=overrides))
    said = [message for message in caplog.messages if "decode graphs" in message]
    assert said == ["engines of default capture decode graphs, --sglang-cuda-graph-bs-decode 1 2 4 6"]


def test_the_prompts_that_are_there_count_where_the_assumed_ones_do_not_fit(has_memory, tmp_path: Path, monkeypatch):
    """Without the file 512 tokens a prompt are assumed; its own are three."""
    facts = {"data": None}
    monkeypatch.setattr("slime.plan.render.read_rows_of", lambda args: (facts["data"], (), []))
    args = run_args(micro_batch_size=4096)
    from slime.plan.layout import DataFacts

    short = DataFacts(1, 1, 3, 3)
    plan = make_plan(args, Facts(device=cpu_device(1), data=short, engines=driver.engine_kinds(args)))
    assert plan.fit[0].total * 1.2 < needed_by(args)
    has_memory(plan.fit[0].total)
    with pytest.raises(UsageError):
        check_plan(args)
    facts["data"] = short
    check_plan(args)


def test_the_dry_run_says_that_such_a_run_would_be_refused(has_memory, tmp_path: Path, capsys):
    has_memory(10**9)
    assert dry_run(checked(dry_run_json=str(tmp_path / "plan.json"))) == 2
    assert re.search(r"A run would be refused:\n- the run does not fit: the host", capsys.readouterr().out)
    assert json.loads((tmp_path / "plan.json").read_text())["does_fit"] is False
    assert dry_run(checked(ignore_plan=True)) == 0
