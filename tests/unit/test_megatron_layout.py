"""Parallel layouts: what contradicts what, with the nearest layout that works."""

from __future__ import annotations

import argparse
import re

import pytest

from slime.config.megatron.arguments import add_megatron_arguments, derive_megatron, megatron_problems
from slime.config.megatron.derived import Layout, nearest_divisor
from slime.config.megatron.layout_checks import layout_problems
from slime.config.problems import NoEffect
from tests.unit.megatron_fakes import SLIME_DEFAULTS

MODEL = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 13696 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --vocab-size 151552 --swiglu --disable-bias-linear --normalization RMSNorm"
)
TP, PP, CP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size"
EP = "--expert-model-parallel-size"
EXPERTS = "--num-experts 64 --moe-ffn-hidden-size 1408 --moe-router-topk 6"


def parse(flags: str, *, gpus: int = 8, **values):
    parser = add_megatron_arguments(argparse.ArgumentParser())
    args = parser.parse_args(f"{MODEL} {flags}".split())
    options = parser._option_string_actions
    explicit = {options[token].dest for token in f"{MODEL} {flags}".split() if token in options}
    vars(args).update(SLIME_DEFAULTS | {"accelerator": "cuda", "actor_num_gpus_per_node": gpus} | values)
    vars(args).update(derive_megatron(args))
    return args, explicit


