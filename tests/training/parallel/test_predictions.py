"""Layers that predict further tokens (--mtp-num-layers): by formula, alike in every layout, no burden to the policy.

An HF model with them is made of one with a layer more: its config.json then says that the last layer predicts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.integration.trainer_world import make_train_data
from tests.training.parallel.layout_results import selected_params
from tests.training.parallel.layout_world import Case, Job, run_jobs
from tests.training.parallel.layout_world import train as train_layout
from tests.unit.megatron_fakes import make_args, make_hf_model, run_world

FAMILIES = ("mimo", "glm4_moe", "glm4_moe_lite", "deepseek_v3")
OWN = {"enorm": (32,), "hnorm": (32,), "shared_head.norm": (32,), "eh_proj": (32, 64)}
IN_MIMO = {"enorm": "token_layernorm", "hnorm": "hidden_layernorm", "shared_head.norm": "final_layernorm"}
COPIES = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
LAYER = "model.layers.2."


def make_predicting_model(path: Path, family: str) -> Any:
    """A model of two layers and one that predicts, saved at `path`; returns transformers' model of all three."""
    model = make_hf_model(path, family, num_hidden_layers=3)
    tensors = load_file(path / "model.safetensors")
    for i, (name, shape) in enumerate(OWN.items()):
        spread = 0.1 * torch.randn(shape, generator=torch.Generator().manual_seed(i))
        tensors[f"{LAYER}{name}.weight"] = spread if name == "eh_proj" else 1 + spread
    tensors |= {f"{LAYER}{copy}.weight": tensors[f"{name}.weight"].clone() for copy, name in COPIES.items()}
    if family == "mimo":
        tensors = as_in_mimo(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    for name, value in config.items():  # what transformers lists layer by layer
        if isinstance(value, list) and len(value) == 3:
            config[name] = value[:2]
    config |= {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    (path / "config.json").write_text(json.dumps(config))
    return model


def as_in_mimo(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The last layer under MiMo's names, which has no copies and joins [hidden state, embedding]."""
    renamed = {name: tensor for name, tensor in tensors.items() if not name.startswith(LAYER)}
    for name, tensor in tensors.items():
        part = name.removeprefix(LAYER).removesuffix(".weight")
        if part == "eh_proj":
            renamed["model.mtp_layers.0.input_proj.weight"] = torch.cat([tensor[:, 32:], tensor[:, :32]], dim=1)
        elif part in IN_MIMO:
            renamed[f"model.mtp_layers.0.{IN_MIMO[part]}.weight"] = tensor
        elif name.startswith(LAYER) and part not in COPIES:
            renamed[name.replace(LAYER, "model.mtp_layers.0.")] = tensor
    return renamed


def own_tensors(path: Path) -> dict[str, torch.Tensor]:
    """What a prediction layer has beside a layer of the model, by the names of `OWN`."""
    tensors = load_file(path / "model.safetensors")
    if f"{LAYER}eh_proj.weight" in tensors:
        return {name: tensors[f"{LAYER}{name}.weight"] for name in OWN}
    norms = {name: tensors[f"model.mtp_layers.0.{theirs}.weight"] for name, theirs in IN_MIMO.items()}
    of_hidden, of_embedding = tensors["model.mtp_layers.0.input_proj.weight"].chunk(2, dim=1)
    return norms | {"eh_proj": torch.cat([of_embedding, of_hidden], dim=1)}


@pytest.fixture(scope="module", params=FAMILIES)
def predicting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp(request.param) / "hf"
    return path, make_predicting_model(path, request.param)


@torch.no_grad()
def predicted_by_formula(model: Any, path: Path, tokens: list[int]) -> torch.Tensor:
    """[T - 1, V]: row p predicts the token at p + 2, from the hidden state at p and the token at p + 1."""
    own = own_tensors(path)

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, (32,), own[name], model.config.rms_norm_eps)

    inner, ids = model.model, torch.tensor([tokens])
    embedded = inner.embed_tokens(ids)
    rope = inner.rotary_emb(embedded, torch.arange(len(tokens))[None])
    hidden = embedded
    for layer in inner.layers[:2]:
        hidden = layer(hidden, position_embeddings=rope, attention_mask=None)
    hidden = inner.norm(hidden)[:, :-1]
    joined = torch.cat([norm(embedded[:, 1:], "enorm"), norm(hidden, "hnorm")], dim=-1)
    rope = inner.rotary_emb(embedded, torch.arange(len(tokens) - 1)[None])
    output = inner.layers[2](joined @ own["eh_proj"].t(), position_embeddings=rope, attention_mask=None)
    return model.lm_head(norm(output, "shared_head.norm"))[0]


def check_logits_and_names(args: Any, expected: list[torch.Tensor], out: Path) -> None:
    from slime.backends.megatron_utils.checkpoint.hf_export import save_hf
    from slime.backends.megatron_utils.data import Packing
    from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights
    from slime.backends.megatron_utils.model.setup import build_model, freeze_parameters
    from slime.backends.megatron_utils.passes.forward import run_model, run_model_with_predictions
    from slime.backends.megatron_utils.update_weight.hf_weight_iterator import iter_hf_buckets
    from slime.training.micro_batches import MicroBatches, to_tensors
    from slime.weights.names import expected_hf_names, partner_of

    model = build_model(args).eval()
    load_hf_weights(args, [model], args.hf_checkpoint)
    data = make_train_data()
    everything = {"micro_batch_indices": [list(range(len(expected)))], "num_microbatches": [1]}
    share = to_tensors(data | everything | {"global_batch_sizes": [12]}, torch.device("cpu"))
    (batch,) = MicroBatches(share, Packing(multiple=8, num_predictions=1)).of_step(None)
    with torch.no_grad():
        logits = run_model_with_predictions(run_model, model, batch)
        assert torch.equal(logits, run_model(model, batch))
    (deferred,) = batch["predictions"]
    found = torch.nn.functional.linear(deferred.hidden, deferred.weight)[:, : args.vocab_size]
    first = 0
    for tokens, rows in zip(data["tokens"], expected, strict=True):
        torch.testing.assert_close(found[first : first + len(rows)], rows, atol=1e-5, rtol=1e-5)
        first += len(tokens)
    freeze_parameters([model], frozen=["embedding"])
    assert all(not param.requires_grad for param in model.mtp.parameters())  # --enable-mtp-training is not given

    hf = Path(args.hf_checkpoint)
    sent = {name for bucket in iter_hf_buckets(args, [model], buffer_size=10_000) for name, _ in bucket}
    assert sent == expected_hf_names(hf, 1)
    small = [[name for name, _ in bucket] for bucket in iter_hf_buckets(args, [model], buffer_size=1)]
    assert len(small) > len(sent) / 3 and {name for bucket in small for name in bucket} == sent
    for bucket in small:  # however small, of two that an engine loads only together it has both
        assert {partner_of(name) for name in bucket} & sent <= set(bucket)
    assert expected_hf_names(hf) == {name for name in sent if not name.startswith((LAYER, "model.mtp_layers."))}
    save_hf(args, [model], out)
    exported, original = load_file(out / "model.safetensors"), load_file(hf / "model.safetensors")
    assert exported.keys() == original.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in original.items())


def test_logits_are_the_formulas_and_every_tensor_comes_back(predicting, tmp_path):
    path, model = predicting
    expected = [predicted_by_formula(model, path, tokens) for tokens in make_train_data()["tokens"]]
    args = make_args(path, mtp_num_layers=1, update_weight_buffer_size=10_000)
    run_world(1, check_logits_and_names, args, expected, tmp_path / "exported")


CLIP = 0.02
"""Below both norms, of the policy's gradients and of the predictions'."""
TRAINED = {"mtp_num_layers": 1, "enable_mtp_training": True, "clip_grad": CLIP, "normalize_advantages": False}
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
PP2 = "--pipeline-model-parallel-size 2"
VPP2 = f"{PP2} --pipeline-model-parallel-layout E|t|t|mL"
OVERLAP = "--overlap-grad-reduce --overlap-param-gather"
RUNS = {
    "single": Case(changes=TRAINED),
    "factor 0": Case(changes=TRAINED | {"mtp_loss_scaling_factor": 0.0}),
    "without": Case(changes={"clip_grad": CLIP, "normalize_advantages": False}),
}
IN_BF16 = {"in bf16": RUNS["single"], "in bf16, without": RUNS["without"]}
"""Megatron wraps a model in 16 bit. Flags give fp32 on a CPU, so that the type is set behind them."""
ALWAYS = {
    "recomputed": Case(RECOMPUTE, changes=TRAINED | {"recompute_loss_function": True}),
    "TP 2": Case(TP2, changes=TRAINED),
    "CP 2": Case("--context-parallel-size 2", changes=TRAINED),
    "PP 2, overlapped": Case(f"{PP2} {OVERLAP}", changes=TRAINED | {"recompute_loss_function": True}),
    "PP 2 VPP 2": Case(VPP2, changes=TRAINED),
    "EP 2": Case(f"--expert-model-parallel-size 2 {OVERLAP}", 2, TRAINED),
}
SLOW = {
    "PP 2 CP 2": Case(f"{PP2} --context-parallel-size 2", changes=TRAINED),
    "PP 2 VPP 2 CP 2, recomputed": Case(f"{VPP2} --context-parallel-size 2 {RECOMPUTE}", changes=TRAINED),
    "TP 2 PP 2 VPP 2": Case(f"{TP2} {VPP2}", changes=TRAINED),
    "PP 2 VPP 2, EP 2, overlapped": Case(f"{VPP2} --expert-model-parallel-size 2 {OVERLAP}", 2, TRAINED),
}
LAYOUTS = ALWAYS | SLOW
BACK = "from PP 2 VPP 2"


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """(the HF model, {run: what `layout_world.train` returns}) of one rollout, of two where one process trains.

    "from <layout>" are runs of one process, and "to PP 2 VPP 2" one of that layout, from another one's checkpoint.
    """
    root = tmp_path_factory.mktemp("trained")
    hf = root / "hf"
    make_predicting_model(hf, "glm4_moe")
    selected = {params.get("name") for params in selected_params(request)}
    cases = RUNS | {name: case for name, case in LAYOUTS.items() if name in selected}
    jobs = [
        Job(name, case.args(hf, save=str(root / f"{name} saved")), train_layout, ((0, 1),) if name == "single" else ())
        for name, case in cases.items()
    ]
    for name, case in IN_BF16.items():
        args = case.args(hf)
        vars(args).update(bf16=True, params_dtype="bfloat16", grad_reduce_in_fp32=True)
        jobs.append(Job(name, args, train_layout))
    if "PP 2 VPP 2" in cases:
        jobs += [
            Job("to PP 2 VPP 2", LAYOUTS["PP 2 VPP 2"].resumed(hf, root / "single saved"), train_layout, ((1,),)),
            Job(BACK, RUNS["single"].resumed(hf, root / "PP 2 VPP 2 saved"), train_layout, ((1,),)),
        ]
    for size in (1, 2, 4):  # a run from a checkpoint after the one that saves it
        if of_size := [job for job in jobs if job.args.actor_num_gpus_per_node == size and job.name != BACK]:
            run_jobs(of_size, root)
    if of_back := [job for job in jobs if job.name == BACK]:
        run_jobs(of_back, root)
    errors = [path.read_text() for path in root.glob("*.error")]
    assert not errors, errors[0]
    return hf, {job.name: torch.load(root / f"{job.name}.pt") for job in jobs}


def is_prediction(name: str) -> bool:
    return name.startswith(LAYER)


@pytest.mark.parametrize("name", [*ALWAYS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_layout_trains_predictions_as_one_process_does(name, trained):
    hf, results = trained
    assert_same(results[name][0], results["single"][0], load_file(hf / "model.safetensors"))


@pytest.mark.parametrize("direction", ["to", "from"])
@pytest.mark.parametrize("name", ["PP 2 VPP 2"])
def test_a_checkpoint_goes_on_in_another_layout_with_its_predictions(name, direction, trained):
    _, results = trained
    assert_same(results[f"{direction} {name}"][1], results["single"][1], results["single"][0]["weights"])


def assert_same(found: dict[str, Any], expected: dict[str, Any], before: dict[str, torch.Tensor]) -> None:
    """Losses and gradient norms within 1e-5, updates within a thousandth of the way that a tensor went."""
    for step, expected_step in zip(found["steps"], expected["steps"], strict=True):
        for key in ("loss", "grad_norm", "mtp_grad_norm", "mtp_loss", "mtp_1_loss"):
            assert step[f"train/{key}"] == pytest.approx(expected_step[f"train/{key}"], rel=1e-5), key
    assert set(found["weights"]) == set(expected["weights"])
    for tensor, value in found["weights"].items():
        update, expected_update = value - before[tensor], expected["weights"][tensor] - before[tensor]
        assert (update - expected_update).norm() <= 1e-3 * expected_update.norm(), tensor


@pytest.mark.parametrize(
    ("name", "without"), [("single", "without"), ("factor 0", "without"), ("in bf16", "in bf16, without")]
)
def test_the_policy_is_trained_as_without_predictions(name, without, trained):
    _, results = trained
    found, expected = results[name][0]["weights"], results[without][0]["weights"]
    assert set(expected) == {tensor for tensor in found if not is_prediction(tensor)}
    assert all(torch.equal(found[tensor], value) for tensor, value in expected.items())
    steps, steps_without = results[name][0]["steps"], results[without][0]["steps"]
    assert [step["train/grad_norm"] for step in steps] == [step["train/grad_norm"] for step in steps_without]
    assert all(step["train/grad_norm"] > CLIP for step in steps)
    assert all(
        ("train/mtp_grad_norm" in step) != ("train/mtp_grad_norm" in bare)
        for step, bare in zip(steps, steps_without, strict=True)
    )
    assert "train/mtp_loss" not in steps_without[0]


def test_predictions_learn_by_the_scaling_factor(trained):
    hf, results = trained
    name = f"{LAYER}eh_proj.weight"
    before = load_file(hf / "model.safetensors")[name]
    moved = {run: (results[run][0]["weights"][name] - before).norm() for run in ("single", "factor 0")}
    assert moved["single"] > 2 * moved["factor 0"]  # what is left is weight decay
    first, second = results["single"][0]["steps"]
    assert first["train/mtp_loss"] == first["train/mtp_1_loss"] > 0
    assert first["train/grad_norm"] == results["factor 0"][0]["steps"][0]["train/grad_norm"] > CLIP
    assert first["train/mtp_grad_norm"] > CLIP > results["factor 0"][0]["steps"][0]["train/mtp_grad_norm"] == 0
    assert second["train/mtp_loss"] != first["train/mtp_loss"]
    assert all(step["train/mtp_grad_norm"] > CLIP for step in results["in bf16"][0]["steps"])
