"""Weights as files, with a real engine: it answers with what was written, and survives what cannot be loaded."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slime.backends.megatron_utils.update_weight import base
from slime.backends.megatron_utils.update_weight.from_disk import DiskWeightUpdater
from slime.backends.sglang_utils.sglang_engine import SGLangEngine
from slime.utils import http_utils
from tests.integration.launch import ROOT, Run, grpo_flags, make_model, train, write_prompts

PROMPT = [9, 30, 31, 77]
HOOKS = f"{ROOT}/tests/integration/user_code.py"


@pytest.fixture(scope="module")
def models(tiny_models: tuple[Path, Path]) -> list[Any]:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

    return [Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in tiny_models]


@pytest.fixture
def trained(tiny_models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """The weights that the trainer has; a test changes them."""
    weights = load_file(tiny_models[1] / "model.safetensors")

    def buckets(args: Any, model: Any, *, buffer_size: int) -> Any:
        items = list(weights.items())
        return iter([items[i::3] for i in range(3)])

    monkeypatch.setattr(base, "iter_hf_buckets", buckets)
    return weights


def make_updater(engine: SGLangEngine, shared: Path, model: Path, **values: Any) -> DiskWeightUpdater:
    args = {
        "update_weight_disk_dir": str(shared),
        "update_weight_disk_keep_files": False,
        "custom_update_weight_post_write_path": None,
        "output_dir": "out",
        "update_weight_buffer_size": 100_000,
        "update_weights_in_flight": False,
        "distributed_timeout_minutes": 1.0,
        "hf_checkpoint": str(model),
        "mtp_num_layers": None,
        "check_weight_update_equal": False,
    }
    made = DiskWeightUpdater(SimpleNamespace(**(args | values)), [])
    made.connect([engine], engine_sizes=[1])
    return made


def gap(engine: SGLangEngine, model: Any) -> float:
    """Between the engine's log-probs of what it answers and the model's of the same tokens."""
    payload = {"input_ids": PROMPT, "return_logprob": True}
    sampling = {"max_new_tokens": 16, "ignore_eos": True, "temperature": 0.0}
    answer = http_utils.post_sync(f"{engine.url}/generate", {**payload, "sampling_params": sampling})
    pairs = [(entry[0], entry[1]) for entry in answer["meta_info"]["output_token_logprobs"]]
    response = [token for _, token in pairs]
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + response])).logits[0]
    expected = logits.log_softmax(-1)[len(PROMPT) - 1 : -1].gather(1, torch.tensor(response)[:, None])[:, 0]
    return (expected - torch.tensor([log_prob for log_prob, _ in pairs])).abs().max().item()


def test_after_a_sync_over_files_the_engine_answers_with_the_new_weights(
    engine: SGLangEngine,
    trained: dict[str, torch.Tensor],
    tiny_models: tuple[Path, Path],
    models: list[Any],
    tmp_path: Path,
) -> None:
    named = http_utils.get_sync(f"{engine.url}/model_info")["model_path"]
    updater = make_updater(engine, tmp_path / "shared", tiny_models[0])
    updater.update()
    assert gap(engine, models[1]) < 1e-4 and gap(engine, models[0]) > 1e-2
    trained |= load_file(tiny_models[0] / "model.safetensors")
    updater.update()
    assert gap(engine, models[0]) < 1e-4
    assert engine.get_weight_version() == "2"
    assert http_utils.get_sync(f"{engine.url}/model_info")["model_path"] == named, "not the directory that is gone"
    assert not list((tmp_path / "shared").glob("weight_*"))


def test_an_engine_refuses_a_directory_that_is_not_whole_and_goes_on_with_its_weights(
    engine: SGLangEngine,
    trained: dict[str, torch.Tensor],
    tiny_models: tuple[Path, Path],
    models: list[Any],
    tmp_path: Path,
) -> None:
    make_updater(engine, tmp_path / "shared", tiny_models[0], update_weight_disk_keep_files=True).update()
    version = tmp_path / "shared" / "weight_v000001"
    last = max(version.glob("*.safetensors"))
    os.truncate(last, last.stat().st_size - 1)
    with pytest.raises(RuntimeError, match="refused update_weights_from_disk.* bytes instead of"):
        engine.update_weights_from_disk(str(version), weight_version="2")
    with pytest.raises(RuntimeError, match="there is no /gone/weight_v000001 on this host"):
        engine.update_weights_from_disk("/gone/weight_v000001", weight_version="2")
    assert gap(engine, models[1]) < 1e-4
    assert engine.get_weight_version() == "1"


def test_a_server_of_someone_else_loads_the_files_in_sglangs_own_way(
    engine: SGLangEngine,
    trained: dict[str, torch.Tensor],
    tiny_models: tuple[Path, Path],
    models: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine, "disk_load_format", "auto")
    make_updater(engine, tmp_path / "shared", tiny_models[0]).update()
    assert gap(engine, models[1]) < 1e-4


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two ranks of tensor parallelism beside an engine, two rollouts."""
    work: Path = tmp_path_factory.mktemp("disk")
    model, prompts = make_model(work / "model"), write_prompts(work / "prompts.jsonl")
    return train(
        work / "out", *grpo_flags(model, prompts), "--num-rollout", 2,
        "--actor-num-gpus-per-node", 2, "--tensor-model-parallel-size", 2, "--sequence-parallel",
        "--rollout-num-gpus", 1, "--update-weight-buffer-size", 100_000, "--check-weight-update-equal",
        "--update-weight-transport", "disk", "--update-weight-disk-dir", work / "shared",
        "--update-weight-disk-keep-files",
        "--custom-update-weight-post-write-path", f"{HOOKS}:sign_version",
        "--save-hf", work / "out" / "hf-{rollout_id}", "--save-interval", 1,
    )  # fmt: skip


@pytest.mark.timeout(1200)
def test_a_run_over_files_is_on_policy_after_every_sync(run: Run) -> None:
    assert len(run.column("train/train_rollout_logprob_abs_diff")) == 2
    assert max(run.column("train/train_rollout_logprob_abs_diff")) < 1e-4
    versions = sorted((run.output_dir.parent / "shared").glob("weight_*"))
    assert [path.name for path in versions] == [f"weight_v{i:06d}" for i in (1, 2, 3)]
    for rollout_id, version in enumerate(versions[1:]):
        exported = load_file(run.output_dir / f"hf-{rollout_id}" / "model.safetensors")
        written = {name: tensor for file in version.glob("*.safetensors") for name, tensor in load_file(file).items()}
        assert written.keys() == exported.keys() - {"lm_head.weight"}
        assert all(torch.equal(tensor, exported[name]) for name, tensor in written.items())
    assert {(path / "signed_by").read_text() for path in versions} == {"2 ranks, 1 engine"}
    (num_bytes,) = set(run.column("perf/update_weights_wire_bytes", "rollout/step"))
    assert num_bytes == sum(tensor.nbytes for tensor in written.values())
