"""Layers whose tokens are mixed by a module of transformers: same numbers, same names, and what is refused."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slime.backends.megatron_utils.cp_utils import gathered_places
from slime.config.parse import CommandLine
from slime.models.families import family_of
from slime.models.hf_config import config_mismatches, unsupported_model
from slime.utils.errors import UsageError
from tests.unit.megatron_fakes import make_args, make_hf_model, packed, run_world
from tests.unit.test_hf_weights import assert_same_bytes, run_tool, tensors_of
from tests.unit.test_model_parity import (
    LENGTHS,
    TP2,
    check_gradients,
    check_logits,
    reference_gradients,
    reference_logits,
    token_ids,
)
from tests.unit.test_special_attention import check_that_no_sequence_sees_another
from tools import convert_hf_to_torch_dist, convert_torch_dist_to_hf

SPEC = ["slime_plugins.models.hf_attention", "get_hf_attention_spec"]
PAGE = Path(__file__).resolve().parents[2] / "docs" / "architectures_beyond_megatron.md"
RULES = {"hunyuan_v1_dense": "llama", "smollm3": "llama", "lfm2": "my_lfm2:RULES"}
SPECS = {"lfm2": ["my_lfm2", "spec"]}


@pytest.fixture(autouse=True)
def my_lfm2(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The plugin of the documentation, where Python finds it."""
    (written,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    path = tmp_path_factory.mktemp("plugin") / "my_lfm2.py"
    path.write_text(written)
    monkeypatch.syspath_prepend(path.parent)
    monkeypatch.delitem(sys.modules, "my_lfm2", raising=False)
    return path


def wrapped_args(path: Path, family: str, flags: str = "", **more):
    return make_args(path, flags, **{"spec": SPECS.get(family, SPEC), "model_name": RULES.get(family), **more})


@pytest.mark.processes
@pytest.mark.parametrize(
    ("family", "flags"),
    [
        ("llama", ""),
        ("llama", "--tensor-model-parallel-size 2"),
        ("qwen3_moe", f"{TP2} --expert-model-parallel-size 2"),
        ("minimax_m2", ""),
        ("glm4", ""),
        ("deepseek_v3", ""),
        ("qwen3_5", TP2),
        ("qwen3_next", ""),
        ("hunyuan_v1_dense", ""),
        ("smollm3", ""),
        ("smollm3", "--recompute-granularity selective"),
        ("lfm2", TP2),
    ],
)
def test_logits_equal_those_of_the_hf_model(tmp_path, family, flags):
    hf_model = make_hf_model(tmp_path / "hf", family)
    args, ids = wrapped_args(tmp_path / "hf", family, flags), token_ids(100)
    run_world(args.actor_num_gpus_per_node, check_logits, args, ids, reference_logits(hf_model, ids))


@pytest.mark.processes
@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5", "hunyuan_v1_dense", "smollm3", "lfm2"])
def test_gradients_equal_those_of_the_hf_model(tmp_path, family):
    hf_model, ids = make_hf_model(tmp_path / "hf", family), token_ids(100)
    weights = torch.randn(1, sum(LENGTHS), 100, generator=torch.Generator().manual_seed(4))
    expected = reference_gradients(hf_model, ids, weights)
    run_world(1, check_gradients, wrapped_args(tmp_path / "hf", family), ids, weights, expected)


@pytest.mark.processes
@pytest.mark.parametrize("family", ["qwen3_next", "lfm2"])
def test_nothing_of_a_sequence_reaches_another_one_of_the_pack(tmp_path, family):
    make_hf_model(tmp_path / "hf", family)
    run_world(1, check_that_no_sequence_sees_another, wrapped_args(tmp_path / "hf", family))


def delta_nets_alone(args, config, vp_stage=None):
    """A --spec: every second layer has the attention that the flags describe."""
    from slime_plugins.models.hf_attention import hf_attention_block

    return hf_attention_block(args, config, vp_stage, is_wrapped=lambda layer: layer % 2 == 0)


@pytest.mark.processes
def test_some_layers_may_have_what_the_flags_describe(tmp_path):
    hf_model = make_hf_model(tmp_path / "hf", "qwen3_next")
    args = wrapped_args(tmp_path / "hf", "qwen3_next", TP2, spec=[__name__, "delta_nets_alone"])
    ids = token_ids(100)
    run_world(2, check_logits, args, ids, reference_logits(hf_model, ids))


def check_gradients_of_ranks(args, expected):
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.utils import get_model_config

    from slime.backends.megatron_utils.model.setup import build_model

    model = build_model(args)
    ddp = DistributedDataParallel(get_model_config(model), DistributedDataParallelConfig(), model)
    for param in model.parameters():
        param.main_grad.fill_(2.0 + 2 * torch.distributed.get_rank())  # 2 and 4
    finalize_model_grads([ddp])
    found = {float(p.main_grad.mean()) for name, p in model.named_parameters() if ".self_attention.hf." in name}
    assert found == {expected}


@pytest.mark.processes
@pytest.mark.parametrize(("flags", "expected"), [("--tensor-model-parallel-size 2", 3.0), (TP2, 6.0)])
def test_tensor_parallel_ranks_end_with_the_same_gradients(tmp_path, flags, expected):
    """Whole ones that kernels added up in another order are averaged, those of a rank's own rows are summed."""
    make_hf_model(tmp_path / "hf", "qwen3_5_text")  # its config norms queries, which Megatron sums by their name
    run_world(2, check_gradients_of_ranks, wrapped_args(tmp_path / "hf", "qwen3_5_text", flags), expected)


def check_unpacked(args, ids, expected):
    from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights
    from slime.backends.megatron_utils.model_provider import get_model_provider_func

    model = get_model_provider_func(args)()
    load_hf_weights(args, [model], args.hf_checkpoint)
    assert (model(ids, None, None)[..., :100] - expected).abs().max() < 1e-5


@pytest.mark.processes
def test_a_batch_without_packing_is_one_sequence_a_row(tmp_path):
    hf_model = make_hf_model(tmp_path / "hf", "smollm3")
    ids = token_ids(100)[:, :42].view(3, 14)
    with torch.no_grad():
        run_world(1, check_unpacked, wrapped_args(tmp_path / "hf", "smollm3"), ids, hf_model(ids).logits)


def check_16_bit(args, ids, expected):
    from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights
    from slime.backends.megatron_utils.model.setup import build_model
    from slime.backends.megatron_utils.model_provider import unwrap

    model = build_model(args)
    load_hf_weights(args, [model], args.hf_checkpoint)
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    attention = unwrap(model).decoder.layers[0].self_attention
    assert attention._rotary[0].inv_freq.dtype == torch.float32
    attention.mixer.register_buffer("table", torch.ones(2), persistent=False)
    assert model.half() is model and attention.mixer.table.dtype == torch.float32
    model.bfloat16()
    with torch.no_grad():
        logits = model(ids, None, None, packed_seq_params=packed(LENGTHS))
    assert logits.dtype == torch.bfloat16
    ours, theirs = (x[..., :100].float().log_softmax(-1) for x in (logits, expected))
    assert (ours - theirs).abs().mean() < 1e-2


@pytest.mark.processes
def test_frequencies_and_buffers_stay_in_fp32_in_a_16_bit_model(tmp_path):
    hf_model = make_hf_model(tmp_path / "hf", "smollm3", dtype="bfloat16")
    ids = token_ids(100)
    args = wrapped_args(tmp_path / "hf", "smollm3")
    vars(args).update(bf16=True, params_dtype=torch.bfloat16)
    run_world(1, check_16_bit, args, ids, reference_logits(hf_model, ids))


def check_kinds(args, expected):
    """The module is given what transformers' model of this architecture gives its own."""
    from megatron.core import parallel_state

    from slime.backends.megatron_utils.model_provider import transformer_config
    from slime_plugins.models.hf_attention import HFAttention

    config = transformer_config(args)
    groups = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_context_parallel_group()
    group = type("Groups", (), {"tp": groups[0], "cp": groups[1]})
    hidden = expected["hidden"]
    for number, (weights, out) in enumerate(expected["layers"], start=1):
        layer = HFAttention(config, number, group, args.hf_checkpoint)
        layer.mixer.load_state_dict(weights)
        found, _ = layer(hidden.transpose(0, 1))
        assert (found.transpose(0, 1) - out).abs().max() < 1e-6, number
        (again, _) = layer(hidden.flatten(0, 1)[:, None], packed_seq_params=packed([hidden.shape[1]] * 2))
        assert (again.view(out.shape) - out).abs().max() < 1e-6, number


@pytest.mark.processes
@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss"])
def test_masks_and_positions_are_those_of_the_layers_kind(tmp_path, family):
    """Gemma 3 rotates layers with a window by another base; gpt-oss has sinks, and no kernel but its own code."""
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4, "head_dim": 16}
    model = make_hf_model(tmp_path / "hf", family, **kinds, pad_token_id=None)
    seen = {}
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.register_forward_hook(
            lambda module, given, kwargs, out, index=index: seen.update({index: (kwargs, out[0])}), with_kwargs=True
        )
    ids = torch.arange(26).view(2, 13)
    with torch.no_grad():
        model(ids)
        hidden = seen[0][0]["hidden_states"]
        layers = []
        for index, layer in enumerate(model.model.layers):
            kwargs = seen[index][0] | {"hidden_states": hidden, "past_key_values": None}
            layers.append((layer.self_attn.state_dict(), layer.self_attn(**kwargs)[0]))
    llama = make_hf_model(tmp_path / "llama", "llama") and make_args(tmp_path / "llama")
    llama.hf_checkpoint = str(tmp_path / "hf")
    run_world(1, check_kinds, llama, {"hidden": hidden, "layers": layers})