@pytest.mark.parametrize(
    ("gpus", "flags", "sentence"),
    [
        (
            6,
            "--tensor-model-parallel-size 4",
            "6 trainer GPUs or slots (--actor-num-nodes x --actor-num-gpus-per-node) do not divide by "
            "--tensor-model-parallel-size 4; the nearest layout that works: --tensor-model-parallel-size 2.",
        ),
        (
            8,
            "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 4",
            "do not divide by --tensor-model-parallel-size 4 x --pipeline-model-parallel-size 4 = 16; the nearest "
            "layout that works: --tensor-model-parallel-size 2.",
        ),
        (
            12,
            "--tensor-model-parallel-size 3",
            "--num-attention-heads 32, --ffn-hidden-size 13696, --num-query-groups 8 do not divide by "
            "--tensor-model-parallel-size 3; the nearest layout that works: --tensor-model-parallel-size 2.",
        ),
        (8, "--num-query-groups 5", "32 does not divide by --num-query-groups 5; the nearest that works is 4."),
        (
            6,
            "--pipeline-model-parallel-size 3",
            "--num-layers 32 does not divide into 3 pipeline stages of one size (--pipeline-model-parallel-size 3); "
            f"the nearest layout that works: {PP} 2.",
        ),
        (
            # 32 - 5 = 27 layers on the three other stages would do; on 32 - 6 = 26 they do not
            4,
            "--pipeline-model-parallel-size 4 --decoder-last-pipeline-num-layers 6",
            "--num-layers 32 without --decoder-last-pipeline-num-layers 6 leaves 26, which does not divide into 3",
        ),
        (
            4,
            "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 3",
            "--num-layers-per-virtual-pipeline-stage 3 does not divide a stage of 8 layers; the nearest layout that "
            "works: --num-layers-per-virtual-pipeline-stage 2.",
        ),
        (
            4,
            "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 3",
            "--num-virtual-stages-per-pipeline-rank 3 does not divide a stage of 8 layers; the nearest layout that "
            "works: --num-virtual-stages-per-pipeline-rank 2.",
        ),
        (
            4,
            "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 "
            "--num-layers-per-virtual-pipeline-stage 4",
            "exclude each other",
        ),
        (
            # the other 28 layers are one stage
            8,
            "--decoder-first-pipeline-num-layers 4",
            f"--decoder-first-pipeline-num-layers 4 cannot be met with {PP} 1; the nearest layout that works: {PP} 2.",
        ),
        (
            # 32 + 1 layers divide by 3, 11 and 33, none of which divides 8 GPUs
            8,
            "--account-for-loss-in-pipeline-split",
            f"--account-for-loss-in-pipeline-split cannot be met with {PP} 1; the nearest layout that works: "
            "--account-for-loss-in-pipeline-split left out.",
        ),
        (12, "--account-for-loss-in-pipeline-split", f"{PP} 1; the nearest layout that works: {PP} 3."),
        (
            8,
            f"{TP} 8 --num-virtual-stages-per-pipeline-rank 4",
            f"--num-virtual-stages-per-pipeline-rank 4 cannot be met with {PP} 1; the nearest layout that works: "
            "--num-virtual-stages-per-pipeline-rank 1.",
        ),
        (
            8,
            "--num-virtual-stages-per-pipeline-rank 4",
            f"rank 4 cannot be met with {PP} 1; the nearest layout that works: {PP} 2.",
        ),
        (
            8,
            "--pipeline-model-parallel-layout Et*32L",
            f"--pipeline-model-parallel-layout Et*32L cannot be met with {PP} 1; the nearest layout that works: "
            "--pipeline-model-parallel-layout left out.",
        ),
        (
            8,
            "--pipeline-model-parallel-layout Et*8|t*8|t*8|t*8L",
            f"cannot be met with {PP} 1; the nearest layout that works: {PP} 2.",
        ),
        (
            8,
            f"{EXPERTS} --multi-latent-attention --tensor-model-parallel-size 2",
            "--multi-latent-attention with --tensor-model-parallel-size 2 needs --sequence-parallel",
        ),
        (8, "--expert-model-parallel-size 8", "--expert-model-parallel-size 8 needs --num-experts"),
        (
            # 4 divides 64 experts, but not 6 GPUs
            6,
            f"{EXPERTS} --expert-model-parallel-size 6",
            f"--num-experts 64 does not divide by {EP} 6; the nearest layout that works: {EP} 2.",
        ),
        (
            8,
            f"{EXPERTS} --expert-model-parallel-size 16",
            "8 trainer GPUs or slots do not divide by --expert-tensor-parallel-size 1 x --expert-model-parallel-size "
            f"16 x --pipeline-model-parallel-size 1 = 16; the nearest layout that works: {EP} 8.",
        ),
        (
            2,
            f"{EXPERTS} --expert-tensor-parallel-size 4 --expert-model-parallel-size 2",
            "2 trainer GPUs or slots do not divide by --expert-tensor-parallel-size 4 x --expert-model-parallel-size "
            f"2 x {PP} 1 = 8; the nearest layout that works: --expert-tensor-parallel-size 1.",
        ),
        (
            # 3 divides 1002 = 2 * 3 * 167, but not 8 GPUs
            8,
            f"{EXPERTS} --moe-ffn-hidden-size 1002 --expert-tensor-parallel-size 4",
            "--moe-ffn-hidden-size 1002 does not divide by --expert-tensor-parallel-size 4; the nearest layout that "
            "works: --expert-tensor-parallel-size 2.",
        ),
        (
            8,
            f"{EXPERTS} --moe-shared-expert-intermediate-size 1001 --tensor-model-parallel-size 2 --sequence-parallel "
            "--expert-tensor-parallel-size 1",
            "--moe-shared-expert-intermediate-size 1001 does not divide by --tensor-model-parallel-size 2; the "
            "nearest layout that works: --tensor-model-parallel-size 1.",
        ),
        (
            8,
            "--sequence-parallel",
            "--sequence-parallel has no effect with --tensor-model-parallel-size 1, which leaves nothing to split ("
            "the nearest that works is 2); leave it out.",
        ),
        (8, "--expert-tensor-parallel-size 2", "--expert-tensor-parallel-size has no effect without --num-experts"),
        (8, f"{EXPERTS} --tensor-model-parallel-size 2", "needs --sequence-parallel"),
        (8, f"{EXPERTS} --moe-layer-freq [1]*31", "--moe-layer-freq lists 31 layers, --num-layers says 32."),
        (8, "--kv-channels 7", "--rotary-percent 1.0 of --kv-channels 7 is not an even number"),
        (8, f"{EXPERTS} --moe-router-enable-expert-bias", "softmax: the bias is added to sigmoid scores"),
        (8, "--num-experts 4 --moe-router-topk 1", "--moe-router-topk 1 with softmax scores needs"),
        (8, f"{EXPERTS} --moe-router-num-groups 8", "--moe-router-num-groups 8 has no effect without"),
        (
            8,
            f"{EXPERTS} --moe-router-num-groups 32 --moe-router-group-topk 2",
            "--moe-router-topk 6 is more than the 4 experts of --moe-router-group-topk 2 of 32 groups.",
        ),
        (8, f"{EXPERTS} --moe-router-num-groups 8 --moe-router-group-topk 8", "is more than --moe-router-topk 6"),
        (8, f"{EXPERTS} --moe-shared-expert-gate", "needs --moe-shared-expert-intermediate-size"),
        (8, f"{EXPERTS} --moe-router-load-balancing-type sinkhorn", "trains other choices than the engine's"),
        (
            8,
            f"{EXPERTS} --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.1",
            "seq_aux_loss with --moe-aux-loss-coeff 0.1: micro-batches have many sequences",
        ),
        (
            8,
            f"{EXPERTS} --moe-router-load-balancing-type none --moe-aux-loss-coeff 0.1",
            "--moe-aux-loss-coeff has no effect with --moe-router-load-balancing-type none; leave it out.",
        ),
        (8, f"{EXPERTS} --expert-tensor-parallel-size 0", "--expert-tensor-parallel-size 0 must be at least 1."),
        (8, f"{EXPERTS} --moe-z-loss-coeff -1", "--moe-z-loss-coeff -1.0 must be at least 0."),
        (8, f"{EXPERTS} --moe-router-bias-update-rate 0.01", "no effect without --moe-router-enable-expert-bias"),
        (8, f"{EXPERTS} --recompute-activations --recompute-modules mlp", "choose from core_attn, moe_act, layernorm"),
        (8, f"{EXPERTS} --recompute-activations --recompute-modules moe_act", "experts; add --moe-grouped-gemm."),
        (
            8,  # 32 layers on 8 stages of 4 chunks are one each
            "--pipeline-model-parallel-size 8 --num-virtual-stages-per-pipeline-rank 4 "
            "--fine-grained-activation-offloading --offload-modules core_attn",
            "has no effect where every pipeline stage has one layer, which goes backward at once (--num-layers 32 in "
            "32 stages); leave it out.",
        ),
        (
            8,  # 16 layers a stage
            "--pipeline-model-parallel-size 2 --cpu-offloading --cpu-offloading-num-layers 16",
            "--cpu-offloading-num-layers 16 with --cpu-offloading must be at most 15",
        ),
        (8, f"{EXPERTS} --moe-aux-loss-coeff 0.1 0.2", "names 1 losses, --moe-aux-loss-coeff has 2 values"),
        (8, "--multi-latent-attention --tensor-model-parallel-size 2", "needs --sequence-parallel"),
        (8, "--num-experts 4 --moe-router-topk 6", "--moe-router-topk 6 is more than --num-experts 4."),
        (
            # 32 heads on 4 tensor-parallel ranks are 8, which 6 context-parallel ranks cannot share; 8 ranks of 4 do
            # not divide 24 GPUs
            24,
            "--tensor-model-parallel-size 4 --context-parallel-size 6 --cp-comm-type a2a",
            "--cp-comm-type a2a: --num-attention-heads 32 does not divide by --tensor-model-parallel-size 4 x "
            "--context-parallel-size 6 = 24; the nearest layout that works: --context-parallel-size 2.",
        ),
    ],
)
def test_a_layout_that_cannot_be_is_wrong_and_the_nearest_is_named(gpus, flags, sentence):
    args, explicit = parse(flags, gpus=gpus)
    wrong = megatron_problems(args, None, explicit).wrong
    assert len(wrong) == 1, wrong
    assert sentence in wrong[0]
    assert_remedy_works(wrong[0], gpus, flags)


