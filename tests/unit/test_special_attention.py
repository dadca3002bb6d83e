"""Attention that is not Megatron's own: what of a pack reaches what, which keys are chosen, what goes together."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch

from slime.config.megatron.model_checks import ATTENTION, check_indexer_stages
from slime.config.parse import CommandLine
from slime.config.problems import broken
from slime.config.rules.devices import check_indexers
from slime.models.deepseek import indexer_types
from slime.utils.model_shape import linear_attention_pattern
from tests.unit.megatron_fakes import make_args, make_hf_model, packed, run_world
from tests.unit.script_fakes import hf_config, script_flags

LENGTHS = [70, 3, 70, 1, 21]
DELTA_NET = "--experimental-attention-variant gated_delta_net --num-attention-heads 8 --num-layers 4"
SPARSE = "--experimental-attention-variant dsa --multi-latent-attention --num-attention-heads 8 --num-layers 4"
INDEXER = "--dsa-indexer-n-heads 4 --dsa-indexer-head-dim 16 --dsa-indexer-topk 8"


def check_that_no_sequence_sees_another(args):
    from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights
    from slime.backends.megatron_utils.model_provider import get_model_provider_func

    model = get_model_provider_func(args)()
    load_hf_weights(args, [model], args.hf_checkpoint)
    ids = torch.randint(0, 100, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(3))
    other = ids.clone()
    other[:, 70:73] = (ids[:, 70:73] + 1) % 100  # the second sequence
    weights = torch.randn(sum(LENGTHS), 100, generator=torch.Generator().manual_seed(4))
    weights[70:73] = 0  # nor is the loss of another one
    found = []
    for tokens in (ids, other):
        for param in model.parameters():  # what DistributedDataParallel gives them: some gradients are added up in it
            param.grad, param.main_grad = None, torch.zeros_like(param)
        logits = model(tokens, None, None, packed_seq_params=packed(LENGTHS))[0, :, :100]
        (logits * weights).sum().backward()
        found.append((logits.detach(), model.embedding.word_embeddings.weight.grad))
    # Experts have other tokens beside theirs, which changes last bits.
    changed = ((found[0][0] - found[1][0]).abs() > 1e-5).any(dim=-1)
    assert changed.nonzero().flatten().tolist() == [70, 71, 72]
    torch.testing.assert_close(found[0][1], found[1][1], atol=1e-4, rtol=1e-4)
    assert found[0][1].abs().max() > 0.1


@pytest.mark.processes
@pytest.mark.parametrize("family", ["qwen3_next", "glm_moe_dsa", "minimax_m2"])
def test_nothing_of_a_sequence_reaches_another_one_of_the_pack(tmp_path, family):
    make_hf_model(tmp_path / "hf", family)
    run_world(1, check_that_no_sequence_sees_another, make_args(tmp_path / "hf"))


def test_the_torch_rule_is_the_recurrence():
    """S_t = exp(g_t) S_(t-1) + k_t (beta_t (v_t - exp(g_t) S_(t-1)^T k_t))^T and o_t = S_t^T q_t / sqrt(d)."""
    from slime_plugins.models.gated_delta_net import torch_delta_rule

    torch.manual_seed(0)
    lengths, heads, d, e = [5, 66, 2], 2, 4, 3
    total = sum(lengths)
    q, k = (torch.nn.functional.normalize(torch.randn(total, heads, d), dim=-1) for _ in range(2))
    v, g, beta = torch.randn(total, heads, e), -torch.rand(total, heads), torch.rand(total, heads)
    expected = []
    for first, length in zip((0, 5, 71), lengths, strict=True):
        state = torch.zeros(heads, d, e)
        for t in range(first, first + length):
            state = state * g[t].exp()[:, None, None]
            known = torch.einsum("hde,hd->he", state, k[t])
            state = state + torch.einsum("hd,he->hde", k[t], beta[t][:, None] * (v[t] - known))
            expected.append(torch.einsum("hde,hd->he", state, q[t]) / d**0.5)
    cu_seqlens = torch.tensor([0, 5, 71, 73], dtype=torch.int32)
    torch.testing.assert_close(torch_delta_rule(q, k, v, g, beta, cu_seqlens), torch.stack(expected))


def test_the_convolution_starts_again_in_each_sequence():
    from slime_plugins.models.gated_delta_net import causal_conv

    # Weights 1, 10, 100 of the tokens two and one before and of the token itself.
    weight, x = torch.tensor([[[1.0, 10.0, 100.0]]]), torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    total = torch.tensor([[100.0], [210.0], [300.0], [430.0]])
    found = causal_conv(x, weight, torch.tensor([0, 2, 4], dtype=torch.int32))
    torch.testing.assert_close(found, torch.nn.functional.silu(total))


def test_the_number_of_full_layers_and_a_list_mean_the_same():
    assert linear_attention_pattern(4, 5) == linear_attention_pattern([1, 1, 1, 0, 1], 5) == [1, 1, 1, 0, 1]
    assert linear_attention_pattern(None, 2) == [0, 0]


def test_layers_without_an_indexer_take_the_choice_of_the_last_that_has_one():
    """As transformers counts: the first two layers have one, then every second."""
    from transformers import GlmMoeDsaConfig

    kinds = ["full", "full", "shared", "full", "shared"]
    settings = {"index_topk_freq": 2, "index_skip_topk_offset": 2}
    assert GlmMoeDsaConfig(num_hidden_layers=5, **settings).indexer_types == kinds
    assert indexer_types(settings, 5) == indexer_types({"index_topk_pattern": "FFSFS"}, 5) == kinds
    assert indexer_types({"indexer_types": kinds}, 5) == kinds
    assert indexer_types({}, 3) == ["full"] * 3


def check_plans(args, found):
    from slime_plugins.models.glm5.glm5 import indexer_plans

    plans = indexer_plans({"index_topk_pattern": "FFSFSS", "indexer_rope_interleave": True}, 6)
    assert [plan.chooser for plan in plans] == [1, 2, 2, 4, 4, 4]
    assert all(plan.is_interleaved for plan in plans)


@pytest.mark.processes
def test_every_layer_knows_whose_indexer_chooses_for_it():
    run_world(1, check_plans, make_args(), None)


def test_a_pipeline_stage_that_begins_with_a_layer_without_an_indexer_is_refused(tmp_path):
    flags = f"{SPARSE} {INDEXER} --q-lora-rank 8 --hidden-size 64 --pipeline-model-parallel-size 2"
    by_two = {"index_topk_freq": 2}  # full, full, shared, full: as transformers counts

    def said(more: str = "", config: dict[str, object] = by_two) -> str:
        return " ".join(check_indexer_stages(make_args(None, f"{flags} {more}"), config))

    assert "begin with the layers 2 (from 0), which take the keys" in said() and "one of 0, 1, 3, by" in said()
    assert said("--decoder-last-pipeline-num-layers 1") == said("--pipeline-model-parallel-layout Ettt|tL") == ""
    assert "the layers 2 (from 0)" in said("--num-virtual-stages-per-pipeline-rank 2")
    assert said(config={}) == ""


def problems(flags: str) -> list[str]:
    return list(broken(ATTENTION, make_args(None, f"--hidden-size 64 {flags}")))


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (DELTA_NET, "needs --linear-attention-freq"),
        (f"{DELTA_NET} --linear-attention-freq [1,0]", "lists 2 layers, --num-layers says 4"),
        (f"{DELTA_NET} --linear-attention-freq 4 --linear-num-value-heads 24", "does not divide by"),
        (
            f"{DELTA_NET} --linear-attention-freq 4 --linear-conv-kernel-dim 0",
            "--linear-conv-kernel-dim of at least 1",
        ),
        (f"{SPARSE} --q-lora-rank 8", "needs --dsa-indexer-n-heads"),
        (f"{SPARSE} {INDEXER}", "--q-lora-rank, from whose queries"),
        (f"{SPARSE} {INDEXER} --q-lora-rank 8 --recompute-granularity selective", "selective of core_attn"),
        ("--num-attention-heads 8 --spec a.module", "a module and the name of a function"),
        ("--num-attention-heads 8 --spec no.such fn", "there is no module no.such on the Python path"),
        ("--num-attention-heads 8 --spec slime_plugins.models.glm6 fn", "no module slime_plugins.models.glm6"),
        (
            "--num-attention-heads 8 --spec slime_plugins.models.glm5.glm5 get_glm6_spec",
            "glm5.py has no get_glm6_spec",
        ),
        (
            "--num-attention-heads 8 --attention-output-gate --group-query-attention --num-query-groups 2 "
            "--tensor-model-parallel-size 4",
            "at most as many ranks as groups",
        ),
        (
            "--num-attention-heads 8 --spec slime_plugins.models.minimax_m2 get_minimax_m2_spec "
            "--group-query-attention --num-query-groups 2 --tensor-model-parallel-size 4",
            "--num-query-groups 2: its norm goes over the keys of all heads",
        ),
    ],
)
def test_flags_that_do_not_make_a_layer_are_named(flags, named):
    found = problems(flags)
    assert any(named in sentence for sentence in found), found


def test_flags_that_make_a_layer_are_accepted():
    assert problems(f"{DELTA_NET} --linear-attention-freq 4 --attention-output-gate") == []
    assert problems(f"{SPARSE} {INDEXER} --q-lora-rank 8") == []


def test_a_model_without_indexers_has_none_to_freeze():
    def said(variant: str | None) -> str:
        return " ".join(
            check_indexers(argparse.Namespace(freeze_indexer=True, experimental_attention_variant=variant))
        )

    assert said("dsa") == ""
    assert "no indexer to freeze" in said(None)


@pytest.mark.parametrize(
    ("model", "flags", "said"),
    [
        ("qwen3-next-80B-A3B", ["--mtp-num-layers", "1"], "(model_type qwen3_next) has 0 layers that predict"),
        ("deepseek-v3.2", ["--mtp-num-layers", "1"], "there are rules for those of mimo, glm4_moe"),
        ("minimax-m2", ["--mtp-num-layers", "1"], "there are rules for those of mimo, glm4_moe"),
    ],
)
def test_what_a_special_layer_cannot_do_yet_is_refused_with_the_flag_to_change(
    tmp_path: Path, model: str, flags: list[str], said: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(hf_config(model)))
    place = ["--accelerator", "cuda", "--actor-num-nodes", "2", "--actor-num-gpus-per-node", "8", "--colocate"]
    line = [*script_flags(model), *place, "--hf-checkpoint", str(tmp_path), "--dry-run", *flags]
    problems = CommandLine().check([*line, "--prompt-data", "x"]).problems
    (sentence,) = [one for one in [*problems.wrong, *problems.unsupported] if flags[0] in one]
    assert said in sentence and ("use 1" in sentence or "leave it out" in sentence)


def test_the_config_of_a_checkpoint_is_looked_at_for_layers_that_share_a_choice(tmp_path: Path) -> None:
    def said(**config: object) -> list[str]:
        (tmp_path / "config.json").write_text(json.dumps(hf_config("glm5.2-744B-A40B") | config))
        place = ["--accelerator", "cuda", "--actor-num-nodes", "2", "--actor-num-gpus-per-node", "8", "--colocate"]
        stages = ["--pipeline-model-parallel-size", "2", "--hf-checkpoint", str(tmp_path), "--prompt-data", "x"]
        checked = CommandLine().check([*script_flags("glm5.2-744B-A40B"), *place, *stages, "--dry-run"])
        return [sentence for sentence in checked.problems.wrong if "pipeline stages begin with" in sentence]

    # 78 layers: the second stage begins with layer 39; those with an indexer are 0, 1, 3, 5, ... or 0, 1, 5, 9, ...
    assert said(index_topk_freq=2) == said() == []
    (sentence,) = said(index_topk_freq=4)
    assert sentence.startswith("pipeline stages begin with the layers 39 (from 0)")


def test_every_layer_gives_fla_the_same_tensor():
    """fla keeps what it reads from the GPU about a pack with the tensor that says where sequences start."""
    from slime_plugins.models.gated_delta_net import _in_int64

    ends = torch.tensor([0, 3, 8], dtype=torch.int32)
    assert _in_int64(ends) is _in_int64(ends)
    assert _in_int64(ends).dtype == torch.int64 and _in_int64(ends).tolist() == [0, 3, 8]
    assert _in_int64(_in_int64(ends)) is _in_int64(ends)
