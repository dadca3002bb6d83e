"""Which linear layers get LoRA adapters (--lora-rank), and which models, layouts and checkpoints cannot have them.

A run trains adapters over a base that stays as it is: --ref-load, or without it --hf-checkpoint. Checkpoints of the
run hold the adapters alone, so a run that resumes loads the base from there again. This module reads flags and small
JSON files; slime.backends.megatron_utils.layers.lora builds the adapters.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.checkpoints.paths import adapters_in, classify_checkpoint, resolve_checkpoint_dir
from slime.config.args import Args
from slime.config.megatron.derived import query_groups
from slime.config.megatron.flag_classes import option_of
from slime.config.problems import Check, NoEffect, Rule, broken, for_each, plain_option
from slime.models.families import OUTPUT_LAYER, projections_of
from slime.utils.errors import UsageError
from slime.utils.misc import needed
from slime.weights.adapters import FUSED_IN_ENGINES, adapter_differences
from slime.weights.formats import format_of_checkpoint

ALL_LINEAR = "all-linear"
ADAPTER = "adapter"
"""A value of --lora-serve."""
EXPERTS = "experts"
"""Of --lora-exclude-modules: the routed experts, whatever their projections are called."""


@dataclass(frozen=True)
class LoraPlan:
    """The adapters of a run; checkpoints say it of theirs (`saved_plan`).

    Attributes:
        rank: of every adapter.
        alpha: the product B A is multiplied by alpha / rank.
        projections: Megatron's linear layers with adapters -> HF's names of the projections that each holds.
        use_rslora: it is multiplied by alpha / sqrt(rank) (arXiv 2312.03732).
        dropout: share of an adapter's inputs that a training pass leaves out.
        init: how A is drawn: "default" (Kaiming, uniform) or "gaussian"; both as PEFT does.
    """

    rank: int
    alpha: float
    projections: Mapping[str, tuple[str, ...]]
    use_rslora: bool = False
    dropout: float = 0.0
    init: str = "default"

    @classmethod
    def of(cls, args: Args) -> LoraPlan | None:
        """The plan of the flags; None where all weights are trained, and for tools, which have no such flag."""
        if (rank := vars(args).get("lora_rank")) is None:
            return None
        given, excluded = args.lora_target_modules or [ALL_LINEAR], args.lora_exclude_modules or ()
        projections = {
            linear: names
            for linear, names in projections_of(args).items()
            if _is_asked_for(linear, names, given)
            and not any(name in excluded for name in names)
            and not (EXPERTS in excluded and "{e}" in linear)
            and not (linear == OUTPUT_LAYER and _is_critic(args))
        }
        alpha = 2.0 * rank if args.lora_alpha is None else args.lora_alpha
        return cls(rank, alpha, projections, args.lora_use_rslora, args.lora_dropout, args.lora_init)

    @property
    def scale(self) -> float:
        """Factor of the product B A."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)

    @property
    def linears(self) -> list[str]:
        """Megatron's linear layers that get adapters, by their names in a decoder layer."""
        return list(self.projections)

    @property
    def target_modules(self) -> list[str]:
        """HF's names of the projections, in their order in a layer."""
        return list(dict.fromkeys(name for names in self.projections.values() for name in names))

    @property
    def has_experts(self) -> bool:
        """Whether routed experts have adapters."""
        return any("{e}" in linear for linear in self.projections)

    @property
    def has_output_layer(self) -> bool:
        """Whether the output layer has an adapter."""
        return OUTPUT_LAYER in self.projections

    def as_json(self) -> dict[str, Any]:
        """What a checkpoint of these adapters says of them."""
        return {
            "rank": self.rank,
            "alpha": self.alpha,
            "target_modules": self.target_modules,
            "use_rslora": self.use_rslora,
            "has_experts": self.has_experts,
        }


def _is_asked_for(linear: str, names: Iterable[str], given: Collection[str]) -> bool:
    """Whether --lora-target-modules names a linear layer, which holds the projections `names`."""
    return any(name in given for name in names) or (ALL_LINEAR in given and linear != OUTPUT_LAYER)


def _is_critic(args: Args) -> bool:
    return vars(args).get("loss_type") == "value_loss"


