"""Which models run on which engines: the file of `--sglang-config`, and what `--prefill-num-servers` is short for.

    sglang:
      - name: policy
        server_groups:
          - {worker_type: prefill, num_gpus: 2, overrides: {chunked_prefill_size: 4096}}
          - {worker_type: decode, num_gpus: 4, num_gpus_per_engine: 2}
      - {name: judge, model_path: /models/judge, server_groups: [{worker_type: regular, num_gpus: 2}]}

It says what is asked for and whether that can work; it starts and places nothing.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from slime.config.args import Args
from slime.config.custom_config import FlagReader, read_flag
from slime.config.parser import Parser
from slime.config.problems import NoEffect, Problems, read_file
from slime.config.sglang.options import OTHER_NAMES, OWNED, PREFIX, missing_packages, table_of
from slime.utils.errors import UsageError, refuse, sentences
from slime.utils.files.yaml_config import KeyPath, LocatedYaml, load_yaml, validate
from slime.utils.misc import needed

FLAG = "--sglang-config"
WorkerType = Literal["regular", "prefill", "decode", "placeholder", "encoder"]
# ServerArgs field -> what to use instead, in the overrides of a group.
GROUP_OWNED = {name: remedy for name, remedy in OWNED.items() if name != "model_path"} | {
    "config": "give each field as an override",
    "tp_size": "use num_gpus_per_engine",
    "nnodes": "it follows from num_gpus_per_engine",
    "disaggregation_mode": "use worker_type",
    "disaggregation_bootstrap_port": "slime finds free ports",
    "encoder_only": "use worker_type encoder",
    "language_only": "it follows from the encoder groups",
    "encoder_urls": "they follow from the encoder groups",
}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class ServerGroupConfig(_Strict):
    """Engines of one kind.

    Attributes:
        worker_type: what they do; `placeholder` keeps GPUs free of engines.
        num_gpus: of all engines together.
        num_gpus_per_engine: None stands for the model's.
        overrides: field of SGLang's ServerArgs -> value, over the `--sglang-*` flags.
    """

    worker_type: WorkerType
    num_gpus: int = Field(gt=0)
    num_gpus_per_engine: int | None = Field(default=None, gt=0)
    overrides: dict[str, Any] = Field(default_factory=dict)

    @property
    def num_engines(self) -> int:
        """How many engines there are, once num_gpus_per_engine is resolved."""
        return 0 if self.worker_type == "placeholder" else self.num_gpus // (self.num_gpus_per_engine or 1)


class ModelConfig(_Strict):
    """A model and the groups of engines that serve it behind one router.

    Attributes:
        name: key of `args.sglang_model_routers`.
        model_path: HF directory; None stands for --hf-checkpoint.
        num_gpus_per_engine: of groups that do not say; None stands for --rollout-num-gpus-per-engine.
        update_weights: whether the trainer's weights go there; None: if it is the model of --hf-checkpoint.
        server_groups: a model with none is left out of the run.
    """

    name: str = Field(min_length=1)
    model_path: str | None = None
    num_gpus_per_engine: int | None = Field(default=None, gt=0)
    update_weights: bool | None = None
    server_groups: list[ServerGroupConfig] = Field(validation_alias=AliasChoices("server_groups", "engine_groups"))

    def resolve(self, args: Args) -> None:
        """Fill in, in place, what the file leaves to flags.

        Args:
            args: reads `rollout_num_gpus_per_engine` and `hf_checkpoint`.

        Raises:
            UsageError: the groups do not share one model_path.
        """
        paths = {group.overrides.get("model_path", self.model_path) or args.hf_checkpoint for group in self._serving()}
        if len(paths) > 1:
            listed = ", ".join(sorted(map(str, paths)))
            raise UsageError(f"{FLAG}: the groups of model {self.name} must share one model_path, not {listed}.")
        self.model_path = next(iter(paths), self.model_path or args.hf_checkpoint)
        self.num_gpus_per_engine = self.num_gpus_per_engine or args.rollout_num_gpus_per_engine
        if self.update_weights is None:
            self.update_weights = self.model_path == args.hf_checkpoint
        for group in self.server_groups:
            group.num_gpus_per_engine = group.num_gpus_per_engine or self.num_gpus_per_engine

    def _serving(self) -> list[ServerGroupConfig]:
        return [group for group in self.server_groups if group.worker_type != "placeholder"]

    def has(self, *worker_types: WorkerType) -> bool:
        """Whether there is a group of one of these types."""
        return any(group.worker_type in worker_types for group in self.server_groups)

    @property
    def has_pd_disaggregation(self) -> bool:
        """Whether prefill and decoding are done by different engines."""
        return self.has("prefill", "decode")

    @property
    def has_encoder_disaggregation(self) -> bool:
        """Whether images are encoded by engines of their own."""
        return self.has("encoder")

    @property
    def total_num_gpus(self) -> int:
        """GPUs of all groups, placeholders included."""
        return sum(group.num_gpus for group in self.server_groups)


class SglangConfig(_Strict):
    """All models of a run; the first one's router is the default."""

    models: list[ModelConfig] = Field(min_length=1)

    @property
    def has_pd_disaggregation(self) -> bool:
        """Whether prefill and decoding of any model are done by different engines."""
        return any(model.has_pd_disaggregation for model in self.models)

    @staticmethod
    def from_yaml(path: str) -> SglangConfig:
        """Read a file.

        Raises:
            FileUnusable: it is not there or cannot be read.
            UsageError: with one sentence and line per problem.
        """
        return _read(path)[0]

    @staticmethod
    def from_prefill_num_servers(args: Args) -> SglangConfig:
        """One model with `--prefill-num-servers` prefill engines; the other engines decode.

        Args:
            args: reads `prefill_num_servers`, `rollout_num_gpus` and `rollout_num_gpus_per_engine`.

        Raises:
            UsageError: no GPUs are left for decoding.
        """
        prefill = needed(args.prefill_num_servers) * args.rollout_num_gpus_per_engine
        decode = args.rollout_num_gpus - prefill
        if decode < 1:
            raise UsageError(
                f"--prefill-num-servers {args.prefill_num_servers} leaves none of --rollout-num-gpus "
                f"{args.rollout_num_gpus} for decoding; lower it."
            )
        groups = [
            ServerGroupConfig(worker_type="prefill", num_gpus=prefill),
            ServerGroupConfig(worker_type="decode", num_gpus=decode),
        ]
        return SglangConfig(models=[ModelConfig(name="default", server_groups=groups)])

    @property
    def total_num_gpus(self) -> int:
        """GPUs of all models, placeholders included."""
        return sum(model.total_num_gpus for model in self.models)


