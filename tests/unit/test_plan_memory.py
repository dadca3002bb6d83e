"""Bytes that a plan expects, against sums by hand and against what torch and the real modules allocate."""

from __future__ import annotations

import pytest
import torch

from benchmarks.log_prob_memory import peak_bytes
from slime.algorithms.log_probs import calculate_log_probs_and_entropy
from slime.backends.megatron_utils.data import Packing, pack
from slime.plan.activations import (
    Compute,
    HeadRows,
    Recompute,
    deferred_head_bytes,
    final_norm_saved,
    head_bytes,
    layer_saved,
    rotary_saved,
    stage_saved,
)
from slime.plan.layout import DataFacts, ParallelLayout, batch_plan
from slime.plan.tower import Tower, tower_saved
from slime.plan.trainer_memory import in_flight, num_host_copies, rank_params, trainer_memory
from slime.utils.model_shape import ModelShape
from tests.unit.megatron_fakes import make_args, make_hf_model, run_world
from tests.unit.plan_fakes import CUDA, plan_args

CPU_FP32 = Compute(is_cpu=True, element_size=4)


def parts(**changes):
    args = plan_args(**{"rollout_max_prompt_len": 32, "rollout_max_response_len": 96, **changes})
    shape = ModelShape.of(args)
    assert shape is not None
    layout = ParallelLayout.of(args, shape.num_layers)
    return args, shape, layout


def memory_of(**changes):
    args, shape, layout = parts(**changes)
    return trainer_memory(args, shape, layout, batch_plan(args, layout, None))


def test_fp32_state_is_sixteen_bytes_a_parameter():
    stage = memory_of().stages[0]
    num_params = parts()[1].num_params
    assert stage.params == num_params
    assert (stage.weights, stage.gradients, stage.optimizer) == (4 * num_params, 4 * num_params, 8 * num_params)


@pytest.mark.parametrize(("in_fp32", "gradient"), [(False, 2), (True, 4)])
def test_mixed_precision_shards_master_copy_and_moments_over_the_data_parallel_ranks(in_fp32, gradient):
    stage = memory_of(**CUDA, actor_num_gpus_per_node=8, tensor_model_parallel_size=2, grad_reduce_in_fp32=in_fp32)
    stage = stage.stages[0]
    assert (stage.weights, stage.gradients) == (2 * stage.params, gradient * stage.params)
    assert stage.optimizer == 12 * stage.params / 4  # 8 ranks / TP 2


def test_fsdp_shards_all_state_over_the_ranks_of_a_copy_and_gathers_for_a_pass():
    fsdp = {**CUDA, "train_backend": "fsdp", "actor_num_gpus_per_node": 8}
    num_params = parts()[1].num_params
    whole, copies, kept = (
        memory_of(**fsdp, **more).stages[0]
        for more in ({}, {"fsdp_replicate_size": 2}, {"fsdp_reshard_after_forward": False})
    )
    assert (whole.weights, whole.optimizer) == (4 * num_params // 8, 8 * num_params // 8)
    assert whole.state == whole.weights + whole.optimizer, "gradients are gone between train steps"
    assert copies.state == 12 * num_params // 4
    assert kept.state == whole.state
    assert whole.log_probs_peak <= kept.log_probs_peak, "a group of 50 M parameters is this whole model"
    small = memory_of(**fsdp, fsdp_min_group_params=1).stages[0]
    assert small.log_probs_peak < kept.log_probs_peak
    alone = memory_of(**fsdp | {"actor_num_gpus_per_node": 1}).stages[0]
    assert alone.state == 12 * num_params and alone.log_probs_peak >= alone.state + 2 * num_params


def test_an_optimizer_with_less_to_remember_takes_less():
    shape = parts()[1]
    fsdp = {**CUDA, "train_backend": "fsdp", "actor_num_gpus_per_node": 8}
    sgd, muon = (memory_of(**fsdp, optimizer=name).stages[0].optimizer for name in ("sgd", "muon"))
    assert sgd == 4 * shape.num_params // 8
    tables = 256 * 64 + 4 * (2 * 64 + 2 * 32) + 64  # a tied embedding, and norms
    assert muon == 4 * (shape.num_params + tables) // 8
    for flags, kept in ((CUDA, 4), ({}, 0)):
        stage = memory_of(**flags, use_stateless_adam=True).stages[0]
        assert stage.optimizer == kept * stage.params, "fp32 copies of 16-bit weights alone"


def test_an_optimizer_in_host_memory_is_not_on_the_gpu():
    whole = memory_of(**CUDA, optimizer_cpu_offload=True).stages[0]
    assert whole.optimizer == 0
    assert whole.host_copies == (12 + 4 + 2) * whole.params  # fp32 weights, moments, a gradient, a 16-bit weight
    half = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5, "exp_avg_dtype": "bf16"}
    stage = memory_of(**CUDA, **half).stages[0]
    assert (stage.optimizer, stage.host_copies) == (5 * stage.params, 8 * stage.params)
    stage = memory_of(**CUDA, use_precision_aware_optimizer=True, exp_avg_dtype="bf16").stages[0]
    assert (stage.optimizer, stage.host_copies) == (10 * stage.params, 0)