def served_plan(args: Args) -> LoraPlan | None:
    """The adapters that engines serve beside the model; None where they get a model with adapters merged in."""
    return LoraPlan.of(args) if vars(args).get("lora_serve") == ADAPTER else None


def base_of(args: Args) -> str:
    """The checkpoint under the adapters: --ref-load, or without it --hf-checkpoint."""
    return str(args.ref_load or args.hf_checkpoint)


# ---- what cannot work

_UNPROVEN = {
    "experimental_attention_variant": "adapters are built for Megatron's grouped attention so far",
    "attention_output_gate": "adapters are built for attention without a gate so far",
    "spec": "adapters are built for slime's own layers",
    "custom_model_provider_path": "adapters are built for slime's own layers",
    "mtp_num_layers": "prediction layers would see another model than they were trained for",
    "megatron_deepgemm_forward_layers": "the forward pass in fp8 knows no adapters",
    "only_train_params_name_list": "with adapters the base is frozen as a whole",
    "freeze_params_name_list": "with adapters the base is frozen as a whole",
    "ref_update_interval": "the reference of adapters is the base, which stays",
    "opd_teacher_load": "the trainer's teacher would take the place of the base; use --opd-type sglang",
}
"""Attribute -> why it does not go with --lora-rank."""


def _check_targets(args: Args) -> Iterator[str]:
    """All names are projections of the model; those that are one weight in trainer and engine go together."""
    known = projections_of(args)
    names = [*dict.fromkeys(name for parts in known.values() for name in parts)]
    if not args.hf_checkpoint or not args.num_layers:
        return
    given, excluded = args.lora_target_modules or [ALL_LINEAR], args.lora_exclude_modules or []
    more = {"--lora-target-modules": [ALL_LINEAR], "--lora-exclude-modules": [EXPERTS]}
    for flag, values in zip(more, (given, excluded), strict=True):
        for value in values:
            if value not in (*names, *more[flag]):
                why = "embeddings have none" if value == "embed_tokens" else "the model has no such projection"
                yield f"{flag} {value}: {why}; adapters are built for {', '.join(names) or 'nothing of it'}."
    asked = [name for linear, parts in known.items() for name in parts if _is_asked_for(linear, [name], given)]
    taken = [name for name in asked if name not in excluded]
    fused = FUSED_IN_ENGINES.values() if args.lora_serve == ADAPTER else ()
    for parts in dict.fromkeys([*known.values(), *fused]):
        there = [name for name in parts if name in names]
        missing = [name for name in there if name not in taken]
        if 0 < len(missing) < len(there):
            is_excluded = ALL_LINEAR in given or not set(missing) - set(excluded)
            named = " ".join(excluded if is_excluded else given)
            flag = f"--lora-{'exclude' if is_excluded else 'target'}-modules {named}"
            yield (
                f"{flag} lacks {' and '.join(missing)}: {', '.join(there)} are one weight in trainer or engine; name "
                "all of them, or none."
            )
    if names and not taken and excluded:
        yield f"--lora-exclude-modules {' '.join(excluded)} leaves no projection to train; name fewer."
    if "lm_head" in taken and _is_critic(args):
        flag, why = "--lora-target-modules lm_head", "a critic, which has a value head in the output layer's place"
        yield NoEffect(flag, f"for {why}") if taken[1:] else f"{flag} is nothing for {why}; name other projections."


def _check_family(args: Args) -> Iterator[str]:
    """A model whose MLP is one projection in HF has none that adapters are built for."""
    known = projections_of(args)
    takes_all = ALL_LINEAR in (args.lora_target_modules or [ALL_LINEAR])
    if args.hf_checkpoint and known and takes_all and not any(linear.endswith("fc1") for linear in known):
        yield (
            f"--lora-rank {args.lora_rank}: the model has gate_proj and up_proj as one gate_up_proj, for which no "
            "adapters are built; name its other projections with --lora-target-modules, or train all weights."
        )


