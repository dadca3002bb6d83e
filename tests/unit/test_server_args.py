"""Which value wins: what suits the device, the user's --sglang-* flags, what slime owns."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest

from slime.backends.sglang_utils.server_args import (
    EnginePlace,
    EngineSpec,
    build_server_args,
    decode_graph_sizes,
    device_defaults,
    server_environment,
)
from slime.config.sglang.options import OWNED


def arguments(**changed: object) -> Namespace:
    values = {"accelerator": "cpu", "seed": 100, "trust_remote_code": False}
    values |= {"update_weights_in_flight": False, "use_rollout_routing_replay": False, "hf_checkpoint": "/models/m"}
    values |= {"sglang_server_concurrency": 512, "spec_auto_off": False}
    values["params_dtype"] = "float32" if changed.get("accelerator", "cpu") == "cpu" else "bfloat16"
    return Namespace(**(values | changed))


def build(args: Namespace | None = None, **spec: object) -> dict[str, object]:
    place = EnginePlace("127.0.0.1", port=15000, nccl_port=15001, bootstrap_port=15002, dist_init_port=15004)
    return build_server_args(args or arguments(), EngineSpec(**({"rank": 0, "model_path": "/models/m"} | spec)), place)


def test_a_users_flag_overrides_the_default_of_the_device() -> None:
    assert build()["dtype"] == "float32"
    changed = build(settings={"dtype": "bfloat16", "max_running_requests": 1})
    assert (changed["dtype"], changed["max_running_requests"]) == ("bfloat16", 1)
    assert changed["attention_backend"] == "torch_native"


def test_an_engine_holds_the_trainers_weights_in_the_trainers_type() -> None:
    on_cuda = arguments(accelerator="cuda")  # SGLang would take a checkpoint in fp32 for fp16
    assert build(on_cuda)["dtype"] == "bfloat16"
    assert build(on_cuda, settings={"dtype": "float16"})["dtype"] == "float16"
    assert "dtype" not in build(on_cuda, takes_weights=False), "a frozen model is what its checkpoint says"


@pytest.mark.parametrize(
    ("settings", "largest"),
    [
        ({}, 512),  # --sglang-server-concurrency
        ({"max_running_requests": 100}, 100),
        ({"enable_dp_attention": True, "dp_size": 8}, 64),  # of each rank
        ({"cuda_graph_max_bs_decode": 64}, 64),
        ({"cuda_graph_bs_decode": [1, 7]}, None),
        ({"disable_decode_cuda_graph": True}, None),
        ({"speculative_algorithm": "EAGLE"}, None),
    ],
)
def test_decode_graphs_reach_as_far_as_the_requests_of_an_engine_unless_flags_say(settings, largest) -> None:
    found = build(arguments(accelerator="cuda"), settings=settings).get("cuda_graph_bs_decode")
    if largest is None:
        assert found == settings.get("cuda_graph_bs_decode")
    else:
        assert found is not None and found[0] == 1 and found[-1] == largest
        assert all(small < large <= max(2 * small, 4) for small, large in zip(found, found[1:], strict=False))
    assert "cuda_graph_bs_decode" not in build(settings={})  # an engine on a CPU has none
    assert "cuda_graph_bs_decode" not in build(arguments(accelerator="cuda"), worker_type="prefill")
    assert "cuda_graph_bs_decode" not in build(arguments(accelerator="cuda"), settings={"is_embedding": True})


def test_no_batch_of_128_requests_and_more_grows_by_over_a_quarter_for_its_graph() -> None:
    sizes = decode_graph_sizes(512)
    assert len(sizes) == 20 and sizes[-1] == 512
    assert max(min(size for size in sizes if size >= batch) / batch for batch in range(128, 513)) < 1.25


def test_what_slime_owns_cannot_be_overridden() -> None:
    assert build(settings={"port": 1, "model_path": "/other"})["port"] == 15000


def test_an_engine_with_requests_in_flight_during_syncs_keeps_no_prefixes() -> None:
    assert "disable_radix_cache" not in build()
    changed = build(arguments(update_weights_in_flight=True), settings={"disable_radix_cache": False})
    assert changed["disable_radix_cache"] is True


def test_the_trained_models_engines_say_their_experts_for_routing_replay() -> None:
    replay = arguments(use_rollout_routing_replay=True)
    assert build(replay)["enable_return_routed_experts"] is True
    assert "enable_return_routed_experts" not in build(replay, model_path="/models/reward")
    assert "enable_return_routed_experts" not in build()


def test_an_engine_that_releases_memory_keeps_the_weights_that_nobody_sends_it() -> None:
    assert not {"enable_memory_saver", "enable_weights_cpu_backup"} & set(build())
    trained = build(releases_memory=True, settings={"enable_memory_saver": False})
    assert trained["enable_memory_saver"] is True and trained["enable_draft_weights_cpu_backup"] is True
    assert "enable_weights_cpu_backup" not in trained
    assert build(releases_memory=True, takes_weights=False)["enable_weights_cpu_backup"] is True


def test_each_engine_has_its_own_seed() -> None:
    # Engines of two GPUs: upstream's seed + rank * GPUs of an engine.
    assert [build(num_gpus=2, first_slot=2 * rank)["random_seed"] for rank in (0, 1, 2)] == [100, 102, 104]


def test_code_of_a_checkpoint_is_run_only_where_it_is_trusted() -> None:
    assert build()["trust_remote_code"] is False
    assert build(arguments(trust_remote_code=True))["trust_remote_code"] is True


def test_pipeline_stages_share_the_gpus_of_an_engine() -> None:
    assert build(num_gpus=8, settings={"pp_size": 2})["tp_size"] == 4


def test_only_data_parallel_attention_gets_an_address_for_its_ports() -> None:
    assert "dist_init_addr" not in build()
    with_attention = build(settings={"enable_dp_attention": True})
    assert with_attention["dist_init_addr"] == "127.0.0.1:15004"


def test_a_gpu_engine_keeps_sglangs_own_choices() -> None:
    kwargs = build(arguments(accelerator="cuda"))
    assert not {"device", "attention_backend", "max_total_tokens"} & set(kwargs)


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


def test_a_server_whose_tower_is_trained_keeps_no_embeddings_of_images(monkeypatch: pytest.MonkeyPatch) -> None:
    size = "SGLANG_VLM_CACHE_SIZE_MB"
    monkeypatch.delenv(size, raising=False)
    assert server_environment("cuda")[size] == "0"
    assert size not in server_environment("cuda", keeps_embeddings=True)


def test_prefill_and_decode_engines_get_their_mode_and_only_prefill_a_bootstrap_port() -> None:
    prefill, decode, regular = (build(worker_type=kind) for kind in ("prefill", "decode", "regular"))
    assert (prefill["disaggregation_mode"], prefill["disaggregation_bootstrap_port"]) == ("prefill", 15002)
    assert decode["disaggregation_mode"] == "decode" and "disaggregation_bootstrap_port" not in decode
    assert "disaggregation_mode" not in regular


def test_an_encoder_has_no_language_model_and_the_engines_that_use_it_only_that() -> None:
    encoder = build(worker_type="encoder")
    assert encoder["encoder_only"] is True and "language_only" not in encoder
    user = build(worker_type="prefill", encoder_urls=("http://e0:1", "http://e1:1"))
    assert (user["language_only"], user["encoder_urls"]) == (True, ["http://e0:1", "http://e1:1"])
    assert user["encoder_bootstrap_port"] not in (user["port"], user["disaggregation_bootstrap_port"])


def test_the_arguments_are_fields_of_the_installed_sglang() -> None:
    from slime.config.parser import Parser
    from slime.config.sglang.options import table_of

    parser = Parser()
    table_of("sglang").add_to(parser)
    known = {action.dest.removeprefix("sglang_") for action in parser.options().values()} | set(OWNED)
    for kind in ("prefill", "decode", "encoder", "regular"):
        assert set(build(worker_type=kind, encoder_urls=("http://e:1",) * (kind != "encoder"))) <= known