def test_offloaded_layers_keep_on_the_gpu_what_is_on_its_way():
    flags = {**CUDA, "num_layers": 8, "rollout_max_response_len": 960}  # so long that the passes are the peak
    usual = memory_of(**flags).stages[0]
    offloaded = memory_of(**flags, cpu_offloading=True, cpu_offloading_num_layers=6).stages[0]
    assert offloaded.activations + offloaded.host_copies == pytest.approx(usual.activations * 10 / 8, rel=0.02)
    assert offloaded.host_copies == pytest.approx(usual.activations * 6 / 8, rel=0.02)
    assert offloaded.train_peak < usual.train_peak


@pytest.mark.parametrize("is_untied", [False, True])
def test_stages_and_tensor_parallel_ranks_hold_the_model_between_them(is_untied):
    _, shape, layout = parts(
        actor_num_gpus_per_node=4,
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        untie_embeddings_and_output_weights=is_untied,
    )
    held = sum(2 * rank_params(shape, layout, stage)[0] for stage in range(2))
    # Norms are on both tensor-parallel ranks, and a tied output layer is a second copy on the last stage.
    norms = 4 * (2 * 64 + 2 * 32) + 64
    assert held == shape.num_params + norms + (0 if is_untied else 256 * 64)


def test_layers_that_predict_further_tokens_cost_what_they_are_used_for():
    """Untrained they are weights; trained they have gradients, moments, activations and a lent embedding."""
    staged = {"pipeline_model_parallel_size": 2, "actor_num_gpus_per_node": 2, "mtp_num_layers": 1}
    staged |= {"untie_embeddings_and_output_weights": True}
    without = memory_of(**staged | {"mtp_num_layers": None})
    frozen, trained = memory_of(**staged), memory_of(**staged, enable_mtp_training=True)
    for found in (frozen, trained):
        assert found.stages[0] == without.stages[0]
    layer = parts(**staged)[1].mtp_params().total
    (_, last), (_, is_frozen), (_, is_trained) = without.stages, frozen.stages, trained.stages
    assert is_frozen.params == last.params + layer
    assert (is_frozen.trained_params, is_frozen.optimizer) == (last.trained_params, last.optimizer)
    assert is_frozen.activations == last.activations
    assert is_trained.params == last.params + layer + 256 * 64  # vocabulary x hidden size
    assert is_trained.trained_params == last.trained_params + layer
    # Two decoder layers and the final norm, and then three layers.
    assert is_trained.activations == pytest.approx(last.activations * 3 / 2, rel=0.02)


def test_what_overlapping_stages_sent_on_is_kept():
    """Hidden states of 64, in bf16, of each chunk's tokens; behind the last chunk of the last stage comes no stage."""
    staged = CUDA | {"num_layers": 8, "pipeline_model_parallel_size": 4, "actor_num_gpus_per_node": 4}
    staged |= {"num_layers_per_virtual_pipeline_stage": 1}
    with_overlap, without = memory_of(**staged, overlap_p2p_comm=True), memory_of(**staged, overlap_p2p_comm=False)
    args, _, layout = parts(**staged)
    batch = batch_plan(args, layout, None)
    for stage, chunks in enumerate((2, 2, 2, 1)):
        kept = in_flight(layout, stage, batch.micro_batches_per_rank) * batch.micro_batch_tokens
        more = with_overlap.stages[stage].activations - without.stages[stage].activations
        assert more == pytest.approx(chunks * 64 * 2 * kept, abs=1)


