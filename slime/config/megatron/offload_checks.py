"""What contradicts what among the flags that keep activations or optimizer state in host memory, or recompute layers.

It reads flags and returns sentences; it offloads nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from slime.config.args import Args
from slime.config.megatron.layout import nearest_divisor
from slime.config.problems import NoEffect
from slime.plan.layout import ParallelLayout
from slime.utils.pipeline_layout import stages_of_text

OFFLOADED = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm")
"""Values of --offload-modules; model/activation_offload.py knows their modules."""
_OF_EXPERTS = ("expert_fc1", "moe_act")


def check_offloading(args: Args, explicit: Collection[str]) -> Iterator[str]:
    """One sentence for each contradiction between the flags of offloading and of the optimizer's precision."""
    yield from _check_activations(args)
    yield from _check_optimizer(args, explicit)


def _check_activations(args: Args) -> Iterator[str]:
    by_layer, by_module = args.cpu_offloading, args.fine_grained_activation_offloading
    if by_layer and by_module:
        yield "--cpu-offloading and --fine-grained-activation-offloading exclude each other; give one."
    name = "--cpu-offloading" if by_layer else "--fine-grained-activation-offloading"
    if (by_layer or by_module) and args.recompute_granularity is not None:
        yield (
            f"{name} and --recompute-granularity {args.recompute_granularity} exclude each other: what is computed "
            "again need not be kept anywhere; give one."
        )
    if by_layer and args.cpu_offloading_num_layers < 1:
        yield f"--cpu-offloading-num-layers {args.cpu_offloading_num_layers} with --cpu-offloading must be at least 1."
    if args.min_offloaded_tensor_size < 1:
        yield f"--min-offloaded-tensor-size {args.min_offloaded_tensor_size} must be at least 1."
    if by_module:
        yield from _check_modules(args.offload_modules)
    has_weights = by_layer or (by_module and set(args.offload_modules) & {"qkv_linear", "attn_proj"})
    if has_weights and args.overlap_grad_reduce and args.gradient_accumulation_fusion:
        # autograd's hooks hand a weight back as another object, which does not say that its gradient is added already
        yield (
            f"{name} with --overlap-grad-reduce needs --no-gradient-accumulation-fusion: Megatron would not see when "
            "gradients of offloaded layers are there; add it, or leave --overlap-grad-reduce out."
        )


def check_offloaded_layers(args: Args) -> Iterator[str]:
    """A stage has the layers that are offloaded and one more; the layout works."""
    if not (args.cpu_offloading or args.fine_grained_activation_offloading):
        return
    layout = ParallelLayout.of(args, args.num_layers)
    most = max(layers_of_chunks(args)) - 1
    name = "--cpu-offloading" if args.cpu_offloading else "--fine-grained-activation-offloading"
    if most < 1:
        yield NoEffect(
            name,
            "where every pipeline stage has one layer, which goes backward at once "
            f"(--num-layers {args.num_layers} in {layout.pp * layout.vpp} stages)",
            "leave it out",
            instead={
                "cpu_offloading": False,
                "cpu_offloading_num_layers": 0,
                "fine_grained_activation_offloading": False,
                "offload_modules": None,
            },
        )
    elif args.cpu_offloading and args.cpu_offloading_num_layers > most:
        yield (
            f"--cpu-offloading-num-layers {args.cpu_offloading_num_layers} with --cpu-offloading must be at most "
            f"{most}: the last of a stage's {most + 1} layers goes backward at once."
        )


def layers_of_chunks(args: Args) -> list[int]:
    """The different numbers of layers of virtual pipeline stages; the layout works."""
    if text := args.pipeline_model_parallel_layout:
        return sorted({stage.count("t") for stage in stages_of_text(text)})
    layout = ParallelLayout.of(args, args.num_layers)
    # where the embedding or the loss counts as a layer, one virtual stage has a layer less than the others
    return sorted(
        {(len(layers) + extra) // layout.vpp for layers in layout.stage_layers for extra in (0, layout.vpp - 1)}
    )


def check_recomputed_layers(args: Args) -> Iterator[str]:
    """Layers that are recomputed together divide those of every stage: Megatron counts on behind the last one."""
    if args.recompute_granularity != "full" or args.recompute_method != "uniform" or not args.recompute_num_layers:
        return
    together, numbers = args.recompute_num_layers, layers_of_chunks(args)
    if bad := [number for number in numbers if number % together]:
        yield (
            f"--recompute-num-layers {together} with --recompute-method uniform does not divide the {bad[-1]} layers "
            f"of a pipeline stage; the nearest that works is {nearest_divisor(together, numbers)}."
        )


def _check_modules(modules: Collection[str]) -> Iterator[str]:
    if not modules:
        yield f"--fine-grained-activation-offloading needs --offload-modules: choose from {', '.join(OFFLOADED)}."
    if of_experts := sorted(set(modules) & set(_OF_EXPERTS)):
        yield (
            f"--offload-modules {' '.join(of_experts)}: experts are offloaded with their layers alone; use "
            "--cpu-offloading --cpu-offloading-num-layers N."
        )
    if wrong := sorted(set(modules) - set(OFFLOADED) - set(_OF_EXPERTS)):
        yield f"--offload-modules {' '.join(wrong)}: choose from {', '.join(OFFLOADED)}."
    if "attn_proj" in modules and "core_attn" not in modules:
        yield ("--offload-modules attn_proj needs core_attn, which keeps the same tensor; add core_attn.")


def _check_optimizer(args: Args, explicit: Collection[str]) -> Iterator[str]:
    fraction = args.optimizer_offload_fraction
    if not 0 < fraction <= 1:
        yield f"--optimizer-offload-fraction {fraction} must lie in (0, 1]; leave --optimizer-cpu-offload out for 0."
    held = "--optimizer-cpu-offload" if args.optimizer_cpu_offload else "--use-precision-aware-optimizer"
    unpinned = [f"--no-{name.replace('_', '-')}" for name in ("pin_cpu_grads", "pin_cpu_params") if name in explicit]
    if unpinned and not args.optimizer_cpu_offload:
        yield f"{', '.join(unpinned)} without --optimizer-cpu-offload: nothing is copied; leave it out."
    if not (args.optimizer_cpu_offload or args.use_precision_aware_optimizer):
        return
    if args.use_stateless_adam:
        yield f"{held} has no moments to hold with --use-stateless-adam; leave one out."
    if args.main_grads_dtype == "bf16" and (args.fp16 or "grad_reduce_in_fp32" in explicit):
        other = "--fp16" if args.fp16 else "--accumulate-allreduce-grads-in-fp32"
        yield f"--main-grads-dtype bf16 and {other} exclude each other; leave one out."