def assert_remedy_works(sentence, gpus, flags):
    """Follow what a sentence names as the nearest layout: nothing is wrong then."""
    _, _, changes = sentence.removesuffix(".").partition("the nearest layout that works: ")
    if not changes:
        return
    for change in changes.split(" with "):
        option, value = change.split(" ", 1)
        flags = re.sub(rf"{option}( [^-]\S*)?", "", flags) + (f" {change}" if value != "left out" else "")
    args, explicit = parse(flags, gpus=gpus)
    assert all(isinstance(problem, NoEffect) for problem in megatron_problems(args, None, explicit).wrong)


@pytest.mark.parametrize(
    ("gpus", "flags", "named"),
    [
        # 32 layers and 32 heads divide by powers of 2, of which one alone divides 3 GPUs
        (3, f"{TP} 3", f"{TP} 1"),
        (3, f"{PP} 3", f"{PP} 1"),
        (3, f"{EXPERTS} {EP} 3", f"{EP} 1"),
        # copies of 4 ranks are one and a half on 6 GPUs; copies of 2 are three
        (6, f"{TP} 2 {PP} 2", f"{TP} 1"),
        # 2 and 4 are as near to 3: the smaller
        (4, f"{CP} 3", f"{CP} 2"),
        (4, f"{PP} 3", f"{PP} 2"),
        # one size is no remedy where two are wrong
        (4, f"{TP} 3 {PP} 3", f"{TP} 2 with {PP} 2"),
        # ranks share heads of keys and values in equal numbers: 12 heads in 2 groups on 6 ranks
        (12, f"--num-attention-heads 12 --kv-channels 128 --ffn-hidden-size 96 --num-query-groups 2 {TP} 7",
         f"{TP} 6"),
        # ... and 5 is as near to 4 as to 6, by which 4 heads do not divide
        (4, f"--num-attention-heads 4 --num-query-groups 2 {TP} 5", f"{TP} 4"),
    ],
)  # fmt: skip
def test_the_nearest_size_works_with_model_gpus_and_other_sizes(gpus, flags, named):
    args, explicit = parse(flags, gpus=gpus)
    wrong = megatron_problems(args, None, explicit).wrong
    assert wrong[-1].endswith(f"; the nearest layout that works: {named}."), wrong
    assert_remedy_works(wrong[-1], gpus, flags)