def save_and_send(args, out):
    """Load, export in buckets, and tell which names a sync would send."""
    from slime.backends.megatron_utils.checkpoint.hf_export import save_hf
    from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights
    from slime.backends.megatron_utils.model_provider import build_stage

    model = build_stage(args)
    load_hf_weights(args, [model], args.hf_checkpoint)
    save_hf(args, [model], out)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("family", "flags"),
    [("lfm2", TP2), ("qwen3_5", "--pipeline-model-parallel-size 2"), ("smollm3", "")],
)
def test_weights_travel_to_megatron_and_back_unchanged(tmp_path, family, flags):
    make_hf_model(tmp_path / "hf", family)
    args = wrapped_args(tmp_path / "hf", family, flags, update_weight_buffer_size=10_000)
    run_world(args.actor_num_gpus_per_node, save_and_send, args, str(tmp_path / "out"))
    back, there = tensors_of(tmp_path / "out"), load_file(tmp_path / "hf" / "model.safetensors")
    assert_same_bytes(back, there)


def flags_of(path: Path, family: str) -> list[str]:
    """All flags of a tiny model without a family of its own, as its user gives them."""
    config = json.loads((path / "config.json").read_text())
    return [
        *(
            "--spec",
            *SPECS.get(family, SPEC),
            "--model-name",
            RULES[family],
            "--num-layers",
            "2",
            "--hidden-size",
            "32",
        ),
        *("--ffn-hidden-size", "48", "--num-attention-heads", "4", "--vocab-size", "100"),
        *("--group-query-attention", "--num-query-groups", "2", "--normalization", "RMSNorm"),
        *(
            "--norm-epsilon",
            str(config.get("rms_norm_eps") or config["norm_eps"]),
            "--swiglu",
            "--disable-bias-linear",
        ),
        *("--untie-embeddings-and-output-weights", "--position-embedding-type", "rope"),
    ]


