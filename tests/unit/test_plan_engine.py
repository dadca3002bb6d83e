"""Engines, verdicts, weight transport and times of a plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slime.plan import Facts, make_plan, times
from slime.plan.fit import MEM_FRACTION, engine_memory, weight_params
from slime.plan.times import DEFAULT_GPU, DEVICES, checkpoint_bytes, device_of_gpu, num_log_prob_passes, outputs
from slime.utils.model_shape import ModelShape
from slime.weights.formats import Fp8Format
from tests.unit.plan_fakes import CUDA, plan_args

GPU = DEVICES[DEFAULT_GPU]
QWEN3_4B = {
    "num_layers": 36,
    "hidden_size": 2560,
    "ffn_hidden_size": 9728,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "kv_channels": 128,
    "padded_vocab_size": 151936,
}


def shape_of(**changes) -> ModelShape:
    shape = ModelShape.of(plan_args(**(QWEN3_4B | changes)))
    assert shape is not None
    return shape


def test_the_cache_gets_what_the_weights_leave_of_the_static_fraction():
    engine = engine_memory(shape_of(), GPU, {"mem_fraction_static": 0.5}, num_gpus=2, longest=9000)
    # keys and values of 8 / 2 heads of 128 channels in 36 layers, 2 bytes each
    assert engine.kv_bytes_per_token == 36 * 2 * 4 * 128 * 2
    replicated = 36 * (2 * 2560 + 2 * 128) + 2560
    assert engine.weights == 2 * ((4_022_468_096 - replicated) / 2 + replicated)
    assert engine.kv_tokens == (GPU.memory_bytes // 2 - engine.weights) // engine.kv_bytes_per_token
    assert engine.full_length_requests == engine.kv_tokens // 9000


def test_without_a_flag_the_fraction_is_assumed_and_a_smaller_cache_dtype_doubles_the_tokens():
    plain = engine_memory(shape_of(), GPU, {}, num_gpus=1, longest=1)
    small = engine_memory(shape_of(), GPU, {"kv_cache_dtype": "fp8_e5m2"}, num_gpus=1, longest=1)
    assert plain.is_fraction_assumed and plain.mem_fraction == MEM_FRACTION
    assert small.kv_tokens == pytest.approx(2 * plain.kv_tokens, abs=1)


def test_more_ranks_than_key_heads_keep_copies_of_the_cache():
    by_tp = [engine_memory(shape_of(), GPU, {}, num_gpus=tp, longest=1).kv_bytes_per_token for tp in (4, 8, 16)]
    assert by_tp[0] == 2 * by_tp[1] and by_tp[1] == by_tp[2]


def test_latent_attention_caches_the_latent_once_on_every_rank():
    shape = shape_of(multi_latent_attention=True, kv_lora_rank=512, qk_pos_emb_head_dim=64)
    for tp in (1, 8):
        engine = engine_memory(shape, GPU, {}, num_gpus=tp, longest=1)
        assert engine.kv_bytes_per_token == 36 * (512 + 64) * 2


def test_experts_are_divided_over_the_engines_ranks():
    shape = shape_of(num_moe_experts=16, moe_ffn_hidden_size=512)
    one, four = sum(weight_params(shape, 1, 1, 1).values()), sum(weight_params(shape, 4, 1, 4).values())
    experts = 36 * 16 * 3 * 2560 * 512
    assert one == shape.num_params
    assert one - four > 0.75 * experts


def cuda_plan(device=GPU, **changes):
    values = {"actor_num_gpus_per_node": 8, "rollout_num_gpus": 8, "rollout_max_response_len": 1000, **QWEN3_4B}
    return make_plan(plan_args(**CUDA, **(values | changes)), Facts(device=device))


def test_separate_devices_are_judged_by_themselves():
    plan = cuda_plan()
    assert [(moment.where, moment.fits) for moment in plan.fit] == [("trainer GPU", True), ("engine GPU", True)]
    assert plan.does_fit


def test_a_shared_device_holds_both_unless_they_make_room():
    roomy = cuda_plan(colocate=True, offload_train=True, offload_rollout=True)
    tight = cuda_plan(colocate=True)
    assert roomy.does_fit and not tight.does_fit
    training = tight.fit[0]
    assert training.total == sum(training.parts.values()) > GPU.memory_bytes
    assert training.parts["engine"] == tight.engine_memory[0].static + GPU.reserved_bytes
    state = max(stage.state for stage in tight.trainer_memory.stages)
    assert tight.fit[1].parts["trainer"] == state + GPU.reserved_bytes, "each process has a context of its own"
    assert "--offload-train --offload-rollout" in training.remedy
    ended = cuda_plan(colocate=True, release_train=True, offload_rollout=True)
    assert ended.does_fit and ended.fit[1].parts["trainer (ended)"] == 0
    assert roomy.host_memory_per_node == 8 * (roomy.trainer_memory.stages[0].state + roomy.engine_memory[0].weights)


@pytest.mark.parametrize(
    ("changes", "memory", "remedy"),
    [
        ({"micro_batch_size": 64}, 80, "lower --max-tokens-per-gpu"),
        ({"actor_num_gpus_per_node": 1}, 40, "raise --tensor-model-parallel-size"),
        ({"rollout_max_response_len": 10**9, "use_dynamic_batch_size": False}, 10**5, "--rollout-max-response-len"),
    ],
)
def test_what_does_not_fit_names_what_to_change(changes, memory, remedy):
    plan = cuda_plan(device=replace(GPU, memory_bytes=memory * 10**9), **changes)
    assert any(remedy in moment.remedy for moment in plan.fit if not moment.fits)


@pytest.mark.parametrize(("more", "verdict"), [(10, "fits"), (1, "fits barely: 1.0 GB"), (-1, "DOES NOT FIT: ")])
def test_a_trainer_that_leaves_nothing_for_fragmentation_is_told_so(more, verdict):
    total = next(moment.total for moment in cuda_plan().fit if moment.when == "training")
    assert total > 20e9  # so that 1 GB is less than 5% of it
    plan = cuda_plan(device=replace(GPU, memory_bytes=total + more * 10**9))
    found = next(moment.verdict for moment in plan.fit if moment.when == "training")
    assert found.startswith(verdict) and (found == "fits") == (more == 10)


def test_weights_that_leave_no_room_for_a_cache_do_not_fit():
    plan = cuda_plan(device=replace(GPU, memory_bytes=9 * 10**9))
    engine = next(moment for moment in plan.fit if moment.where == "engine GPU")
    assert not engine.fits and "--rollout-num-gpus-per-engine" in engine.remedy


def test_without_gpus_every_process_shares_one_memory():
    plan = make_plan(plan_args(rollout_max_response_len=64))
    assert [moment.where for moment in plan.fit] == ["the host"]
    assert plan.host_memory_per_node == 0


@pytest.mark.parametrize(
    ("changes", "way"),
    [
        ({}, "NCCL broadcast"),
        ({"colocate": True, "rollout_num_gpus": 1}, "colocated tensors over CUDA IPC"),
        (
            {"colocate": True, "rollout_num_gpus": 99},
            "colocated tensors over CUDA IPC, NCCL broadcast to engines behind",
        ),
        ({"update_weight_transport": "disk", "update_weight_disk_dir": "/shared"}, "disk: full HF checkpoint"),
        (
            {"update_weight_transport": "disk", "update_weight_mode": "delta", "update_weight_disk_dir": "/shared"},
            "disk: changed bytes (xor)",
        ),
    ],
)
def test_weights_travel_in_buckets(changes, way):
    sends = cuda_plan(**changes).transport
    assert sends is not None and sends.way.startswith(way)
    assert sends.num_bytes == 2 * 4_022_468_096
    assert sends.num_buckets == -(-sends.num_bytes // (512 * 1024**2))


def test_cpu_trainers_send_by_gloo_and_debug_train_only_sends_nothing():
    sends = make_plan(plan_args()).transport
    assert sends is not None and sends.way.startswith("gloo broadcast")
    assert make_plan(plan_args(debug_train_only=True)).transport is None


@pytest.mark.parametrize(
    ("contents", "per_param", "flags"),
    [
        (["model", "optimizer", "rng"], 14, {}),
        (["model", "hf"], 4, {}),
        (["model", "optimizer"], 12, {"train_backend": "fsdp"}),
        (["model", "optimizer"], 8, {"train_backend": "fsdp", "optimizer": "sgd"}),
    ],
)
def test_a_checkpoint_has_what_its_contents_say(contents, per_param, flags):
    args = plan_args(**CUDA, checkpoint_contents=contents, **QWEN3_4B, **flags)
    assert checkpoint_bytes(args, shape_of()) == per_param * 4_022_468_096


def test_train_flops_are_three_forward_passes_and_recomputation_a_fourth():
    large = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 65536}
    plan, again = cuda_plan(**large), cuda_plan(**large, recompute_granularity="full")
    seconds = [next(p.seconds for p in each.phases if p.name == "train") for each in (plan, again)]
    flops = times.forward_flops(shape_of(), plan.batch.tokens_per_rollout, plan.batch.lengths.mean)
    assert seconds[0] == pytest.approx(3 * flops / (8 * GPU.train_flops))
    assert seconds[1] / seconds[0] == pytest.approx(4 / 3)


def test_a_pipeline_waits_at_its_ends():
    device = replace(GPU, layer_start_s=(0.0, 0.0))
    plain, plan = cuda_plan(device), cuda_plan(device, pipeline_model_parallel_size=2)
    bubble = 1 / plan.batch.micro_batches_per_rank
    seconds = [next(p.seconds for p in each.phases if p.name == "train") for each in (plain, plan)]
    assert seconds[1] / seconds[0] == pytest.approx((1 + bubble) / times.KEPT_PER_DOUBLING["pp"])


def test_small_micro_batches_take_what_the_host_needs_to_start_their_layers():
    plan = cuda_plan(micro_batch_size=1)
    train = next(phase for phase in plan.phases if phase.name == "train")
    rank_starts = 36 * plan.batch.micro_batches_per_rank * plan.batch.steps_per_rollout
    assert train.seconds == pytest.approx(rank_starts * GPU.layer_start_s[1]) and "bound by the host" in train.formula


MEASURED = {"": 19_133, "tensor_model": 16_527, "pipeline_model": 16_520, "context": 16_135}
"""Tokens a second and GPU of a 4B train step on two H200s (benchmarks/RESULTS.md): DP 2, TP 2, PP 2, CP 2."""


@pytest.mark.parametrize("kind", MEASURED)
def test_a_layouts_speed_is_within_a_tenth_of_what_was_measured(kind):
    """16,384 tokens a data-parallel rank and step, in sequences of 1,024 and micro-batches of 8,192; PP's of 4,096."""
    tokens = 4096 if kind == "pipeline_model" else 8192
    samples, parts = (16, 2) if not kind else (32 if kind == "pipeline_model" else 16, 1)
    changes = {f"{kind}_parallel_size": 2} if kind else {}
    plan = cuda_plan(
        DEVICES["h200-141gb"],
        actor_num_gpus_per_node=2,
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=tokens,
        rollout_batch_size=samples * parts,
        n_samples_per_prompt=1,
        global_batch_size=samples * parts,
        rollout_max_prompt_len=24,
        rollout_max_response_len=2000,  # 1,000 on average
        **changes,
    )
    train = next(phase for phase in plan.phases if phase.name == "train")
    assert plan.batch.tokens_per_rollout / train.seconds / 2 == pytest.approx(MEASURED[kind], rel=0.1)