@pytest.mark.parametrize(
    "flags",
    [
        "--tensor-model-parallel-size 8 --sequence-parallel",
        "--tensor-model-parallel-size 1 --expert-tensor-parallel-size 1 --expert-model-parallel-size 1",
    ],
)
def test_layouts_of_dense_models_with_tensor_parallelism_work(flags):
    args, explicit = parse(flags)
    assert megatron_problems(args, None, explicit).all() == []


def test_tensor_parallel_ranks_may_share_the_heads_of_keys_and_values():
    args, explicit = parse("--tensor-model-parallel-size 16", gpus=16)  # two ranks to each of 8 groups
    problems = megatron_problems(args, None, explicit)
    assert (problems.wrong, problems.unsupported) == ([], [])


def test_64_gpus_in_every_dimension_are_accepted():
    args, explicit = parse(
        f"{EXPERTS} --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 4 "
        "--context-parallel-size 2 --expert-model-parallel-size 8",
        actor_num_nodes=8,
    )
    problems = megatron_problems(args, None, explicit)
    assert (problems.wrong, problems.environment) == ([], [])
    assert problems.unsupported == []
    assert (args.world_size, args.data_parallel_size) == (64, 4)  # 64 / (2 * 4 * 2)
    assert Layout.of(args).expert_tensor == 2, "experts keep the tensor-parallel size"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("Et*16|t*16L", None),
        ("Et*7|t*8|t*9|t*8,L", None),
        (
            "t*16|Et*16L",
            "the first stage must begin with the embedding E and the last end with the output L, and have each once",
        ),
        # a first or a last stage of nothing
        ("Et*32L|", "the first stage must begin with the embedding E and the last end with the output L"),
        ("|Et*32L", "the first stage must begin with the embedding E and the last end with the output L"),
        ("|", "the first stage must begin with the embedding E and the last end with the output L"),
        ("Et*16|t*15L", "it has 31 decoder layers (t), the model has 32"),
        ("Et*16|t*15x|L", "'x' means nothing there"),
        ("Et*16|t*8|t*8L", "it has 3 stages, which 2 ranks cannot share equally; 2 or 4 work"),
        ("Et*32|mL", "it has 1 prediction layers (m), the model has 0"),
        ("Et*99999999999|tL", "it describes more than 10000 layers and stages"),
    ],
)
def test_stages_written_as_text_are_those_of_the_model(text, sentence):
    args, explicit = parse(
        f"--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout {text}", mtp_num_layers=None
    )
    problems = megatron_problems(args, None, explicit).wrong
    assert [sentence in problem for problem in problems] == ([True] if sentence else [])


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--num-virtual-stages-per-pipeline-rank 2", None),
        (
            "--num-virtual-stages-per-pipeline-rank 2 --microbatch-group-size-per-virtual-pipeline-stage 1",
            "--microbatch-group-size-per-virtual-pipeline-stage 1 is less than --pipeline-model-parallel-size 2",
        ),
        ("--microbatch-group-size-per-virtual-pipeline-stage 4", "has no effect without --num-virtual-stages"),
        (
            "--no-overlap-p2p-communication",
            "--no-overlap-p2p-communication has no effect without --num-virtual-stages-per-pipeline-rank; leave it",
        ),
        (f"{PP} 4 --num-virtual-stages-per-pipeline-rank 2 --no-overlap-p2p-communication", None),
        (
            "--num-virtual-stages-per-pipeline-rank 2 --no-overlap-p2p-communication",
            "--no-overlap-p2p-communication with virtual stages needs --pipeline-model-parallel-size above 2",
        ),
        (
            "--num-virtual-stages-per-pipeline-rank 4 --decoder-first-pipeline-num-layers 12 "
            "--decoder-last-pipeline-num-layers 20",
            None,
        ),
        (
            "--num-virtual-stages-per-pipeline-rank 4 --decoder-first-pipeline-num-layers 14 "
            "--decoder-last-pipeline-num-layers 18",
            "--num-virtual-stages-per-pipeline-rank 4 does not divide --decoder-last-pipeline-num-layers 18 layers; "
            "the nearest layout that works: --num-virtual-stages-per-pipeline-rank 2.",
        ),
        ("--max-seqlen-per-dp-cp-rank 8", "--max-tokens-per-gpu bounds what each holds"),
        ("--context-parallel-size 2 --hierarchical-context-parallel-sizes 2 1", "gather keys and values here"),
    ],
)
def test_interleaved_stages_and_other_exchanges_that_cannot_work_are_named(flags, sentence):
    args, explicit = parse(f"--pipeline-model-parallel-size 2 {flags}", mtp_num_layers=None)
    problems = megatron_problems(args, None, explicit)
    found = [*problems.wrong, *problems.unsupported]
    assert any(sentence in problem for problem in found) if sentence else not found