@pytest.mark.processes
@pytest.mark.parametrize("family", ["lfm2", "smollm3"])
def test_the_conversion_tools_take_an_architecture_of_ones_own(tmp_path, family):
    make_hf_model(tmp_path / "hf", family)
    hf, megatron, out = (str(tmp_path / name) for name in ("hf", "megatron", "out"))
    run_tool(convert_hf_to_torch_dist, "--hf-checkpoint", hf, "--save", megatron, *flags_of(tmp_path / "hf", family))
    there = ("--input-dir", megatron, "--output-dir", out, "--origin-hf-dir", hf)
    run_tool(convert_torch_dist_to_hf, *there, "--model-name", RULES[family])
    assert_same_bytes(tensors_of(tmp_path / "out"), tensors_of(tmp_path / "hf"))


def test_a_module_of_transformers_has_its_hf_names():
    name = "module.decoder.layers.7.self_attention.hf.linear_attn.conv1d.weight"
    for family, found in (
        ("llama", "model.layers.7.linear_attn.conv1d.weight"),
        ("qwen3_5", "model.language_model.layers.7.linear_attn.conv1d.weight"),
    ):
        assert family_of(family).find(name, 8)[1] == (found,)


def test_rules_of_ones_own_are_named_by_their_path(my_lfm2):
    assert family_of("my_lfm2:RULES").model_type == family_of(f"{my_lfm2}:RULES").model_type == "lfm2"
    for path, said in (
        ("my_lfm2:OURS", "is a str, not a slime.models.family.Family"),
        ("my_lfm2:NONE", "no attribute 'NONE'"),
        ("no.such.module:RULES", "no module 'no'"),
    ):
        with pytest.raises(UsageError, match=said):
            family_of(path)


