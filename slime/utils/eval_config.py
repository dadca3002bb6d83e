"""Which data sets training and evaluation use, and how each is sampled and graded.

Every field is resolved as data set > `defaults` of the file > flags; `null` counts as not given. It reads no data and
knows nothing of rollouts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, get_type_hints

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model

from slime.utils.errors import UsageError, refuse, sentences
from slime.utils.files.yaml_config import LocatedYaml, load_yaml, validate

if TYPE_CHECKING:
    from slime.config.args import Args
    from slime.utils.types import Sample


FLAG = "--eval-config"
PROMPTS_FLAG = "--prompt-data"
_LIMITS = ("max_response_len", "min_new_tokens", "stop", "stop_token_ids")

# field -> flags that supply it, the first one that is not None wins
_FROM_ARGS: dict[str, tuple[str, ...]] = {
    "input_key": ("eval_input_key", "input_key"),
    "label_key": ("eval_label_key", "label_key"),
    "tool_key": ("eval_tool_key", "tool_key"),
    "metadata_key": ("metadata_key",),
    "multimodal_keys": ("multimodal_keys",),
    "apply_chat_template": ("apply_chat_template",),
    "apply_chat_template_kwargs": ("apply_chat_template_kwargs",),
    "n_samples_per_eval_prompt": ("n_samples_per_eval_prompt",),
    "temperature": ("eval_temperature", "rollout_temperature"),
    "top_p": ("eval_top_p", "rollout_top_p"),
    "top_k": ("eval_top_k", "rollout_top_k"),
    "max_response_len": ("eval_max_response_len", "rollout_max_response_len"),
    "min_new_tokens": ("eval_min_new_tokens",),
    "stop": ("rollout_stop",),
    "stop_token_ids": ("rollout_stop_token_ids",),
    "skip_special_tokens": ("rollout_skip_special_tokens",),
}


@dataclass(kw_only=True)
class HookSettings:
    """Settings of a data set that only hooks read."""

    app_service: Any = None
    eval_task_timeout: Any = None
    min_eval_samples: int | None = None
    eval_early_stop_remaining: Any = None
    eval_early_stop_idle_timeout: Any = None
    message_processor: Any = None
    reward_model: Any = None
    remote_environment: Any = None


@dataclass
class DatasetSettings:
    """What a data set of prompts has, for training and for evaluation; None means that nothing supplied a value."""

    name: str
    path: str
    rm_type: str | None = None
    custom_rm_path: str | None = None
    input_key: str = "input"
    label_key: str | None = None
    tool_key: str | None = None
    metadata_key: str = "metadata"
    multimodal_keys: dict[str, str] | None = None
    apply_chat_template: bool = False
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    max_response_len: int | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_new_tokens: int | None = None
    custom_generate_function_path: str | None = None
    metadata_overrides: dict[str, Any] = field(default_factory=dict)

    def inject_metadata(self, sample_metadata: dict[str, Any]) -> dict[str, Any]:
        """A row's metadata with `rm_type` and `metadata_overrides` merged in."""
        rm_type = {"rm_type": self.rm_type} if self.rm_type else {}
        return {**sample_metadata, **rm_type, **self.metadata_overrides}

    @property
    def where(self) -> str:
        """What it is called in a sentence."""
        return f"evaluation data set {self.name}"

    @property
    def set_for_rollouts(self) -> list[str]:
        """Names of its settings that only generation and grading read."""
        names = ("rm_type", "custom_rm_path", "custom_generate_function_path")
        return [name for name in (*names, *_LIMITS) if vars(self)[name] is not None]

    @property
    def names_reward(self) -> bool:
        """Every sample of it has an rm_type."""
        return bool(self.rm_type or "rm_type" in self.metadata_overrides)


@dataclass
class PromptSource(DatasetSettings):
    """One file of prompts.

    Attributes:
        weight: how often its prompts are drawn, beside the weights of the others; or rollout id -> weight, in a
            straight line between two of them and the same behind the last.
        system_prompt: first message of every prompt that has no system message.
        max_prompt_len: tokens of a prompt, at most.
        is_named: part of a mixture; its name is then `metadata["source_name"]` of its samples.
    """

    weight: float | dict[str, float] = 1.0
    system_prompt: str | None = None
    max_prompt_len: int | None = None
    is_named: bool = True

    @property
    def where(self) -> str:
        """What it is called in a sentence."""
        return f"{PROMPTS_FLAG}, data set {self.name}" if self.is_named else PROMPTS_FLAG

    def weight_at(self, rollout_id: int) -> float:
        """How often its prompts are drawn in a rollout, beside the others."""
        if not isinstance(self.weight, dict):
            return self.weight
        points = sorted((int(at), weight) for at, weight in self.weight.items())
        for (begin, low), (end, high) in pairwise(points):
            if begin <= rollout_id < end:
                return low + (high - low) * (rollout_id - begin) / (end - begin)
        return points[-1][1]

    @property
    def sampling_params(self) -> dict[str, Any]:
        """What it changes of the run's sampling parameters."""
        own = {
            "max_new_tokens": self.max_response_len,
            "min_new_tokens": self.min_new_tokens,
            "stop": self.stop,
            "stop_token_ids": self.stop_token_ids,
        }
        return {name: value for name, value in own.items() if value is not None}

    def metadata_of(self, metadata: dict[str, Any]) -> dict[str, Any]:
        """A row's metadata, with what the source adds."""
        name = {"source_name": self.name} if self.is_named else {}
        return {**self.inject_metadata(metadata), **name}