def _check_adapter_path(args: Args) -> Iterator[str]:
    """--lora-adapter-path is a PEFT directory with adapters of these flags, over this base."""
    if args.lora_adapter_path is None:
        return
    file, plan = Path(args.lora_adapter_path) / "adapter_config.json", needed(LoraPlan.of(args))
    try:
        saved = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        yield f"--lora-adapter-path {args.lora_adapter_path}: {file} cannot be read ({error}); give a PEFT directory."
        return
    yield from (
        f"--lora-adapter-path {args.lora_adapter_path}: {text}"
        for text in adapter_differences(saved, plan.rank, plan.scale, plan.target_modules)
    )
    base = saved.get("base_model_name_or_path")
    ours = {Path(str(path)).name.lower() for path in (base_of(args), args.hf_checkpoint) if path}
    if base and Path(base).name.lower() not in ours:
        yield (
            f"--lora-adapter-path {args.lora_adapter_path} holds an adapter of {base}, and the base is "
            f"{base_of(args)}; give its base as --hf-checkpoint, or name ours in {file} if both are the same model."
        )


def _is_quantized(args: Args) -> bool:
    with suppress(UsageError, OSError, ValueError):  # said elsewhere
        return bool(args.hf_checkpoint) and format_of_checkpoint(args.hf_checkpoint) is not None
    return False


def _check_load(args: Args) -> Iterator[str]:
    """What training starts from is adapters that fit the flags, or the base."""
    plan, base, saved = LoraPlan.of(args), base_of(args), adapters_in(args.load, args.ckpt_step)
    if adapters_in(args.ref_load, args.ref_ckpt_step):
        yield f"--ref-load {args.ref_load} holds LoRA adapters alone; give the model under them."
    if saved and plan is None:
        yield (
            f"--load {args.load} holds LoRA adapters alone; add --lora-rank {saved['rank']} --lora-alpha "
            f"{saved['alpha']:g} --lora-target-modules {' '.join(saved['target_modules'])}."
        )
    elif saved and plan is not None:
        differences = [f"{key} {saved.get(key)}" for key, ours in plan.as_json().items() if saved.get(key) != ours]
        if differences:
            yield f"--load {args.load} holds adapters with {', '.join(differences)}; repeat its --lora-* flags."
    elif plan and classify_checkpoint(args.load) and Path(str(args.load)).resolve() != Path(base).resolve():
        flag = "--ref-load" if args.ref_load else "--hf-checkpoint"
        yield (
            f"--load {args.load} holds no adapters, and the base of --lora-rank {plan.rank} is {flag} {base}; give "
            "the base as --ref-load."
        )
    elif plan is not None and not saved and not adapters_in(args.ref_load, args.ref_ckpt_step):
        yield from _check_iteration(args, base)


def _check_iteration(args: Args, base: str) -> Iterator[str]:
    """The start and the reference are one iteration of the base: adapters alone are swapped, and a run that resumes
    loads the reference's."""
    is_given = classify_checkpoint(args.load) is not None
    step = args.ckpt_step if is_given or args.ckpt_step is not None else args.ref_ckpt_step
    start, reference = _iteration(args.load if is_given else base, step), _iteration(base, args.ref_ckpt_step)
    if start != reference:
        yield (
            f"--lora-rank {args.lora_rank}: training starts from {start}, and the reference is {reference}; adapters "
            "have one base, so give both --ckpt-step and --ref-ckpt-step, with the same iteration."
        )


def _iteration(path: str | None, step: int | None) -> Path | None:
    """The directory of a Megatron checkpoint that is read; None for anything else."""
    try:
        return resolve_checkpoint_dir(str(path), step)[0] if classify_checkpoint(path) == "megatron" else None
    except (UsageError, OSError, ValueError):
        return None  # said elsewhere