def test_experts_are_divided_over_their_own_ranks():
    _, shape, layout = parts(
        actor_num_gpus_per_node=8,
        expert_model_parallel_size=4,
        expert_tensor_parallel_size=1,
        num_moe_experts=8,
        moe_ffn_hidden_size=48,
    )
    assert rank_params(shape, layout, 0)[1] == 4 * 8 * 3 * 64 * 48 / 4  # layers x experts x three matrices / EP
    stage = memory_of(
        actor_num_gpus_per_node=8,
        expert_model_parallel_size=4,
        expert_tensor_parallel_size=1,
        num_moe_experts=8,
        moe_ffn_hidden_size=48,
    ).stages[0]
    dense = stage.params - 4 * 8 * 3 * 64 * 48 // 4
    assert stage.optimizer == 8 * dense / 8 + 8 * (4 * 8 * 3 * 64 * 48 / 4) / 2  # the same experts are on 8 / 4 ranks


def test_micro_batches_in_flight_fall_from_the_first_stage_to_the_last():
    _, _, layout = parts(actor_num_gpus_per_node=4, pipeline_model_parallel_size=4)
    assert [in_flight(layout, stage, 16) for stage in range(4)] == [4, 3, 2, 1]
    assert in_flight(layout, 0, 2) == 2  # there are no more


def test_a_larger_group_of_micro_batches_keeps_more_of_them_on_an_interleaved_stage():
    sizes = {"actor_num_gpus_per_node": 2, "pipeline_model_parallel_size": 2}
    chunks = {"num_virtual_stages_per_pipeline_rank": 2}
    _, _, layout = parts(**sizes, **chunks)
    assert in_flight(layout, 0, 16) == (2 * (2 - 1) + (2 - 1) * 2 + 1) / 2
    _, _, layout = parts(**sizes, **chunks, microbatch_group_size_per_vp_stage=8)
    assert in_flight(layout, 0, 16) == (2 * (2 - 1) + (2 - 1) * 8 + 1) / 2


def test_the_reference_and_what_it_pushes_aside_are_two_copies_in_host_memory():
    plain, with_kl = memory_of().stages[0], memory_of(use_kl_loss=True).stages[0]
    assert (plain.host_copies, with_kl.host_copies) == (0, 2 * with_kl.weights)
    assert with_kl.train_peak - plain.train_peak == 2 * with_kl.weights  # without a GPU that is the same memory
    on_gpu = memory_of(**CUDA, actor_num_gpus_per_node=1, use_kl_loss=True).stages[0]
    assert on_gpu.train_peak == memory_of(**CUDA, actor_num_gpus_per_node=1).stages[0].train_peak
    # one rollout ahead: the engines' weights and those before them; and the reference, and what is pushed aside
    assert num_host_copies(plan_args(use_kl_loss=True, keep_old_actor=True)) == 2 + 1 + 1
    ahead = plan_args(keep_old_actor=True, async_buffer_size=5, update_weights_interval=2)
    assert num_host_copies(ahead) == (1 + 3) + 1, "three syncs in five rollouts"


QWEN3 = {"kv_channels": 128, "num_query_groups": 8, "padded_vocab_size": 151936, "grad_reduce_in_fp32": True}
SMALL = {**QWEN3, "num_layers": 28, "hidden_size": 1024, "ffn_hidden_size": 3072, "num_attention_heads": 16}
MIDDLE = {**QWEN3, "num_layers": 36, "hidden_size": 2560, "ffn_hidden_size": 9728, "num_attention_heads": 32}
EXPERTS = {
    **QWEN3, "num_layers": 4, "hidden_size": 2048, "ffn_hidden_size": 6144, "num_attention_heads": 32,
    "num_query_groups": 4, "num_moe_experts": 128, "moe_router_topk": 8, "moe_ffn_hidden_size": 768,
    "untie_embeddings_and_output_weights": True,
}  # fmt: skip
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "actor_num_gpus_per_node": 2}
PP2 = {"pipeline_model_parallel_size": 2, "actor_num_gpus_per_node": 2}
CP2 = {"context_parallel_size": 2, "actor_num_gpus_per_node": 2}
EP2 = {"expert_model_parallel_size": 2, "actor_num_gpus_per_node": 2}
FSDP, FSDP2, FSDP4 = ({"train_backend": "fsdp", "actor_num_gpus_per_node": num_gpus} for num_gpus in (1, 2, 4))


