"""--train-backend fsdp and models of transformers: which are exact, which are refused, and what is put into them."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend

from slime.config.parse import CommandLine
from slime.config.rules.backends import unsupported_models
from slime.utils.errors import UsageError
from slime.weights.names import text_config
from tests.integration.trainer_world import trainer_args
from tests.unit.megatron_fakes import make_args, make_hf_model, run_world
from tests.unit.test_fsdp import MEGATRON


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its HF directory."""
    path = tmp_path_factory.mktemp("qwen3")
    make_hf_model(path)
    return path


SEEING = {"vision_config": {"depth": 2}}


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"layer_types": ["linear_attention", "full_attention"]}, "whose state would pass from one packed sample"),
        ({"layer_types": ["chunked_attention"]}, "give sdpa"),
        ({"conv_L_cache": 3, "full_attn_idxs": [2]}, "layers of conv_L_cache, whose state"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0, which is not built"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "angles depend on a pack's longest sample"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised weights"),
        ({"model_type": "gemma3", **SEEING, "text_config": {"layer_types": ["full_attention"]}}, "in both directions"),
        (
            {"model_type": "qwen3_5", **SEEING, "text_config": {"layer_types": ["linear_attention"]}},
            "'qwen3_5' has layers of l",
        ),
    ],
    ids=str,
)
def test_a_model_whose_result_would_not_be_exact_is_refused(config: dict[str, Any], sentence: str) -> None:
    (problem,) = unsupported_models(make_args(), text_config(config))
    assert sentence in problem


SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 96, "pad_token_id": 0}  # fmt: skip


def _on_meta_of(folder: Path, model_type: str, **values: Any) -> Any:
    """The model that the backend builds of an HF directory, without its weights."""
    from slime.backends.fsdp_utils import model

    (folder / "config.json").write_text(json.dumps({"model_type": model_type, **SIZES, **values}))
    model.register_attention()
    args = make_args(hf_checkpoint=str(folder), attn_implementation=model.PACKED_ATTENTION)
    with mock.patch.object(model.dist, "get_rank", return_value=0):
        return model._on_meta(args)