def test_an_unknown_architecture_is_accepted_with_its_layers_and_its_rules():
    config = {"model_type": "smollm3"}
    assert "--spec and --model-name" in " ".join(unsupported_model(config))
    assert unsupported_model(config, has_own_layers=True) == []
    fp8 = config | {"quantization_config": {"quant_method": "fp8"}}
    assert "take one in 16 bit" in " ".join(unsupported_model(fp8, has_own_layers=True))
    known = {"model_type": "qwen3_next", "quantization_config": {"quant_method": "fp8"}}
    assert unsupported_model(known, has_own_layers=True) == unsupported_model(known) != []


def test_the_command_line_of_the_documentation_describes_the_model_that_it_names(tmp_path):
    from transformers import SmolLM3Config

    SmolLM3Config().save_pretrained(tmp_path)
    (written,) = re.findall(r"MODEL_ARGS=\((.*?)\)", PAGE.read_text(), re.DOTALL)
    line = [
        "--accelerator",
        "cuda",
        "--actor-num-gpus-per-node",
        "8",
        "--colocate",
        "--dry-run",
        *shlex.split(written),
    ]
    line += ["--hf-checkpoint", str(tmp_path), "--prompt-data", "x", "--rollout-batch-size", "8", "--num-rollout", "1"]
    line.append("--dry-run")

    def said(*flags: str) -> list[str]:
        problems = CommandLine().check([*line, *flags]).problems
        return [*problems.wrong, *problems.unsupported]

    assert said() == said("--context-parallel-size", "2") == []
    assert "--num-layers: the flags say 35" in " ".join(said("--num-layers", "35"))


def test_what_no_shape_would_tell_is_compared_with_the_config_of_any_architecture(tmp_path):
    make_hf_model(tmp_path / "hf", "smollm3")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    args = wrapped_args(tmp_path / "hf", "smollm3")
    assert config_mismatches(args, config) == []
    other = config | {"rms_norm_eps": 0.5, "tie_word_embeddings": True, "num_hidden_layers": 3, "hidden_act": "gelu"}
    said = " ".join(config_mismatches(args, other))
    for flag in ("--norm-epsilon", "--untie-embeddings-and-output-weights", "--num-layers", "hidden_act 'gelu'"):
        assert flag in said


def test_gathered_rows_find_their_places():
    assert gathered_places([0, 4, 8], 2).tolist() == [0, 3, 4, 7, 1, 2, 5, 6]
    assert gathered_places([0, 8, 12], 1).tolist() == list(range(12))


def check_refusals(args):
    from megatron.core import parallel_state

    from slime.backends.megatron_utils.model_provider import transformer_config
    from slime_plugins.models.hf_attention import HFAttention, hf_model

    groups = {"tp": parallel_state.get_tensor_model_parallel_group(), "cp": None}
    where = (transformer_config(args), 1, type("Groups", (), groups), args.hf_checkpoint)

    class Unknown(HFAttention):
        @property
        def hf_layer(self):
            return torch.nn.ModuleDict({"mystery": torch.nn.Identity()})

    class WithBuffer(HFAttention):
        def build_mixer(self):
            return "self_attn", torch.nn.BatchNorm1d(3)

    for kind, said in ((Unknown, "has mystery: not one of self_attn"), (WithBuffer, "saves self_attn.num_batches")):
        with pytest.raises(UsageError, match=said):
            kind(*where)
    with pytest.raises(UsageError, match="transformers cannot build the model of --hf-checkpoint /nowhere"):
        hf_model("/nowhere")


@pytest.mark.processes
def test_what_cannot_be_wrapped_is_refused_with_what_to_do(tmp_path):
    make_hf_model(tmp_path / "hf", "llama")
    run_world(1, check_refusals, make_args(tmp_path / "hf"))
