"""Servers that run already: what is asked of them, when they are refused, and that they are left as they were."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slime.backends.sglang_utils import external
from slime.backends.sglang_utils.engine_patches import DRAFTS_OFF
from slime.backends.sglang_utils.external import (
    ExternalEngine,
    ExternalEngineInfo,
    apply_external_engine_info_to_args,
    discover_external_engines,
    external_engine_problems,
    start_external_rollout_servers,
)
from slime.config.problems import Problems
from slime.config.sglang.engine_flags import derive_engines, external_flag_problems
from slime.utils.errors import UsageError
from tests.unit.test_server_control import Script

SERVER = {"tp_size": 2, "pp_size": 2, "model_path": "/models/m", "disaggregation_mode": "null"}
MODEL = {"architectures": ["Qwen3ForCausalLM"]}


@pytest.fixture
def server() -> Iterator[Script]:
    running = Script()
    running.answers |= {"/server_info": [(200, SERVER)], "/model_info": [(200, MODEL)]}
    yield running
    running.server.shutdown()
    running.server.server_close()


def run_args(tmp_path: Path, **changes: Any) -> Namespace:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    values = {
        "debug_rollout_only": False,
        "debug_train_only": False,
        "hf_checkpoint": str(tmp_path),
        "prefill_num_servers": None,
        "reward_model_num_gpus": None,
        "reward_model_path": None,
        "rollout_external": True,
        "rollout_external_engine_addrs": [],
        "rollout_num_gpus": 1,
        "rollout_num_gpus_per_engine": 1,
        "sglang_config": None,
        "sglang_enable_deterministic_inference": False,
        "sglang_overrides": {},
        "sglang_pp_size": 1,
        "spec_auto_off": False,
        "update_weight_transport": "disk",
        "update_weight_mode": "full",
        "update_weight_disk_keep_files": True,
        "update_weights_in_flight": False,
        "use_rollout_routing_replay": False,
    }
    return Namespace(**(values | changes))


def test_a_server_is_asked_what_it_is(server: Script) -> None:
    (info,) = discover_external_engines([server.url.removeprefix("http://")])
    expected = ExternalEngineInfo(
        server.url, 2 * 2, model_path="/models/m", architectures=("Qwen3ForCausalLM",), num_stages=2
    )
    assert info == expected and info.worker.request == {"url": server.url, "worker_type": "regular"}
    prefill = {**SERVER, "disaggregation_mode": "prefill", "disaggregation_bootstrap_port": 8998}
    server.answers["/server_info"] = [(200, prefill)]
    (info,) = discover_external_engines([server.url + "/"])
    assert info.worker.request == {"url": server.url, "worker_type": "prefill", "bootstrap_port": 8998}


def test_an_older_server_has_its_info_under_the_older_name(server: Script) -> None:
    server.answers |= {"/server_info": [(404, {})], "/get_server_info": [(200, SERVER)]}
    (info,) = discover_external_engines([server.url])
    assert info.num_gpus == 2 * 2
    assert [path for path, _ in server.requests] == ["/server_info", "/get_server_info", "/model_info"]


def test_every_server_that_cannot_be_used_is_named(server: Script) -> None:
    server.answers["/server_info"] = [(200, {"status": "fine"})]
    with pytest.raises(UsageError) as raised:
        discover_external_engines([server.url, "127.0.0.1:1"], timeout=5)
    foreign, absent = raised.value.messages
    assert foreign == (
        f"--rollout-external-engine-addrs {server.url}: its /server_info lacks 'tp_size'; start an SGLang server "
        "there first, or leave it out."
    )
    assert "--rollout-external-engine-addrs 127.0.0.1:1: GET http://127.0.0.1:1/server_info failed" in absent


def test_sizes_and_counts_of_a_run_follow_from_the_servers(server: Script, tmp_path: Path) -> None:
    args, problems = run_args(tmp_path, rollout_external_engine_addrs=[server.url]), Problems()
    derive_engines(args, set(), problems)
    assert not problems.all()
    assert (args.rollout_num_gpus, args.rollout_num_engines) == (4, 1)
    assert [info.url for info in args.rollout_external_engine_infos] == [server.url]
    assert [(model.name, model.groups) for model in args.engine_models] == [("default", ())]


def test_a_silent_server_is_a_problem_of_the_environment_and_the_run_can_be_planned(tmp_path: Path) -> None:
    args, problems = run_args(tmp_path, rollout_external_engine_addrs=["127.0.0.1:1"]), Problems()
    derive_engines(args, set(), problems)
    assert len(problems.environment) == 1 and not problems.wrong
    assert args.rollout_num_engines == 1 and len(args.engine_models) == 1


def test_servers_that_do_not_fit_the_run_are_refused(tmp_path: Path) -> None:
    info = ExternalEngineInfo("http://e:1", 4, model_path="/m", architectures=("LlamaForCausalLM",))
    args = run_args(tmp_path, rollout_num_gpus_per_engine=2, sglang_enable_deterministic_inference=True)
    model, size, seeds = external_engine_problems(args, [info], {"rollout_num_gpus_per_engine"})
    assert f"serves a LlamaForCausalLM (/m), but --hf-checkpoint {tmp_path} is a Qwen3ForCausalLM" in model
    assert "has 4 GPUs (tensor times pipeline parallel), not the --rollout-num-gpus-per-engine 2" in size
    assert "ignores the seeds" in seeds
    fitting = ExternalEngineInfo("http://e:1", 4, architectures=("Qwen3ForCausalLM",), is_deterministic=True)
    assert external_engine_problems(args, [fitting], set()) == []
    args.update_weights_in_flight = True
    assert "was started without --disable-radix-cache" in external_engine_problems(args, [fitting], set())[0]
    assert external_engine_problems(args, [replace(fitting, has_prefix_cache=False)], set()) == []


def test_experts_are_replayed_of_servers_that_return_them(tmp_path: Path) -> None:
    info, args = ExternalEngineInfo("http://e:1", 1), run_args(tmp_path, use_rollout_routing_replay=True)
    (sentence,) = external_engine_problems(args, [info], set())
    assert "http://e:1 was started without --enable-return-routed-experts, so there is nothing for" in sentence
    assert external_engine_problems(args, [replace(info, returns_experts=True)], set()) == []


def test_a_server_that_would_never_stop_drafting_is_refused_with_spec_auto_off(server: Script, tmp_path: Path) -> None:
    args = run_args(tmp_path, spec_auto_off=True)
    found = []
    for drafts in ({}, {"speculative_algorithm": "EAGLE"},
                   {"speculative_algorithm": "EAGLE", "speculative_adaptive_config": DRAFTS_OFF}):  # fmt: skip
        server.answers["/server_info"] = [(200, SERVER | drafts)]
        found += discover_external_engines([server.url])
    without, stock, from_join = (
        [s for s in external_engine_problems(args, [i], set()) if "draft" in s] for i in found
    )
    assert not without and not from_join
    assert "drafts and would not stop when --spec-auto-off says so; start it without --speculative-alg" in stock[0]


def test_a_server_that_is_named_twice_is_refused(tmp_path: Path) -> None:
    """It would join the trainer's group as two engines, and leave it again when it joins as the second."""
    infos = [ExternalEngineInfo(f"http://e:{port}", 1) for port in (1, 2, 1)]
    (sentence,) = external_engine_problems(run_args(tmp_path), infos, set())
    assert (
        sentence == "--rollout-external-engine-addrs names http://e:1 more than once: it is one engine; name it once."
    )