def sources_of(args: Args) -> Sequence[PromptSource]:
    """The data sets of training; none in args that a user made by hand."""
    return getattr(args, "prompt_sources", None) or ()


def source_of(args: Args, sample: Sample) -> PromptSource | None:
    """The data set of a mixture that a sample's prompt is of; None without a mixture."""
    name = sample.metadata.get("source_name")
    return next((one for one in sources_of(args) if one.is_named and one.name == name), None)


@dataclass
class EvalDatasetConfig(HookSettings, DatasetSettings):
    """One evaluation data set."""

    n_samples_per_eval_prompt: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    skip_special_tokens: bool = False
    no_stop_trim: bool = True

    def __post_init__(self) -> None:
        least, most = self.min_new_tokens, self.max_response_len
        problems = sentences(
            (
                not self.name or not self.path,
                f"an evaluation data set needs a name and a path, not {self.name!r} and {self.path!r}",
            ),
            (
                self.n_samples_per_eval_prompt < 1,
                f"evaluation data set {self.name}: n_samples_per_eval_prompt is {self.n_samples_per_eval_prompt}; it "
                "must be at least 1",
            ),
            (
                least is not None and most is not None and least > most,
                f"evaluation data set {self.name}: min_new_tokens {least} is more than max_response_len {most}; lower "
                "it",
            ),
        )
        refuse(problems)

    @property
    def cache_key(self) -> tuple[Any, ...]:
        """Two configs with equal keys read the same prompts."""
        template = tuple(sorted((key, repr(value)) for key, value in self.apply_chat_template_kwargs.items()))
        keys = (self.input_key, self.label_key, self.tool_key, self.metadata_key)
        kinds = tuple(sorted((self.multimodal_keys or {}).items()))
        return (self.name, self.path, *keys, kinds, self.apply_chat_template, template)


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


NARROWER: dict[str, Any] = {
    "max_response_len": Annotated[int, Field(ge=1)],
    "stop": Annotated[list[str] | None, BeforeValidator(_as_list)],
    "min_new_tokens": Annotated[int, Field(ge=0)],
}
"""What a file may say of a field where its type allows more."""
_NARROWER: dict[str, Any] = NARROWER | {
    "n_samples_per_eval_prompt": Annotated[int, Field(ge=1)],
    "temperature": Annotated[float, Field(ge=0)],
    "top_p": Annotated[float, Field(gt=0, le=1)],
    "top_k": Annotated[int, Field(ge=-1)],
    "repetition_penalty": Annotated[float, Field(gt=0, le=2)],
    "min_eval_samples": Annotated[int, Field(ge=1)],
}
_TEXT = Annotated[str, Field(min_length=1)]


def _model(name: str, kinds: Mapping[str, Any], /, **required: Any) -> type[BaseModel]:
    """Return a strict model with fields of these types, null or left out where they are not required."""
    fields: dict[str, Any] = {key: (kind | None, None) for key, kind in kinds.items()}
    fields |= {key: (kind, ...) for key, kind in required.items()}
    # Built when first used: most runs read no such file, and every command line would pay for it.
    config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, defer_build=True)
    return create_model(name, __config__=config, **fields)


class FileForm:
    """A file of data sets: `datasets` (a list with names, or a mapping from name to settings) and `defaults`.

    Args:
        settings: the dataclass of a data set.
        narrower: field -> type, where a file may say less than the field allows.
        leave_out: fields that no file has.
    """

    def __init__(
        self, settings: type[DatasetSettings], narrower: Mapping[str, Any], *, leave_out: tuple[str, ...] = ()
    ) -> None:
        hints = get_type_hints(settings)
        kinds = {key: hint for key, hint in hints.items() if key not in ("name", "path", *leave_out)} | dict(narrower)
        defaults = _model("_Defaults", kinds)
        named = _model("_NamedDataset", kinds, name=_TEXT, path=_TEXT)
        keyed = _model(
            "_Dataset", kinds | {"name": _TEXT}, path=_TEXT
        )  # its name is its key, unless it says otherwise
        self._list, self._mapping = (
            _model("_File", {"defaults": defaults}, datasets=Annotated[datasets, Field(min_length=1)])
            for datasets in (list[named], dict[_TEXT, keyed])  # type: ignore[valid-type]
        )

    def read(
        self, located: LocatedYaml, at: tuple[str, ...] = ()
    ) -> tuple[list[dict[str, Any]], dict[str, Any], list[tuple[str, ...]]]:
        """(data sets, defaults, the place of each data set) of the part of a file at `at`, without what is null.

        Raises:
            UsageError: with one sentence and line per problem.
        """
        part = located.value["eval"] if at else located.value
        if isinstance(part, dict) and isinstance(part.get("datasets"), dict):
            file: Any = validate(self._mapping, located, at)
            entries = [(key, {"name": key, **_given(entry)}) for key, entry in file.datasets.items()]
        else:
            file = validate(self._list, located, at)
            entries = [(number, _given(entry)) for number, entry in enumerate(file.datasets)]
        datasets, places = [entry for _, entry in entries], [(*at, "datasets", key) for key, _ in entries]
        for number, (place, entry) in enumerate(zip(places, datasets, strict=True)):
            if entry["name"] in [other["name"] for other in datasets[:number]]:
                text = f"the name {entry['name']!r} is there twice; results are reported by it."
                raise UsageError(located.sentence(place, text))
        return datasets, _given(file.defaults) if file.defaults else {}, places