class _File(_Strict):
    sglang: list[ModelConfig] = Field(min_length=1)


def _read(path: str) -> tuple[SglangConfig, LocatedYaml]:
    located = load_yaml(path, FLAG)
    config = SglangConfig(models=validate(_File, located).sglang)
    problems = [
        sentence for number in range(len(config.models)) for sentence in _model_problems(config, number, located)
    ]
    problems += _read_overrides(config, located)
    refuse(problems)
    return config, located


def _groups_of(config: SglangConfig, located: LocatedYaml) -> Iterator[tuple[KeyPath, ModelConfig, ServerGroupConfig]]:
    """(path in the file, model, group) of every group."""
    for number, model in enumerate(config.models):
        key = "server_groups" if "server_groups" in located.value["sglang"][number] else "engine_groups"
        for place, group in enumerate(model.server_groups):
            yield ("sglang", number, key, place), model, group


def _model_problems(config: SglangConfig, number: int, located: LocatedYaml) -> Iterator[str]:
    """What is wrong with the groups of one model as a whole."""
    model, where = config.models[number], ("sglang", number)
    there, missing = ("prefill", "decode") if model.has("prefill") else ("decode", "prefill")
    groups = [group for other in config.models for group in other.server_groups]
    return sentences(
        (
            model.name in [other.name for other in config.models[:number]],
            located.sentence((*where, "name"), f"the name {model.name!r} is there twice; each model has a router."),
        ),
        (
            model.has("prefill") != model.has("decode"),
            located.sentence(where, f"{there} groups need a {missing} group too."),
        ),
        (
            model.has_encoder_disaggregation and not model.has("regular", "prefill"),
            located.sentence(where, "encoder groups need a regular or prefill group that uses them."),
        ),
        (
            groups and all(group.worker_type == "placeholder" for group in groups),
            located.sentence(where, "there are only placeholders, so no engine."),
        ),
    )


def _read_overrides(config: SglangConfig, located: LocatedYaml) -> list[str]:
    """Give the overrides the types of their `--sglang-*` flags, in place; a sentence for each that cannot be used."""
    if "sglang" in missing_packages():
        return []  # said by arguments.py: engines cannot run
    reader, problems = _reader(), []
    for where, _, group in _groups_of(config, located):
        read: dict[str, Any] = {}
        for key, value in group.overrides.items():
            try:
                read |= _read_override(key, value, reader)
            except ValueError as error:
                problems.append(located.sentence((*where, "overrides", key), f"{error}."))
        group.overrides = read
    return problems


