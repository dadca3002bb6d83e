"""Weights as files, with a real engine: it answers with what was written, and survives what cannot be loaded."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime.backends.megatron_utils.update_weight import base, build_weight_updater
from slime.backends.megatron_utils.update_weight.from_disk import DiskWeightUpdater
from slime.backends.sglang_utils.sglang_engine import SGLangEngine
from slime.utils import http_utils
from slime.weights.names import read_index
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
        "update_weight_transport": "disk",
        "update_weight_mode": "full",
        "update_weight_delta_encoding": "xor",
        "update_weight_delta_checksum": "xxh3-128",
        "update_weight_local_checkpoint_dir": None,
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
        "train_backend": "megatron",
        "multimodal_keys": None,
    }
    made = build_weight_updater(SimpleNamespace(**(args | values)), [], colocated=False)
    assert isinstance(made, DiskWeightUpdater)
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
    with pytest.raises(RuntimeError, match="refused update_weights_from_disk.* bytes, but"):
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


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_after_a_delta_the_engine_answers_with_the_new_weights_and_after_a_damaged_one_too(
    engine: SGLangEngine,
    trained: dict[str, torch.Tensor],
    tiny_models: tuple[Path, Path],
    models: list[Any],
    tmp_path: Path,
    encoding: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = {"update_weight_mode": "delta", "update_weight_delta_encoding": encoding}
    values |= {"update_weight_local_checkpoint_dir": str(tmp_path / "local"), "update_weight_disk_keep_files": True}
    updater = make_updater(engine, tmp_path / "shared", tiny_models[0], **values)
    updater.update()
    assert gap(engine, models[1]) < 1e-4
    changed = copy.deepcopy(models[1])
    layer = changed.model.layers[1]
    with torch.no_grad():  # a part of what engines fuse, one that they do not, and the embedding, which is tied
        for weight in (layer.self_attn.k_proj.weight, layer.mlp.down_proj.weight, changed.model.embed_tokens.weight):
            weight[::2] *= 1.5
    trained |= {name: tensor.detach().clone() for name, tensor in changed.named_parameters() if name in trained}
    assert gap(engine, changed) > 1e-2
    with monkeypatch.context() as patched:  # where the engine took whole tensors, it would take zeros
        pause = updater._pause
        patched.setattr(updater, "_pause", lambda: (pause(), clear(tmp_path / "local/checkpoint")))
        metrics = updater.update()
    assert gap(engine, changed) < 1e-4
    assert 0 < metrics["perf/update_weights_density"] < 0.5
    version = tmp_path / "shared" / "weight_v000002"
    assert sum(file.stat().st_size for file in version.iterdir()) < updater.checks.sent.num_bytes / 2

    trained |= load_file(tiny_models[0] / "model.safetensors")
    updater._hook = damage
    metrics = updater.update()
    assert gap(engine, models[0]) < 1e-4 and engine.get_weight_version() == "3"
    assert metrics["perf/update_weights_density"] == 1.0
    assert "version 3 was refused as a delta; a whole one follows" in caplog.text


def clear(checkpoint: Path) -> None:
    """Make all weights of an HF directory zeros."""
    for file in checkpoint.glob("*.safetensors"):
        save_file({name: torch.zeros_like(tensor) for name, tensor in load_file(file).items()}, file)


def damage(args: Any, version_dir: str, rollout_engines: list[Any]) -> None:
    """Flip one bit of the last byte of a delta."""
    if "base_version" in read_index(Path(version_dir))["metadata"]:
        file = max(Path(version_dir).glob("*.safetensors"))
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)


@pytest.mark.timeout(1200)
def test_a_run_over_deltas_is_on_policy_after_every_sync(tmp_path: Path) -> None:
    """Two ranks of tensor parallelism beside an engine."""
    model, prompts = make_model(tmp_path / "model"), write_prompts(tmp_path / "prompts.jsonl")
    run = train(
        tmp_path / "out", *grpo_flags(model, prompts), "--num-rollout", 2,
        "--actor-num-gpus-per-node", 2, "--tensor-model-parallel-size", 2, "--sequence-parallel",
        "--rollout-num-gpus", 1, "--update-weight-buffer-size", 100_000, "--check-weight-update-equal",
        "--update-weight-transport", "disk", "--update-weight-disk-dir", tmp_path / "shared",
        "--save-hf", tmp_path / "out" / "hf-{rollout_id}", "--save-interval", 1,
        "--update-weight-mode", "delta", "--update-weight-local-checkpoint-dir", tmp_path / "local",
        "--update-weight-disk-keep-files", "--custom-update-weight-post-write-path", f"{HOOKS}:sign_version",
    )  # fmt: skip
    assert len(run.column("train/train_rollout_logprob_abs_diff")) == 2
    assert max(run.column("train/train_rollout_logprob_abs_diff")) < 1e-4
    versions = sorted((tmp_path / "shared").glob("weight_*"))
    assert [path.name for path in versions] == [f"weight_v{i:06d}" for i in (1, 2, 3)]
    assert {(path / "signed_by").read_text() for path in versions} == {"2 ranks, 1 engine"}
    first, *later = run.column("perf/update_weights_density", "rollout/step")
    assert all(0 < density <= 1 for density in [first, *later])
    exported = load_file(run.output_dir / "hf-1" / "model.safetensors")
    local = tensors_in(tmp_path / "local/checkpoint")
    assert all(torch.equal(tensor, exported[name]) for name, tensor in local.items())


def tensors_in(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a directory's safetensors files."""
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