@pytest.mark.parametrize(
    ("model", "layout", "micro_batch", "samples", "measured_gib"),
    [
        (SMALL, {}, 16384, 16, 41.4), (MIDDLE, {}, 8192, 16, 105.2), (MIDDLE, TP2, 16384, 16, 71.7),
        (MIDDLE, PP2, 4096, 32, 53.8), (SMALL, PP2, 4096, 32, 12.0), (MIDDLE, CP2, 8192, 16, 84.4),
        (SMALL, CP2, 8192, 16, 23.7), (EXPERTS, {}, 16384, 16, 69.3), (EXPERTS, EP2, 16384, 32, 45.2),
        (SMALL, FSDP, 16384, 16, 36.5), (MIDDLE, FSDP2, 16384, 32, 93.4), (MIDDLE, FSDP4, 16384, 64, 82.1),
    ],
)  # fmt: skip
def test_the_peak_of_a_train_step_is_what_an_h200_allocated(model, layout, micro_batch, samples, measured_gib):
    """The peak of the first stage. benchmarks/gpu_train_step.py measured it, benchmarks/RESULTS.md has the rows."""
    memory = memory_of(
        **{**CUDA, **model, **layout}, use_dynamic_batch_size=True, max_tokens_per_gpu=micro_batch,
        rollout_max_prompt_len=64, rollout_max_response_len=960, log_probs_chunk_size=4096,
        rollout_batch_size=samples, n_samples_per_prompt=1, global_batch_size=samples,
    )  # fmt: skip
    assert memory.stages[0].train_peak / 2**30 == pytest.approx(measured_gib, rel=0.02)


@pytest.mark.parametrize(("length", "measured_gib"), [(66_880, 15.33), (133_760, 22.52), (147_520, 24.00)])
def test_the_peak_of_a_long_sequence_with_fsdp_is_what_an_h200_allocated(length, measured_gib):
    """Layers recomputed, logits deferred; measured by benchmarks/gpu_longest.py at 98b14588."""
    memory = memory_of(
        **{**CUDA, **SMALL, **FSDP}, use_dynamic_batch_size=True, max_tokens_per_gpu=length,
        recompute_loss_function=True, rollout_max_prompt_len=64, rollout_max_response_len=length - 64,
        log_probs_chunk_size=1024, recompute_granularity="full",
        rollout_batch_size=1, n_samples_per_prompt=1, global_batch_size=1,
    )  # fmt: skip
    assert memory.stages[0].train_peak / 2**30 == pytest.approx(measured_gib, rel=0.01)


def test_recomputation_keeps_inputs_and_one_chunk():
    _, shape, layout = parts()
    compute = CPU_FP32
    layer, angles = layer_saved(shape, 0, layout, compute), rotary_saved(shape, compute)
    assert angles == 2 * shape.rotary_channels * 4 > 0
    assert stage_saved(shape, range(4), layout, compute, Recompute()) == (angles + 4 * layer, 0)
    uniform = Recompute("full", "uniform", 2)
    assert stage_saved(shape, range(4), layout, compute, uniform) == (angles + 2 * 64 * 4, 2 * layer)
    block = Recompute("full", "block", 1)
    assert stage_saved(shape, range(4), layout, compute, block) == (angles + 64 * 4 + 3 * layer, layer)


def test_more_tensor_parallel_ranks_keep_less_and_sequence_parallelism_less_again():
    compute = Compute(is_cpu=False, element_size=2)
    saved = []
    for changes in (
        {},
        {"tensor_model_parallel_size": 2},
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    ):
        _, shape, layout = parts(actor_num_gpus_per_node=2, **changes)
        saved.append(layer_saved(shape, 0, layout, compute))
    assert saved[0] > saved[1] > saved[2]
    assert saved[1] - saved[2] == 4 * 64 / 2 * 2  # 4 H, halved, in 2 bytes