def test_pipeline_stages_take_weights_over_files_that_stay_only(tmp_path: Path) -> None:
    """As engines of our own: stages would wait for each other in a group, and files would go away under them."""
    info = ExternalEngineInfo("http://e:1", 4, num_stages=2)
    assert external_engine_problems(run_args(tmp_path), [info], set()) == []
    for changes in ({"update_weight_transport": "nccl"}, {"update_weight_disk_keep_files": False}):
        (sentence,) = external_engine_problems(run_args(tmp_path, **changes), [info], set())
        assert "http://e:1 has 2 pipeline stages, which take the trainer's weights from files that stay" in sentence
        assert external_engine_problems(run_args(tmp_path, debug_rollout_only=True, **changes), [info], set()) == []


@pytest.mark.parametrize("types", [("prefill",), ("decode", "decode"), ("prefill", "decode", "regular")])
def test_half_of_a_disaggregated_pair_is_refused(tmp_path: Path, types: tuple[str, ...]) -> None:
    infos = [ExternalEngineInfo(f"http://e:{i}", 1, kind) for i, kind in enumerate(types)]
    (sentence,) = external_engine_problems(run_args(tmp_path), infos, set())
    assert "prefill servers need decode servers" in sentence
    both = [ExternalEngineInfo("http://e:0", 1, "prefill"), ExternalEngineInfo("http://e:1", 1, "decode")]
    assert external_engine_problems(run_args(tmp_path), both, set()) == []


def test_options_of_servers_that_run_already_are_refused_unless_slime_reads_them() -> None:
    overrides = {"mem_fraction_static": 0.5, "enable_deterministic_inference": True}
    (sentence,) = external_flag_problems(overrides)
    assert sentence.startswith("--sglang-mem-fraction-static has no effect with --rollout-external-engine-addrs")


def test_only_servers_that_the_router_does_not_have_are_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[str] = []
    monkeypatch.setattr(external.server_control, "list_workers_sync", lambda url: ["http://e:0"])
    monkeypatch.setattr(
        external.server_control, "register_worker_sync", lambda url, worker: registered.append(worker.url)
    )
    args = Namespace()
    apply_external_engine_info_to_args(args, [ExternalEngineInfo(f"http://e:{i}", 1) for i in range(2)])
    engines = start_external_rollout_servers(args, "http://router", first_rank=3)
    assert registered == ["http://e:1"]
    assert [(engine.url, engine.rank) for engine in engines] == [("http://e:0", 3), ("http://e:1", 4)]


def test_the_process_group_of_an_earlier_run_is_left_before_joining_one_of_the_same_name(server: Script) -> None:
    server.answers |= {
        "/destroy_weights_update_group": [(200, {"success": False, "message": "no such group"})],
        "/init_weights_update_group": [(200, {"success": True})],
    }
    engine = ExternalEngine(ExternalEngineInfo(server.url, 1), rank=0)
    engine.init_weights_update_group("10.0.0.1", 7, 1, 2, "slime-pp_0", "gloo")
    engine.shutdown()
    (left, group), (joined, _) = server.requests
    assert (left, joined) == ("/destroy_weights_update_group", "/init_weights_update_group")
    assert group == {"group_name": "slime-pp_0"}