# ---- trainers that end while engines generate


RELEASES = 2
COLOCATED = pytest.param(["--colocate"], marks=pytest.mark.slow, id="colocate")


@pytest.fixture(scope="module", params=[pytest.param([], id="separate"), COLOCATED])
def released(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    """(a run whose trainers stay, a run whose trainers end after every sync), bit by bit the same otherwise."""
    work: Path = tmp_path_factory.mktemp("released")
    model, prompts = make_model(work / "model"), write_prompts(work / "prompts.jsonl")
    placement = request.param or ["--rollout-num-gpus", 1]

    def launch(name: str, *more: Any) -> Run:
        return train(
            work / name, *grpo_flags(model, prompts), *placement, "--num-rollout", RELEASES, "--save", work / name,
            "--sglang-enable-deterministic-inference", "--sglang-max-running-requests", 1,
            "--sglang-disable-radix-cache", "--lr-decay-style", "cosine", "--lr-decay-iters", RELEASES,
            "--save-interval", 1, "--update-weight-transport", "disk",
            "--update-weight-disk-dir", work / f"{name}-sync", "--update-weight-disk-keep-files",
            "--update-weight-buffer-size", 100_000, "--save-hf", work / name / "hf-{rollout_id}", *more,
        )  # fmt: skip

    return launch("stay"), launch("end", "--release-train")


@pytest.mark.timeout(1200)
def test_trainers_that_end_between_steps_train_as_those_that_stay(released: tuple[Run, Run]) -> None:
    stay, end = released
    for name in ("train/loss", "train/grad_norm", "train/train_rollout_logprob_abs_diff", "rollout/raw_reward"):
        assert end.column(name) == stay.column(name), name
    assert len(end.column("train/loss")) == RELEASES
    assert (end.output_dir / "logs/trainer_0.log").read_text().count("imported everything") > RELEASES
    names = [f"weight_v{i:06d}" for i in range(1, RELEASES + 2)]
    assert sorted(path.name for path in end.output_dir.with_name("end-sync").glob("weight_*")) == names
    for name in names:
        ours, theirs = (tensors_in(sync_of(run) / name) for run in released)
        assert all(torch.equal(ours[n], theirs[n]) for n in ours), name


def sync_of(run: Run) -> Path:
    """Where a run of `released` writes the versions of its weights."""
    return run.output_dir.with_name(f"{run.output_dir.name}-sync")


@pytest.mark.timeout(1200)
def test_a_run_over_files_is_on_policy_after_every_sync(released: tuple[Run, Run]) -> None:
    stay, _ = released
    assert max(stay.column("train/train_rollout_logprob_abs_diff")) < 1e-4
    for rollout_id in range(RELEASES):
        exported = load_file(stay.output_dir / f"hf-{rollout_id}" / "model.safetensors")
        written = tensors_in(sync_of(stay) / f"weight_v{rollout_id + 2:06d}")  # the first are the initial weights
        assert written.keys() == exported.keys() - {"lm_head.weight"}
        assert all(torch.equal(tensor, exported[name]) for name, tensor in written.items())
    (num_bytes,) = set(stay.column("perf/update_weights_wire_bytes", "rollout/step"))
    assert num_bytes == sum(tensor.nbytes for tensor in written.values())


@pytest.mark.timeout(1200)
def test_an_engine_of_two_pipeline_stages_gets_files_and_is_on_policy_after_every_sync(tmp_path: Path) -> None:
    model, prompts = make_model(tmp_path / "model"), write_prompts(tmp_path / "prompts.jsonl")
    run = train(
        tmp_path / "out", *grpo_flags(model, prompts), "--num-rollout", 3,
        "--rollout-num-gpus", 2, "--rollout-num-gpus-per-engine", 2, "--sglang-pp-size", 2,
        "--update-weight-transport", "disk", "--update-weight-disk-dir", tmp_path / "versions",
        "--update-weight-disk-keep-files",
    )  # fmt: skip
    # fp32 on both sides: what each stage did not load would show as other log-probs
    gaps = run.column("train/train_rollout_logprob_abs_diff")
    assert len(gaps) == 3 and max(gaps) < 1e-5, gaps
    first, second = (
        load_file(next((tmp_path / "versions" / f"weight_v00000{version}").glob("*.safetensors")))
        for version in (1, 2)
    )
    moved = {name for name in first if not torch.equal(first[name], second[name])}
    assert {name.split(".")[2] for name in moved if ".layers." in name} == {"0", "1"}, "of both stages"
    log = (run.output_dir / "logs" / "engine_0.log").read_text()
    assert " PP0]" in log and " PP1]" in log