def saved_bytes_per_token(args, lengths, expected):
    """Compare what autograd saves in the real model, without parameters and token ids, with the estimate."""
    from slime.backends.megatron_utils.model_provider import get_model_provider_func

    model = get_model_provider_func(args)()
    parameters = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    found = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and storage._cdata not in parameters:
            found[storage._cdata] = tensor
        return tensor

    cp_size = args.context_parallel_size
    packing = Packing(cp_rank=torch.distributed.get_rank() % cp_size, cp_size=cp_size)
    inputs = pack([torch.arange(length) % 100 for length in lengths], packing)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(inputs["tokens"], inputs["position_ids"], None, packed_seq_params=inputs["packed_seq_params"])
    total = sum(tensor.untyped_storage().nbytes() for tensor in found.values()) / inputs["tokens"].shape[1]
    assert total == pytest.approx(expected, rel=0.015), (total, expected)


@pytest.mark.processes
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "qwen3_moe"])
def test_what_autograd_keeps_is_what_the_plan_counts(tmp_path, family):
    make_hf_model(tmp_path / "hf", family, hidden_size=64, intermediate_size=160)
    args = make_args(tmp_path / "hf")
    run_world(1, saved_bytes_per_token, args, [40, 25, 63], counted_per_token(args))


@pytest.mark.processes
@pytest.mark.parametrize("flags", ["", "--recompute-granularity selective"], ids=["", "attention made again"])
def test_a_context_parallel_rank_keeps_the_keys_that_its_queries_see(tmp_path, flags):
    make_hf_model(tmp_path / "hf", hidden_size=64, intermediate_size=160)
    args = make_args(tmp_path / "hf", f"--context-parallel-size 2 {flags}", actor_num_gpus_per_node=2)
    expected = counted_per_token(args, ("core_attn",) if flags else ())
    run_world(2, saved_bytes_per_token, args, [40, 24, 64], expected)


def counted_per_token(args, skipped=()):
    shape = ModelShape.of(args)
    assert shape is not None
    layout, compute = ParallelLayout.of(args, shape.num_layers), CPU_FP32
    layers = sum(layer_saved(shape, layer, layout, compute, skipped) for layer in range(2))
    return layers + rotary_saved(shape, compute) + final_norm_saved(shape, layout, compute)


VISION = {"depth": 3, "hidden_size": 64, "intermediate_size": 160, "num_heads": 4, "out_hidden_size": 96}
VISION |= {"patch_size": 4, "temporal_patch_size": 2, "hidden_act": "gelu_pytorch_tanh"}
TOWERS = {
    "qwen3_vl": {"deepstack_visual_indexes": [0], "num_position_embeddings": 64},
    "qwen2_5_vl": {"window_size": 16, "fullatt_block_indexes": [2], "hidden_act": "silu"},
}


@pytest.mark.parametrize("family", TOWERS)
def test_a_tower_has_the_parameters_and_keeps_the_bytes_that_the_plan_counts(family):
    from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

    vision = VISION | TOWERS[family]
    text = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 96, "intermediate_size": 8}
    text |= {"vocab_size": 8, "num_key_value_heads": 2}
    config = CONFIG_MAPPING[family](vision_config=vision, text_config=text)
    hf = AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa")
    real, tower, found = hf.base_model.visual, Tower.of(vision), {}
    assert tower.num_params == sum(parameter.numel() for parameter in real.parameters())
    parameters = {parameter.untyped_storage()._cdata for parameter in real.parameters()}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and storage._cdata not in parameters:
            found[storage._cdata] = tensor
        return tensor

    patches = torch.randn(2 * 8 * 16, 3 * 2 * 4 * 4)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        real(patches, grid_thw=torch.tensor([[1, 8, 16]] * 2))
    total = sum(tensor.untyped_storage().nbytes() for tensor in found.values()) / len(patches)
    assert total == pytest.approx(tower_saved(tower, CPU_FP32, recomputes=False)[0], rel=0.01)