LORA: tuple[Check, ...] = (
    for_each(
        lambda a: _UNPROVEN,
        lambda a, name: vars(a).get(name) not in (None, False, 0),
        lambda a, name: (
            f"{option_of(name)} does not go with --lora-rank {a.lora_rank}: {_UNPROVEN[name]}; leave one "
            "of the two out."
        ),
    ),
    Rule(
        lambda a: a.lora_alpha is not None and a.lora_alpha <= 0,
        "--lora-alpha {lora_alpha:g}: adapters are multiplied by alpha / rank, so it must be above 0; leave it out "
        "for twice the rank.",
    ),
    Rule(
        lambda a: a.moe_router_enable_expert_bias and a.moe_router_bias_update_rate,
        "--moe-router-bias-update-rate {moe_router_bias_update_rate:g} with --lora-rank {lora_rank} would change the "
        "base, of which neither checkpoints nor engines would learn; give 0.",
    ),
    Rule(
        lambda a: a.transformer_impl == "transformer_engine",
        "--transformer-impl transformer_engine does not go with --lora-rank {lora_rank}: adapters are built for "
        "Megatron's own linear layers; use --transformer-impl local.",
    ),
    Rule(
        lambda a: a.update_weight_mode == "delta",
        "--update-weight-mode delta does not go with --lora-rank {lora_rank}: every byte of an adapter, or of weights "
        "with adapters merged in, may change; use full.",
    ),
    Rule(
        lambda a: a.lora_serve == "merged" and _is_quantized(a),
        "--hf-checkpoint {hf_checkpoint} is quantised: with --lora-serve merged adapters of --lora-rank {lora_rank} "
        "are lost where the weights that hold them are rounded; use --lora-serve adapter, or the bf16 model.",
    ),
    Rule(
        lambda a: (
            (plan := LoraPlan.of(a))
            and plan.has_output_layer
            and not a.untie_embeddings_and_output_weights
            and (a.lora_serve == "merged" or a.save_hf or "hf" in (a.checkpoint_contents or ()))
        ),
        "--lora-target-modules lm_head: the model's output layer is its embedding, and merged it would not be any "
        "more; use --lora-serve adapter, leave out --save-hf and hf of --checkpoint-contents, and merge with "
        "tools/convert_lora.py, which writes them apart.",
    ),
    Rule(
        lambda a: a.tensor_model_parallel_size > 1 and query_groups(a) % a.tensor_model_parallel_size,
        lambda a: (
            f"--tensor-model-parallel-size {a.tensor_model_parallel_size} with --lora-rank {a.lora_rank}: the "
            f"{query_groups(a)} query groups have to be divided by it; use fewer ranks."
        ),
    ),
    Rule(
        lambda a: a.lora_dropout and (plan := LoraPlan.of(a)) and plan.has_experts,
        "--lora-dropout {lora_dropout:g} does not go with adapters of experts: ranks would draw different masks for "
        "one token; add --lora-exclude-modules experts, or leave it out.",
    ),
    Rule(
        lambda a: (
            (a.expert_tensor_parallel_size or 1) > 1
            and a.expert_tensor_parallel_size != a.tensor_model_parallel_size
            and (plan := LoraPlan.of(a))
            and plan.has_experts
        ),
        "--expert-tensor-parallel-size {expert_tensor_parallel_size} with --tensor-model-parallel-size "
        "{tensor_model_parallel_size} and adapters of experts: Megatron would count gradients twice in the norm; "
        "give 1, or the same size, or --lora-exclude-modules experts.",
    ),
    _check_targets,
    _check_family,
    _check_adapter_path,
)


def _given(args: Args, name: str) -> Any:
    """The value of an explicit --sglang-* flag."""
    return (vars(args).get("sglang_overrides") or {}).get(name)


NOT_WITH_ADAPTERS = {
    "quantization": "SGLang would quantise as it loads; make a checkpoint with tools/convert_hf_to_fp8.py",
    "load_format": "engines keep the base that they start with",
    "torchao_config": "engines would compute the model's product in another type than the trainer's",
    "enable_dp_attention": "an engine whose ranks have different requests is not proven with adapters",
    "tokenizer_worker_num": "one process of an engine has to know which version is served",
    "pp_size": "an engine of several pipeline stages is not proven with adapters",
    "speculative_algorithm": "drafts would come from the model without the adapter",
    "lora_target_modules": "the run gives them, as of --lora-target-modules",
    "lora_paths": "the run loads its own adapters",
    "max_loaded_loras": "SGLang would unload adapters by itself, and hold up loads until their requests end",
    "enable_lora_overlap_loading": "it is not proven with adapters that come and go",
    "experts_shared_outer_loras": "each expert of the trainer has an A and a B of its own",
}
"""ServerArgs field -> why it does not go with adapters that engines serve."""