def test_a_decode_step_reads_weights_and_cache():
    engine = engine_memory(shape_of(), GPU, {}, num_gpus=1, longest=1)
    step = times.decode_seconds(shape_of(), GPU, engine, requests=4, context=1000)
    read = engine.weights + 4 * 1000 * engine.kv_bytes_per_token
    assert step == pytest.approx(read / GPU.memory_bandwidth + GPU.decode_step_s)


@pytest.mark.parametrize(
    ("changes", "steps", "passes"),
    [
        ({}, 1, 0),  # the first step's own forward pass gives the old log-probs
        ({}, 2, 1),
        ({"recompute_old_log_probs": True}, 1, 1),
        ({"keep_old_actor": True}, 1, 1),
        ({"use_kl_loss": True}, 1, 1),
        ({"use_kl_loss": True}, 2, 2),
        ({"loss_type": "sft_loss"}, 2, 0),
        ({"ppo_epochs": 2}, 1, 1),
        ({"use_rollout_entropy": True}, 1, 1),
    ],
)
def test_forward_only_passes_are_those_that_the_loss_does_not_give(changes, steps, passes):
    assert num_log_prob_passes(plan_args(**changes), steps) == passes


def test_a_gpu_is_found_in_the_table_by_the_name_of_its_driver():
    assert device_of_gpu("NVIDIA H200", 150 * 10**9).source == DEVICES["h200-141gb"].source
    assert device_of_gpu("NVIDIA A100-SXM4-40GB", 42 * 10**9).memory_bandwidth == DEVICES["a100-40gb"].memory_bandwidth
    unknown = device_of_gpu("Quadro 6000", 6 * 10**9)
    assert unknown.memory_bytes == 6 * 10**9 and "not in the table" in unknown.source