def _given(settings: BaseModel) -> dict[str, Any]:
    """What is set, as plain values."""
    return settings.model_dump(exclude_none=True)


_FORM = FileForm(EvalDatasetConfig, _NARROWER)


def dataset_hooks(args: Args) -> Iterator[tuple[DatasetSettings, str, str]]:
    """(data set, attribute, path) of each hook of a data set, of training and of evaluation."""
    for dataset in (*sources_of(args), *args.eval_datasets):
        for name in ("custom_rm_path", "custom_generate_function_path"):
            if path := vars(dataset)[name]:
                yield dataset, name, path


class EvalConfig(NamedTuple):
    """What an evaluation config says, before flags fill the gaps.

    Attributes:
        datasets: one mapping per data set with `name`, `path` and what else it sets.
        defaults: settings for all of them.
        ignored: place and name of settings that change nothing, unless a hook reads them.
    """

    datasets: list[dict[str, Any]]
    defaults: dict[str, Any]
    ignored: list[str]


def pick_from_args(args: Args, attrs: tuple[str, ...]) -> Any:
    """The value of the first of these flags that is not None; None when all are."""
    return next((value for value in (getattr(args, name) for name in attrs) if value is not None), None)


def values_of_flags(args: Args, sources: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """field -> the first of its flags that is given, where one is."""
    values = {name: pick_from_args(args, attrs) for name, attrs in sources.items()}
    return {name: value for name, value in values.items() if value is not None}


def ensure_dataset_list(config: Any) -> list[dict[str, Any]]:
    """The `datasets` entry as a list of mappings: a list with names, or a mapping from name to settings.

    Raises:
        UsageError: it is neither.
    """
    if isinstance(config, Mapping):
        config = [
            {"name": name, **settings} if isinstance(settings, Mapping) else settings
            for name, settings in config.items()
        ]
    if not isinstance(config, list) or not config or not all(isinstance(entry, Mapping) for entry in config):
        raise UsageError(f"{FLAG}: datasets must be a list of mappings with 'name', or a mapping by name.")
    return [dict(entry) for entry in config]


def build_eval_dataset_configs(
    args: Args, raw_config: Iterable[dict[str, Any]], defaults: Mapping[str, Any] | None = None
) -> list[EvalDatasetConfig]:
    """Resolve every field of every data set.

    Args:
        args: the flags of `_FROM_ARGS`.
        raw_config: one mapping per data set, with at least `name` and `path`.
        defaults: settings for all data sets.

    Raises:
        UsageError: an unknown key (with the nearest known ones), a missing name or path, a value of the wrong type, a
            name used twice.
    """
    if not (datasets := list(raw_config)):
        return []
    given = LocatedYaml("", "evaluation data sets", {"datasets": datasets, "defaults": dict(defaults or {})})
    checked = _checked(given, ())
    from_flags = values_of_flags(args, _FROM_ARGS)
    return [EvalDatasetConfig(**{**from_flags, **checked.defaults, **entry}) for entry in checked.datasets]


def load_eval_config(path: str) -> EvalConfig:
    """Read an --eval-config file (YAML or JSON; `defaults` and `datasets` at the root or under `eval`).

    Raises:
        FileUnusable: it is not there or cannot be read.
        UsageError: with one sentence and line per problem.
    """
    located = load_yaml(path, FLAG, interpolates=True)
    under_eval = isinstance(located.value, dict) and "eval" in located.value
    if under_eval and len(located.value) > 1:
        other = next(key for key in located.value if key != "eval")
        raise UsageError(located.sentence((other,), "stands beside 'eval', where it would be lost; move it there."))
    return _checked(located, ("eval",) if under_eval else ())


def _checked(located: LocatedYaml, at: tuple[str, ...]) -> EvalConfig:
    """The part of a file at `at`, checked and without what is null."""
    datasets, defaults, places = _FORM.read(located, at)
    ignored = [
        f"{located.where((*where, key))}: {key}"
        for where, settings in [((*at, "defaults"), defaults), *zip(places, datasets, strict=True)]
        for key in get_type_hints(HookSettings)
        if settings.get(key) is not None
    ]
    return EvalConfig(datasets, defaults, ignored)
