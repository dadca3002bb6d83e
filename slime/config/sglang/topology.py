"""Which engines a run starts, for which model, and on which of its slots: from the flags, whatever described them.

A run has one model ("default"), those of --sglang-config, or what --prefill-num-servers is short for; a reward model
(--reward-model-path) comes behind them. Slots are numbered as the engines take them: group after group, model after
model, those of the reward model last. It reads files only through `sglang_config`, and starts and places nothing.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from slime.config.args import Args
from slime.config.megatron.lora_plan import NOT_WITH_ADAPTERS, adapters_exclude, served_plan
from slime.config.problems import Problems
from slime.config.sglang.served_models import quantization_problems, shape_problems
from slime.config.sglang.sglang_config import SglangConfig, WorkerType, read_topology
from slime.models.families import family_of_config
from slime.plan.layout import slot_layout
from slime.utils.errors import sentences
from slime.weights.names import read_config
from slime.weights.transports import transport_of

DEFAULT_MODEL = "default"
REWARD_MODEL = "reward"
# What makes SGLang answer /classify whatever the name of the architecture says.
REWARD_SETTINGS = {"is_embedding": True}


@dataclass(frozen=True)
class EngineGroupPlan:
    """Engines of one kind.

    Attributes:
        worker_type: what they do; `placeholder` keeps slots free of engines.
        num_gpus: slots of all engines together.
        num_gpus_per_engine: slots of one.
        first_slot: the first of them, among the slots of all engines of the run.
        settings: ServerArgs values that were asked for.
    """

    worker_type: WorkerType
    num_gpus: int
    num_gpus_per_engine: int
    first_slot: int
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def engine_slots(self) -> range:
        """The first slot of each engine."""
        end = self.first_slot if self.worker_type == "placeholder" else self.first_slot + self.num_gpus
        return range(self.first_slot, end, self.num_gpus_per_engine)

    @property
    def takes_weights(self) -> bool:
        """Whether the trainer's weights can be sent there: SGLang's encoder server has no endpoint for it."""
        return self.worker_type in ("regular", "prefill", "decode")


def releases_memory(group: EngineGroupPlan, args: Args) -> bool:
    """Whether engines give their GPU memory up while the trainer works: those on GPUs that are the trainer's, too.

    SGLang's encoder server cannot be asked to.

    Args:
        group: the engines.
        args: reads `offload_rollout`, `colocate`, `rollout_num_gpus`.
    """
    is_shared = args.colocate and group.first_slot < (args.rollout_num_gpus or 0)
    return bool(args.offload_rollout and is_shared and group.worker_type != "encoder")


@dataclass(frozen=True)
class ModelPlan:
    """A model, its router and the engines behind it.

    Attributes:
        name: key of `args.sglang_model_routers`.
        model_path: HF directory that its engines start from.
        update_weights: whether the trainer's weights go there.
        groups: in the order of their slots; none where no engine is ours.
    """

    name: str
    model_path: str
    update_weights: bool
    groups: tuple[EngineGroupPlan, ...] = ()

    @property
    def has_pd_disaggregation(self) -> bool:
        """Whether prefill and decoding are done by different engines."""
        return any(group.worker_type in ("prefill", "decode") for group in self.groups)

    @property
    def kind(self) -> str:
        """What its router is to do: "classify", "pd" (disaggregated) or plainly "generate"."""
        if any(group.settings.get("is_embedding") for group in self.groups):
            return "classify"
        return "pd" if self.has_pd_disaggregation else "generate"

    @property
    def num_engines(self) -> int:
        """Engines that generate (or score)."""
        return sum(len(group.engine_slots) for group in self.groups if group.worker_type != "encoder")


def plan_engines(args: Args) -> list[ModelPlan]:
    """The models of a run and their engines; the first one's router is the default.

    What is wrong with the flags is said by `topology_problems`; here it is passed through or left out.

    Args:
        args: reads `debug_train_only`, `rollout_external`, `rollout_num_gpus`, `rollout_num_gpus_per_engine`,
            `hf_checkpoint`, `sglang_overrides`, `reward_model_path`, `reward_model_num_gpus` and what `read_topology`
            does.
    """
    if args.debug_train_only:
        return []
    config, _ = read_topology(args)
    num_slots = 0 if args.rollout_external else args.rollout_num_gpus or 0
    if args.rollout_external or config is None:
        per_engine = max(1, args.rollout_num_gpus_per_engine)
        group = EngineGroupPlan("regular", num_slots, per_engine, 0, dict(args.sglang_overrides))
        models = [ModelPlan(DEFAULT_MODEL, args.hf_checkpoint, True, (group,) if num_slots > 0 else ())]
    else:
        models = list(_models_of(config, args))
        num_slots = config.total_num_gpus
    if args.reward_model_path and REWARD_MODEL not in [model.name for model in models]:
        # Sizes and quantization of --sglang-* are the policy's; a reward model with settings goes to --sglang-config.
        group = EngineGroupPlan("regular", args.reward_model_num_gpus or 1, 1, num_slots, REWARD_SETTINGS)
        models.append(ModelPlan(REWARD_MODEL, args.reward_model_path, False, (group,)))
    return models


def _models_of(config: SglangConfig, args: Args) -> Iterator[ModelPlan]:
    slot = 0
    for model in config.models:
        groups = []
        for group in model.server_groups:
            overrides = {name: value for name, value in group.overrides.items() if name != "model_path"}
            of_role = REWARD_SETTINGS if args.reward_model_path and model.name == REWARD_MODEL else {}
            settings = {**args.sglang_overrides, **of_role, **overrides}
            per_engine = max(1, group.num_gpus_per_engine or args.rollout_num_gpus_per_engine)
            groups.append(EngineGroupPlan(group.worker_type, group.num_gpus, per_engine, slot, settings))
            slot += group.num_gpus
        yield ModelPlan(model.name, str(model.model_path), bool(model.update_weights), tuple(groups))


def num_policy_engines(models: list[ModelPlan], *, num_external: int) -> int:
    """Engines that answer the default router."""
    return (models[0].num_engines if models else 0) + num_external


# ---- what cannot work


def topology_problems(args: Args) -> Problems:
    """What is wrong with the engines that the flags describe, and what they ask for that is not built.

    Args:
        args: as for `plan_engines`, and `accelerator`, `colocate`, `debug_rollout_only`, `num_gpus_per_node`.
    """
    config, problems = read_topology(args)
    problems.extend(_reward_problems(args, config))
    models = plan_engines(args)
    problems.wrong += shape_problems(models)
    problems.extend(quantization_problems(args, models))
    if args.accelerator == "cpu":
        problems.unsupported += _cpu_problems(args, models)
    problems.wrong += _node_problems(args, models)
    problems.wrong += _stage_problems(args, models)
    if served_plan(args) is not None:
        problems.wrong += _adapter_problems(args, models)
    return problems


def _adapter_problems(args: Args, models: list[ModelPlan]) -> Iterator[str]:
    """What --sglang-config asks of engines that serve adapters; flags are judged with --lora-serve."""
    for model in models:
        for group in model.groups if model.update_weights else ():
            own = {n: value for n, value in group.settings.items() if value != args.sglang_overrides.get(n)}
            wrong = {f"{n} {own[n]}": NOT_WITH_ADAPTERS[n] for n in own if adapters_exclude(n, own[n])}
            if group.worker_type in ("prefill", "decode") and not args.prefill_num_servers:
                wrong[f"worker_type {group.worker_type}"] = "two engines make one answer, maybe of two versions"
            for what, why in wrong.items():
                yield (
                    f"--sglang-config: {what} of model {model.name} does not go with --lora-serve adapter: {why}; "
                    "leave it out, or give --lora-serve merged."
                )


def _reward_problems(args: Args, config: SglangConfig | None) -> Problems:
    """The managed reward model: where it comes from, and which slots it takes."""
    path, num_gpus = args.reward_model_path, args.reward_model_num_gpus
    if path is None:
        return Problems()
    declared = next((model for model in config.models if model.name == REWARD_MODEL), None) if config else None
    other = declared.model_path if declared else path
    missing = (
        not os.path.isfile(f"{path}/config.json"),
        f"--reward-model-path {path} is no HF directory: it has no config.json.",
    )
    wrong = sentences(
        (
            other != path,
            f"--reward-model-path {path} is another model than {other}, the model named {REWARD_MODEL!r} of "
            "--sglang-config; name one.",
        ),
        (
            declared and num_gpus is not None,
            f"--reward-model-num-gpus {num_gpus} contradicts --sglang-config, which says where the model named "
            f"{REWARD_MODEL!r} runs; leave it out.",
        ),
        (
            not declared and num_gpus is None,
            f"--reward-model-path {path} needs --reward-model-num-gpus, the GPUs (slots) of its engines, one each.",
        ),
    )
    return Problems(wrong=[*wrong], environment=[*sentences(missing)])


def _cpu_problems(args: Args, models: list[ModelPlan]) -> Iterator[str]:
    """What needs GPUs."""
    for model in models:
        config = read_config(model.model_path or "")
        family = family_of_config(config.get("text_config") or config)
        yield from sentences(
            (
                model.has_pd_disaggregation,
                f"model {model.name}: prefill and decode engines hand over their KV cache between GPUs (mooncake, "
                "nixl), which --accelerator cpu cannot do; use regular engines there (no --prefill-num-servers).",
            ),
            (
                any(group.worker_type == "encoder" for group in model.groups),
                f"model {model.name}: encoder engines process images on GPUs, which --accelerator cpu cannot do; use "
                "regular engines there.",
            ),
            (
                model.groups and family and family.needs_gpu,
                f"model {model.name}: --accelerator cpu cannot serve {model.model_path} (model_type "
                f"{family and family.model_type!r}), for {family and family.needs_gpu}; use a GPU, or train without "
                "engines (--debug-train-only, as SFT does).",
            ),
        )


def _stage_problems(args: Args, models: list[ModelPlan]) -> Iterator[str]:
    """Pipeline-parallel engines that would take weights in a way that their stages cannot.

    A stage of SGLang's hands a request on when it has dealt with it: a stage that waits for the next one in a group
    waits for ever, and the first one's answer says nothing of the others, which may still read.
    """
    if args.debug_rollout_only:
        return
    for model in models:
        sizes = [int(g.settings.get("pp_size") or 1) for g in model.groups if model.update_weights and g.takes_weights]
        if max(sizes, default=1) <= 1:
            continue
        way = transport_of(args.update_weight_transport, args.update_weight_mode)
        if not (way.versions_are_whole and args.update_weight_disk_keep_files):
            yield (
                f"model {model.name}: engines of {max(sizes)} pipeline stages (--sglang-pp-size) take the trainer's "
                "weights from files that stay: give --update-weight-transport disk and "
                "--update-weight-disk-keep-files, or --sglang-pp-size 1."
            )


def _node_problems(args: Args, models: list[ModelPlan]) -> Iterator[str]:
    """Engines that would have unequal shares of the nodes that they lie on; a machine without GPUs is one node."""
    per_node = args.num_gpus_per_node
    if args.accelerator == "cpu" or args.rollout_external or args.rollout_num_gpus is None or per_node < 1:
        return
    slots = slot_layout(args).engine_slots
    for model in models:
        for group in model.groups:
            for first in group.engine_slots:
                own = slots[first : first + group.num_gpus_per_engine]
                shares = Counter(slot // per_node for slot in own)
                if len(set(shares.values())) > 1:
                    parts = " and ".join(f"{count} on node {node}" for node, count in sorted(shares.items()))
                    yield (
                        f"model {model.name}: an engine of {len(own)} GPUs would have {parts} (--num-gpus-per-node "
                        f"{per_node}), but it takes as many of each of its nodes; change "
                        "--rollout-num-gpus-per-engine, the trainer's GPUs before it, or --num-gpus-per-node."
                    )
                    break
