"""Which value wins: what suits the device, the user's --sglang-* flags, what slime owns."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest

from slime.backends.sglang_utils.server_args import build_server_args, device_defaults, server_environment


def arguments(**changed: object) -> Namespace:
    values = {
        "accelerator": "cpu",
        "sglang_overrides": {},
        "rollout_num_gpus_per_engine": 1,
        "seed": 100,
        "trust_remote_code": False,
    }
    return Namespace(**(values | changed))


def build(args: Namespace, rank: int = 0) -> dict[str, object]:
    ports = {"port": 15000, "nccl_port": 15001, "dist_init_port": 15002}
    return build_server_args(args, rank=rank, model_path="/models/m", host="127.0.0.1", **ports)


def test_a_users_flag_overrides_the_default_of_the_device() -> None:
    assert build(arguments())["dtype"] == "float32"
    changed = build(arguments(sglang_overrides={"dtype": "bfloat16", "max_running_requests": 1}))
    assert (changed["dtype"], changed["max_running_requests"]) == ("bfloat16", 1)
    assert changed["attention_backend"] == "torch_native"


def test_what_slime_owns_cannot_be_overridden() -> None:
    assert build(arguments(sglang_overrides={"port": 1, "model_path": "/other"}))["port"] == 15000


def test_each_engine_has_its_own_seed() -> None:
    # Engines of two GPUs: upstream's seed + rank * GPUs of an engine.
    assert [build(arguments(rollout_num_gpus_per_engine=2), rank)["random_seed"] for rank in (0, 1, 2)] == [
        100,
        102,
        104,
    ]


def test_code_of_a_checkpoint_is_run_only_where_it_is_trusted() -> None:
    assert build(arguments())["trust_remote_code"] is False
    assert build(arguments(trust_remote_code=True))["trust_remote_code"] is True


def test_pipeline_stages_share_the_gpus_of_an_engine() -> None:
    assert build(arguments(rollout_num_gpus_per_engine=8, sglang_overrides={"pp_size": 2}))["tp_size"] == 4


def test_only_data_parallel_attention_gets_an_address_for_its_ports() -> None:
    assert "dist_init_addr" not in build(arguments())
    with_attention = build(arguments(sglang_overrides={"enable_dp_attention": True}))
    assert with_attention["dist_init_addr"] == "127.0.0.1:15002"


def test_a_gpu_engine_keeps_sglangs_own_choices() -> None:
    kwargs = build(arguments(accelerator="cuda"))
    assert not {"device", "dtype", "attention_backend", "max_total_tokens"} & set(kwargs)


def test_the_default_dictionaries_are_not_shared() -> None:
    device_defaults("cuda", Path("/m"))["dtype"] = "changed"
    assert "dtype" not in device_defaults("cuda", Path("/m"))


@pytest.mark.parametrize(("vocab_size", "requests"), [(128, 512), (2**16, 2**24 // 2**16), (2**30, 1)])
def test_a_large_vocabulary_bounds_the_batch_of_a_cpu_engine(tmp_path: Path, vocab_size: int, requests: int) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": vocab_size}))
    assert device_defaults("cpu", tmp_path)["max_running_requests"] == requests


def test_the_environment_of_a_cpu_server_hides_gpus_and_sets_its_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    env = server_environment("cpu", num_threads=3)
    assert (env["CUDA_VISIBLE_DEVICES"], env["OMP_NUM_THREADS"], env["SGLANG_USE_CPU_ENGINE"]) == ("", "3", "1")
    assert env["OMP_WAIT_POLICY"] == "PASSIVE"


def test_the_environment_of_a_gpu_server_agrees_with_the_trainers_nccl() -> None:
    env = server_environment("cuda")
    assert (env["NCCL_CUMEM_ENABLE"], env["NCCL_NVLS_ENABLE"]) == ("0", "0")