@functools.cache
def _reader() -> FlagReader:
    parser = Parser()
    table_of("sglang").add_to(parser)
    return FlagReader(parser.options())


def _read_override(key: str, value: Any, reader: FlagReader) -> dict[str, Any]:
    name = key.replace("-", "_")
    name = OTHER_NAMES.get(name, name)
    if remedy := GROUP_OWNED.get(name):
        raise ValueError(f"is set by slime: {remedy}")
    if name == "model_path":
        if not isinstance(value, str):
            raise ValueError(f"{value!r} is no path")
        return {name: value}
    found = reader.find(PREFIX + name)
    if found is None:
        near = reader.did_you_mean(PREFIX + name).replace(PREFIX, "").rstrip("?.")
        raise ValueError(f"SGLang's ServerArgs has no such field; {near}")
    return {attribute.removeprefix(PREFIX): item for attribute, item in read_flag(found, value).items()}


def read_topology(args: Args) -> tuple[SglangConfig | None, Problems]:
    """The engines that flags ask for, resolved, and what is wrong with them; None where no flag describes them.

    Args:
        args: reads `sglang_config`, `prefill_num_servers`, `rollout_num_gpus`, `rollout_num_gpus_per_engine`,
            `hf_checkpoint` and `sglang_pp_size`.
    """
    problems = Problems()
    config: SglangConfig | None = None
    located = LocatedYaml("", "--prefill-num-servers", {"sglang": [{"server_groups": []}]})
    if args.sglang_config is not None:
        config, located = read_file(problems, _read, args.sglang_config) or (None, located)
    elif (args.prefill_num_servers or 0) > 0 < args.rollout_num_gpus_per_engine and args.rollout_num_gpus is not None:
        # there are numbers to compute with; others are refused elsewhere
        config = read_file(problems, SglangConfig.from_prefill_num_servers, args)
    if config is None:
        return None, problems
    for model in config.models:
        read_file(problems, model.resolve, args)
    problems.wrong += _size_problems(config, located, args)
    for number, model in enumerate(config.models):
        is_served = bool(model.server_groups) and model.model_path != args.hf_checkpoint
        if is_served and not os.path.isfile(f"{model.model_path}/config.json"):
            text = f"{model.model_path} is no HF directory: it has no config.json."
            problems.environment.append(located.sentence(("sglang", number, "model_path"), text))
    _leave_out_models_without_engines(config, located, problems)
    return config, problems


def _leave_out_models_without_engines(config: SglangConfig, located: LocatedYaml, problems: Problems) -> None:
    """Take models whose list of groups is empty out of the config, each with a warning."""
    if not config.models[0].server_groups:
        text = "is empty, and the first model's engines generate the rollouts; give it some, or name another first."
        problems.wrong.append(located.sentence(("sglang", 0, "server_groups"), text))
        return
    empty = [model.name for model in config.models if not model.server_groups]
    problems.wrong += [NoEffect(f"{FLAG}: model {name}", "without server_groups", "leave it out") for name in empty]
    config.models = [model for model in config.models if model.server_groups]


def _size_problems(config: SglangConfig, located: LocatedYaml, args: Args) -> Iterator[str]:
    """What does not divide or add up."""
    for where, model, group in _groups_of(config, located):
        per_engine = group.num_gpus_per_engine or model.num_gpus_per_engine or args.rollout_num_gpus_per_engine
        if group.worker_type == "placeholder":
            continue
        if group.num_gpus % per_engine:
            text = f"{group.num_gpus} does not divide into engines of {per_engine} GPUs; change num_gpus_per_engine."
            yield located.sentence((*where, "num_gpus"), text)
        pp_size = group.overrides.get("pp_size", args.sglang_pp_size)
        if pp_size < 1 or per_engine % pp_size:
            yield located.sentence(where, f"pp_size {pp_size} does not divide engines of {per_engine} GPUs.")
    if args.rollout_num_gpus is not None and config.total_num_gpus != args.rollout_num_gpus:
        parts = " + ".join(f"{model.total_num_gpus} ({model.name})" for model in config.models)
        text = f"the groups have {parts} = {config.total_num_gpus} GPUs, but --rollout-num-gpus is "
        yield located.sentence(("sglang",), f"{text}{args.rollout_num_gpus}; make them equal.")