def test_a_policy_has_no_dropout_whatever_its_config_says(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    drawn = {"residual_dropout": 0.1, "embedding_dropout": 0.1, "attention_dropout": 0.1}
    hf = _on_meta_of(tmp_path, "starcoder2", **drawn, sliding_window=None)
    assert {getattr(module, "attention_dropout", 0.0) for module in hf.modules()} == {0.0}
    assert {getattr(hf.config, key) for key in drawn} == {0.0}
    assert "attention_dropout" in caplog.text and "set to 0" in caplog.text


def test_a_window_that_only_a_mask_has_is_refused(tmp_path: Path) -> None:
    """Qwen2-MoE's attention does not pass it on, Qwen2's does."""
    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
    with pytest.raises(UsageError, match="puts its sliding window into a mask.*give sdpa"):
        _on_meta_of(tmp_path, "qwen2_moe", **window)
    assert _on_meta_of(tmp_path, "qwen2", **window).config.layer_types == ["sliding_attention"] * 2


def test_what_only_the_defaults_of_a_config_say_is_refused_too(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match="^--hf-checkpoint [^:]*: --train-backend fsdp: model_type 'gemma2' has final_logit"
    ):
        _on_meta_of(tmp_path, "gemma2")


def test_a_rotation_of_heads_that_come_last_is_that_of_heads_that_come_first() -> None:
    from slime.backends.fsdp_utils.model import rotate_both

    q, k, cos, sin = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 5, 8), torch.randn(1, 5, 8)
    turned = rotate_both(q.transpose(1, 2), k.transpose(1, 2), cos, sin, unsqueeze_dim=2)
    assert all(a.transpose(1, 2).equal(b) for a, b in zip(turned, rotate_both(q, k, cos, sin), strict=True))


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma3", "glm4"])
def test_kernels_take_the_place_of_llamas_code_alone(family: str) -> None:
    """On CPU they run as they are written, so that the output shows whether each stands where it belongs."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from slime.backends.fsdp_utils.model import rotate_both, use_kernels

    name = "gemma3_text" if family == "gemma3" else family
    torch.manual_seed(0)
    hf = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **SIZES), attn_implementation="sdpa").eval()
    tokens, file = torch.arange(11)[None], sys.modules[type(hf).__module__]
    expected = hf(tokens, use_cache=False).logits
    with mock.patch.object(file, "apply_rotary_pos_emb", file.apply_rotary_pos_emb):
        use_kernels(hf)
        found, rotation = hf(tokens, use_cache=False).logits, file.apply_rotary_pos_emb
    replaced = {
        type(module).__name__.removeprefix(family.title()) for module in hf.modules() if "forward" in vars(module)
    }
    # Gemma's norm adds 1 to its weight and its unit is no SiLU; GLM-4's unit is one product, its rotation interleaved
    assert replaced == {"gemma3": set(), "glm4": {"RMSNorm"}}.get(family, {"RMSNorm", "MLP"})
    assert (rotation is rotate_both) == (family != "glm4")
    assert torch.allclose(found, expected, atol=1e-6)


@pytest.mark.processes
def test_a_compiled_layer_learns_as_one_that_is_not(qwen3: Path) -> None:
    args = trainer_args(qwen3, MEGATRON, train_backend="fsdp", fsdp_min_group_params=1)
    run_world(1, _compiled, args)


def _compiled(args: Any) -> None:
    from slime.backends.fsdp_utils import model
    from slime.backends.fsdp_utils.weights import load_hf, named_parameters
    from slime.backends.megatron_utils.data import pack
    from slime.utils.accelerator import fusion

    def gradients(compiles: bool) -> list[torch.Tensor]:
        vars(args)["fsdp_compile"] = compiles
        policy = model.build_policy(args, model.make_mesh(args))
        load_hf(policy, args.load)
        for lengths in ((5, 9), (12, 3)):
            batch = pack([torch.arange(length) for length in lengths])
            policy(batch, lambda output: output.hidden.float().square().sum()).backward()
        return [
            parameter.grad.full_tensor() for _, parameter in named_parameters(policy) if parameter.grad is not None
        ]

    whole, counter = gradients(False), CompileCounterWithBackend("aot_eager")
    compiled = functools.partial(fusion.compiled, backend=counter)
    with torch._dynamo.config.patch(disable=False), mock.patch.object(model, "compiled", compiled):
        found = gradients(True)
    # two layers of three parts (before, in, after the attention) and two lengths would be 12 if nothing were shared
    assert 0 < counter.frame_count <= 8
    for ours, theirs in zip(found, whole, strict=True):
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm()


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 4},
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "smollm3": {},
    "olmo2": {},
    "olmo3": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "phi3": {"sliding_window": 4},
    "glm4": {},
    "gemma3_text": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "ministral": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
}
"""model_type of transformers -> what its tiny model has beside the sizes; docs/fsdp_figures.md has them in a table."""


@pytest.mark.processes
@pytest.mark.parametrize("cp_size", [1, 2])
def test_packed_samples_have_the_log_probs_that_transformers_gives_each_alone(qwen3: Path, cp_size: int) -> None:
    args = trainer_args(qwen3, f"{MEGATRON} --context-parallel-size {cp_size}", dp_size=1)
    run_world(cp_size, _of_families, args)


def _of_families(args: Any) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    from slime.backends.fsdp_utils.model import PACKED_ATTENTION, register_attention
    from slime.backends.megatron_utils.cp_utils import slice_with_cp
    from slime.backends.megatron_utils.data import Packing, pack

    register_attention()
    place = {"cp_rank": dist.get_rank(), "cp_size": args.context_parallel_size}
    samples = [torch.arange(start, start + length) for start, length in ((3, 11), (40, 5), (7, 7))]
    batch = pack(samples, Packing(**place))
    is_token = torch.cat([slice_with_cp(torch.ones(len(sample)), 0, **place) for sample in samples]).bool()
    for name, more in FAMILIES.items():
        torch.manual_seed(0)
        config = AutoConfig.for_model(name, **SIZES, **more)
        hf = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        with torch.no_grad():
            logits = [hf(sample[None], use_cache=False).logits[0] for sample in samples]
            alone = torch.cat([slice_with_cp(of_one, 0, **place) for of_one in logits]).log_softmax(-1)
            hf.set_attn_implementation(PACKED_ATTENTION)
            inputs = {"input_ids": batch["tokens"], "position_ids": batch["position_ids"]}
            packed = hf(**inputs, pack=batch["packed_seq_params"], use_cache=False).logits[0].log_softmax(-1)
        assert (packed[: len(alone)] - alone)[is_token].abs().max() < 2e-6, name


def test_every_model_that_is_exact_is_accepted_by_its_name_alone(qwen3: Path, tmp_path: Path) -> None:
    """Without a family of Megatron's, its sizes are those of its config."""
    line, command_line = "--train-backend fsdp --accelerator cpu --debug-train-only --hf-checkpoint", CommandLine()
    windows = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
    for name, more in [*FAMILIES.items(), ("qwen2", windows)]:
        config = {"model_type": name, **SIZES, **more, "tie_word_embeddings": True}
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "tokenizer_config.json").write_text("{}")
        (tmp_path / "model.safetensors").write_bytes((qwen3 / "model.safetensors").read_bytes())
        checked = command_line.check([*line.split(), str(tmp_path)])
        assert not [problem for problem in checked.problems.all() if "config" in problem or "checkpoint" in problem], (
            name
        )
        args = checked.args
        assert (args.num_layers, args.hidden_size, args.num_query_groups, args.kv_channels) == (2, 32, 2, 8), name
        assert args.untie_embeddings_and_output_weights is False


@pytest.mark.processes
def test_the_gradients_of_a_pass_are_not_copied_into_zeros(qwen3: Path) -> None:
    """Each copy reads and writes an activation: five of them in a layer took a tenth of a train step of 0.6B."""
    args = trainer_args(qwen3, MEGATRON, train_backend="fsdp", fsdp_min_group_params=1)
    run_world(1, _selections, args)


def _selections(args: Any) -> None:
    from slime.backends.fsdp_utils import model
    from slime.backends.megatron_utils.data import pack

    policy = model.build_policy(args, model.make_mesh(args))
    file = sys.modules[type(policy.hf).__module__]
    with mock.patch.object(file, "apply_rotary_pos_emb", model.rotate_both):
        output = policy(pack([torch.arange(9)]), lambda output: output.hidden.square().sum())
        with torch.profiler.profile() as trace:
            output.backward()
    ran = {event.key for event in trace.key_averages()}
    assert "aten::mm" in ran and "aten::select_backward" not in ran