def test_images_cost_activations_on_the_stage_that_has_the_tower():
    """Whole on each rank of Megatron's first stage, a shard of it with FSDP2; frozen it keeps nothing."""
    tower = Tower.of(VISION | TOWERS["qwen3_vl"])
    flags = {"multimodal_keys": {"image": "images"}, "actor_num_gpus_per_node": 2}

    def stages(images=64, **changes):
        args, shape, layout = parts(**flags | changes)
        batch = batch_plan(args, layout, DataFacts(100, 100, 80, 80, images))
        return trainer_memory(args, shape, layout, batch, tower=tower).stages

    staged = {"pipeline_model_parallel_size": 2}
    (first, last), (without, other) = stages(**staged), stages(images=0, **staged)
    assert last == other and first.params == without.params
    assert first.params - stages(**staged, multimodal_keys=None)[0].params == tower.num_params
    # a static micro-batch has one sample, of one image; two of them are in flight; 4 patches make a token
    kept = tower_saved(tower, CPU_FP32, recomputes=False)[0] * 4 * 64
    assert first.activations - without.activations == 2 * kept
    assert stages(**staged, freeze_vision_tower=True)[0].activations == without.activations
    assert stages(**staged, freeze_vision_tower=True)[0].trained_params == first.trained_params - tower.num_params
    (sharded,), (no_images,) = stages(train_backend="fsdp"), stages(images=0, train_backend="fsdp")
    assert sharded.activations - no_images.activations == kept
    recomputed = stages(train_backend="fsdp", recompute_granularity="full")[0].activations
    once = tower_saved(tower, CPU_FP32, recomputes=True)[0] * 4 * 64
    assert recomputed - stages(0, train_backend="fsdp", recompute_granularity="full")[0].activations == once


def test_a_micro_batch_sees_the_images_of_few_prompts():
    def image_tokens(**changes):
        args, _, layout = parts(
            use_dynamic_batch_size=True, max_tokens_per_gpu=1280, rollout_max_prompt_len=None, **changes
        )
        return batch_plan(args, layout, DataFacts(100, 100, 80, 80, 64)).image_tokens

    # prompts of 80 tokens, responses of 48 on average: ten samples, four of which are of one prompt
    assert image_tokens() == (3 + 1) * 64
    assert image_tokens(n_samples_per_prompt=1, rollout_batch_size=32) == 10 * 64
    assert image_tokens(balance_by_flops=True) == 8 * 64  # of all prompts
    assert image_tokens(max_image_tokens_per_gpu=140) == 2 * 64


@pytest.mark.parametrize("chunk_size", [-1, 40])
@pytest.mark.parametrize("trains_entropy", [False, True])
def test_the_head_needs_what_the_log_probs_allocate(chunk_size, trains_entropy):
    _, shape, layout = parts(padded_vocab_size=4096)
    tokens, responses, hidden = 200, 160, 64
    states, weight = torch.randn(tokens, hidden, requires_grad=True), torch.randn(4096, hidden)
    rows = torch.arange(responses)

    def forward() -> torch.Tensor:
        logits = states @ weight.t()
        return calculate_log_probs_and_entropy(
            logits, rows, None, True, chunk_size, with_entropy_grad=trains_entropy, rows=rows
        )[0]

    head = head_bytes(shape, layout, CPU_FP32, HeadRows(tokens, responses, chunk_size, trains_entropy))
    with torch.no_grad():
        assert peak_bytes(forward) == pytest.approx(head.forward, rel=0.02)
    expected = max(head.forward, head.backward)
    assert peak_bytes(lambda: forward().sum().backward()) == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("num_chunks", [1, 4])
def test_a_matrix_that_is_used_twice_has_both_gradients_and_their_sum(num_chunks):
    """A tied embedding, and an output layer used once per chunk: autograd adds their gradients out of place."""
    _, shape, layout = parts(padded_vocab_size=20_000)
    weight = torch.nn.Parameter(torch.randn(20_000, 64))

    def backward() -> None:
        states = torch.nn.functional.embedding(torch.arange(8), weight)
        chunks = (torch.nn.functional.linear(chunk, weight).sum() for chunk in states.chunk(num_chunks))
        torch.stack(list(chunks)).sum().backward()
        weight.grad = None

    matrix = shape.embedding_params * 4
    assert peak_bytes(backward) == pytest.approx(3 * matrix, rel=0.1)
    deferred = deferred_head_bytes(shape, layout, CPU_FP32, HeadRows(8, 8, 2, False))
    assert deferred.backward == pytest.approx(3 * matrix, rel=0.1)