def test_layers_of_a_virtual_stage_cannot_be_counted_where_ends_have_their_own_number():
    flags = f"{PP} 2 --decoder-first-pipeline-num-layers 12 --num-layers-per-virtual-pipeline-stage 4"
    args, explicit = parse(flags)
    (problem,) = megatron_problems(args, None, explicit).wrong
    assert problem == (
        "--num-layers-per-virtual-pipeline-stage 4 is for stages of one size and does not go with "
        "--decoder-first-pipeline-num-layers; --num-virtual-stages-per-pipeline-rank does; the nearest layout that "
        "works: --decoder-first-pipeline-num-layers left out."
    )
    assert_remedy_works(problem, 8, flags)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("Et*16|t*16mL", None),
        (
            "Et*16|t*16|m|L",
            "prediction layers (m) must stand right before the output L, in the last stage, which is L",
        ),
        ("Et*16|t*15mtL", "in the last stage, which is t"),
        ("Et*16m|t*16L", "prediction layers (m) must stand right before the output L"),
        ("Et*16|t*16L", "it has 0 prediction layers (m), the model has 1"),
    ],
)
def test_layers_that_predict_further_tokens_are_placed_at_the_end(text, sentence):
    args, explicit = parse(
        f"--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout {text}", mtp_num_layers=1
    )
    problems = megatron_problems(args, None, explicit).wrong
    assert [sentence in problem for problem in problems] == ([True] if sentence else [])


FIRST, LAST = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
EMBEDDING, LOSS = "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"