def adapters_exclude(name: str, value: Any) -> bool:
    """Whether engines with this value of a ServerArgs field cannot serve adapters."""
    is_named = value == "dummy" if name == "load_format" else name in NOT_WITH_ADAPTERS
    usual = (1,) if name in ("pp_size", "tokenizer_worker_num") else ()
    return bool(is_named and value not in (None, False, *usual))


_RUN_FLAGS = {
    "rollout_external_engine_addrs": "engines that the run did not start do not give requests the newest version",
    "prefill_num_servers": "one answer comes from two engines, which could serve two versions",
    "check_weight_update_equal": "it overwrites the engines' model, which is never sent; the first sync compares it",
    "custom_update_weight_post_write_path": "a version is an adapter, not a model",
    "update_weight_local_checkpoint_dir": "a version is an adapter, not a model",
}
"""Attribute -> the same of flags of the run."""
_WHERE = ("no kernel of SGLang's is proven over a quantised base", "engines on the CPU have no kernel")


def _without_kernel(args: Args) -> list[str]:
    """HF's names of projections whose adapters SGLang serves by kernels in triton, where these cannot be used."""
    plan = LoraPlan.of(args)
    if plan is None or (args.accelerator != "cpu" and not _is_quantized(args)):
        return []
    of_experts, latent = "mlp." if args.num_moe_experts else "experts.", "linear_kv_up_proj"
    linears = [linear for linear in plan.linears if of_experts in linear or latent in linear]
    return [*dict.fromkeys(name for linear in linears for name in plan.projections[linear])]


SERVED: tuple[Check, ...] = (
    Rule(
        _without_kernel,
        lambda a: (
            f"--lora-serve adapter: {_WHERE[a.accelerator == 'cpu']} for adapters of {', '.join(_without_kernel(a))}; "
            "use --lora-serve merged (with an unquantised base), or --lora-exclude-modules "
            f"{' '.join(_without_kernel(a))}."
        ),
    ),
    Rule(
        lambda a: needed(a.lora_rank) > (_given(a, "max_lora_rank") or needed(a.lora_rank)),
        lambda a: (
            f"--lora-rank {a.lora_rank} is over --sglang-max-lora-rank {_given(a, 'max_lora_rank')}, for which "
            "engines have room; raise it, or leave it out."
        ),
    ),
    Rule(
        lambda a: (_given(a, "max_loras_per_batch") or 2) < 2,
        lambda a: (
            f"--sglang-max-loras-per-batch {_given(a, 'max_loras_per_batch')} does not go with --lora-serve adapter: "
            "the model without adapters takes one of these places; give 2 or more."
        ),
    ),
    Rule(
        lambda a: (plan := LoraPlan.of(a)) and plan.has_output_layer and _given(a, "enable_fp32_lm_head"),
        "--sglang-enable-fp32-lm-head does not go with --lora-target-modules lm_head: SGLang computes an output layer "
        "with an adapter in the model's own type; leave one of the two out.",
    ),
    Rule(
        lambda a: a.elastic_rollout and not a.update_weight_disk_dir,
        "--elastic-rollout with --lora-serve adapter: engines that join from other hosts read adapters from files; "
        "give --update-weight-disk-dir, a directory that all hosts share, or --lora-serve merged.",
    ),
    for_each(
        lambda a: NOT_WITH_ADAPTERS,
        lambda a, name: adapters_exclude(name, _given(a, name)),
        lambda a, name: (
            f"--sglang-{name.replace('_', '-')} {_given(a, name)} does not go with --lora-serve adapter: "
            f"{NOT_WITH_ADAPTERS[name]}; leave it out, or give --lora-serve merged."
        ),
    ),
    for_each(
        lambda a: _RUN_FLAGS,
        lambda a, name: bool(vars(a).get(name)),
        lambda a, name: (
            f"{plain_option(name)} does not go with --lora-serve adapter: {_RUN_FLAGS[name]}; leave it out, or give "
            "--lora-serve merged."
        ),
    ),
)


def lora_problems(args: Args) -> Iterator[str]:
    """Yield a sentence for everything that is wrong with --lora-rank, and with adapters in --load or --ref-load."""
    if args.lora_rank is not None:
        yield from broken(LORA, args)
    if served_plan(args) is not None:
        yield from broken(SERVED, args)
    yield from _check_load(args)