def test_actor_and_critic_take_turns_on_a_gpu():
    alone, both = cuda_plan(), cuda_plan(use_critic=True, offload_train=True)
    assert [moment.where for moment in both.fit] == ["trainer GPU", "critic GPU", "engine GPU"]
    # a critic has no output layer, and this model's is tied: the same parameters, but no logits
    critic, actor = both.critic_memory.stages[0], both.trainer_memory.stages[0]
    assert critic.params == actor.params and critic.head == 0 < actor.head
    assert both.fit[0].parts["the other trainer (offloaded)"] == GPU.reserved_bytes
    assert both.fit[0].total == alone.fit[0].total + GPU.reserved_bytes
    assert cuda_plan(use_critic=True).fit[0].parts["the other trainer"] == critic.state + GPU.reserved_bytes


def test_lora_trains_adapters_alone():
    plain, lora = cuda_plan().trainer_memory.stages[0], cuda_plan(lora_rank=16).trainer_memory.stages[0]
    heads = 32 * 128, 8 * 128, 8 * 128
    cut = sum(heads) + 32 * 128 + 3 * 9728  # what TP cuts: outputs of q, k, v, gate and up, inputs of o and down
    whole = 7 * 2560  # the other side of each
    adapters = 36 * 16 * (cut + whole)
    assert lora.trained_params == adapters and lora.params == plain.params + adapters
    assert lora.gradients == 2 * adapters and lora.optimizer == 12 * adapters / 8
    halved = cuda_plan(lora_rank=16, tensor_model_parallel_size=2).trainer_memory.stages[0]
    assert halved.trained_params == 36 * 16 * (cut // 2 + whole)


def test_what_a_run_with_lora_sends_and_saves_is_its_adapters():
    plan, merged = cuda_plan(lora_rank=16, save="ckpt"), cuda_plan(lora_rank=16, lora_serve="merged")
    assert plan.trainer_memory is not None and plan.transport is not None and merged.transport is not None
    adapters = plan.trainer_memory.stages[0].trained_params
    assert (plan.transport.num_bytes, plan.transport.num_buckets) == (2 * adapters, 1)
    assert merged.transport.num_bytes == cuda_plan().transport.num_bytes
    [saved] = [output.size_bytes for output in plan.outputs if output.what == "checkpoint"]
    assert saved == (2 + 2 + 12) * adapters  # in bf16 twice, once as PEFT reads them, and Adam's fp32 state


def test_adapters_of_some_linear_layers_are_counted_alone():
    args = plan_args(**(QWEN3_4B | CUDA | {"lora_rank": 16}))
    plan = make_plan(args, Facts(adapted=("mlp.linear_fc1", "output_layer")))
    adapters = 36 * 16 * (2 * 9728 + 2 * 2560) + 16 * (151936 + 2560)
    assert plan.trainer_memory is not None and plan.transport is not None
    assert plan.trainer_memory.stages[0].trained_params == adapters == plan.transport.num_bytes // 2


def test_a_rollout_only_run_has_no_trainer():
    plan = cuda_plan(debug_rollout_only=True)
    assert plan.trainer_memory is None and [phase.name for phase in plan.phases] == ["generate"]
    assert all(seat.trainer_rank is None for seat in plan.seats)


def test_fp8_engines_hold_and_get_linear_layers_in_one_byte_and_the_scales():
    args, embedding, norms = plan_args(**(QWEN3_4B | CUDA)), 151936 * 2560, 36 * (2 * 2560 + 2 * 128) + 2560
    linear = 36 * (2560 * 128 * (32 + 8 + 8 + 32) + 3 * 2560 * 9728)
    plain, fp8 = make_plan(args), make_plan(args, Facts(weight_format=Fp8Format()))
    assert plain.transport is not None and fp8.transport is not None
    assert plain.transport.num_bytes == 2 * (linear + embedding + norms)
    assert fp8.transport.num_bytes == linear + 4 * (linear // 128**2) + 2 * (embedding + norms)
    assert "as fp8" in fp8.transport.way
    part = linear // fp8.engine_memory[0].tp
    assert plain.engine_memory[0].weights - fp8.engine_memory[0].weights == part - 4 * (part // 128**2)
    assert fp8.engine_memory[0].kv_tokens > plain.engine_memory[0].kv_tokens
    export = [
        output.size_bytes for output in outputs(plan_args(**(QWEN3_4B | CUDA), save_hf="x"), shape_of(), Fp8Format())
    ]
    assert fp8.transport.num_bytes in export