@pytest.mark.parametrize(
    ("gpus", "flags", "sentence"),
    [
        (2, f"--num-layers 4 {PP} 2 {FIRST} 4",
         f"{FIRST} 4 of --num-layers 4 leaves no layer for the 1 other of {PP} 2; the nearest layout that works: "
         f"{FIRST} 3."),
        (2, f"--num-layers 4 {PP} 2 {FIRST} 1 {LAST} 1",
         f"{FIRST} 1 and {LAST} 1 make 2 layers in {PP} 2, not --num-layers 4; the nearest layout that works: "
         f"{FIRST} 3."),
        # without the ends 2 layers are left, one stage of 2 with PP 3
        (12, f"--num-layers 4 {PP} 2 {FIRST} 1 {LAST} 1", f"the nearest layout that works: {PP} 3."),
        (2, f"--num-layers 8 {PP} 2 {EMBEDDING}",
         f"--num-layers 8 and the embedding make 9, which does not divide into 2 pipeline stages of one size ({PP} 2)"
         f"; the nearest layout that works: {EMBEDDING} left out."),
        (3, f"--num-layers 7 {PP} 3", f"the nearest layout that works: {PP} 1."),
        # 10 layers on one stage of 2 virtual ones are no pipeline
        (3, f"--num-layers 10 {PP} 3 --num-virtual-stages-per-pipeline-rank 2",
         f"the nearest layout that works: {PP} 1 with --num-virtual-stages-per-pipeline-rank left out."),
    ],
)  # fmt: skip
def test_what_is_named_for_layers_that_do_not_divide_into_stages_works(gpus, flags, sentence):
    args, explicit = parse(flags, gpus=gpus)
    (problem,) = megatron_problems(args, None, explicit).wrong
    assert sentence in problem
    assert_remedy_works(problem, gpus, flags)


def test_layers_that_differ_at_the_ends_divide():
    # DeepSeek-V3's 61 layers on 8 stages: 6 times 8, and 7 and 6 at the ends
    args, explicit = parse(
        "--num-layers 61 --pipeline-model-parallel-size 8 --decoder-first-pipeline-num-layers 7 "
        "--decoder-last-pipeline-num-layers 6"
    )
    assert megatron_problems(args, None, explicit).wrong == []
    # ... or 61 layers, the embedding and the loss on 9 stages of 7
    args, explicit = parse(
        "--num-layers 61 --pipeline-model-parallel-size 9 --account-for-embedding-in-pipeline-split "
        "--account-for-loss-in-pipeline-split",
        gpus=9,
    )
    assert megatron_problems(args, None, explicit).wrong == []


@pytest.mark.parametrize(
    ("architecture", "context", "sentence"),
    [
        ("GlmMoeDsaForCausalLM", 2, None),
        ("Qwen3ForCausalLM", 2, "DeepseekV32ForCausalLM and GlmMoeDsaForCausalLM, not for Qwen3ForCausalLM; leave it"),
        ("Qwen3ForCausalLM", 1, "no effect with --context-parallel-size 1"),
    ],
)
def test_gathering_the_keys_of_all_context_ranks_is_for_sparse_attention(architecture, context, sentence):
    args, _ = parse(f"--context-parallel-size {context}", allgather_cp=True)
    problems = layout_problems(args, {"architectures": [architecture]})
    assert (problems == []) if sentence is None else (sentence in problems[0] and len(problems) == 1)
    args, _ = parse(f"--context-parallel-size {context}", allgather_cp=False)
    assert layout_problems(args, {"architectures": [architecture]}) == []


def test_the_nearest_divisor_is_common_to_all_numbers():
    assert nearest_divisor(3, [8, 12]) == 2  # 2 and 4 are equally near: the smaller
    assert nearest_divisor(5, [8]) == 4
    assert nearest_divisor(100, [7]) == 7
    assert nearest_divisor(3, [10**30]) == 2


def test_sizes_that_are_no_sizes_end_in_sentences():
    for flags in ("--tensor-model-parallel-size 0", "--pipeline-model-parallel-size -2", "--num-query-groups 0"):
        args, explicit = parse(flags)
        assert any("must be at least 1" in sentence for sentence in megatron_problems(args, None, explicit).wrong)
