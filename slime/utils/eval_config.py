"""Which data sets an evaluation uses and how each is sampled and graded.

Every field is resolved as data set > `defaults` of the file > flags. It reads no data and knows nothing of rollouts.
"""

from __future__ import annotations

import difflib
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from slime.utils.errors import UsageError

# field -> flags that supply it, the first one that is not None wins
_FROM_ARGS: dict[str, tuple[str, ...]] = {
    "input_key": ("eval_input_key", "input_key"),
    "label_key": ("eval_label_key", "label_key"),
    "tool_key": ("eval_tool_key", "tool_key"),
    "metadata_key": ("metadata_key",),
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


@dataclass
class EvalDatasetConfig:
    """One evaluation data set; None means that nothing supplied a value."""

    name: str
    path: str
    rm_type: str | None = None
    custom_rm_path: str | None = None
    input_key: str = "input"
    label_key: str | None = None
    tool_key: str | None = None
    metadata_key: str = "metadata"
    apply_chat_template: bool = False
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    n_samples_per_eval_prompt: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_response_len: int | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_new_tokens: int | None = None
    repetition_penalty: float | None = None
    skip_special_tokens: bool = False
    no_stop_trim: bool = True
    custom_generate_function_path: str | None = None
    metadata_overrides: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.name or not self.path:
            raise UsageError(f"an evaluation data set needs a name and a path, not {self.name!r} and {self.path!r}")
        if self.n_samples_per_eval_prompt < 1:
            raise UsageError(
                f"evaluation data set {self.name}: n_samples_per_eval_prompt is {self.n_samples_per_eval_prompt}; "
                "it must be at least 1"
            )

    @property
    def cache_key(self) -> tuple[Any, ...]:
        """Two configs with equal keys read the same prompts."""
        template = tuple(sorted((key, repr(value)) for key, value in self.apply_chat_template_kwargs.items()))
        keys = (self.input_key, self.label_key, self.tool_key, self.metadata_key)
        return (self.name, self.path, *keys, self.apply_chat_template, template)

    def inject_metadata(self, metadata: dict[str, Any]) -> dict[str, Any]:
        """A row's metadata with `rm_type` and `metadata_overrides` merged in."""
        rm_type = {"rm_type": self.rm_type} if self.rm_type else {}
        return {**metadata, **rm_type, **self.metadata_overrides}


def pick_from_args(args: Namespace, names: tuple[str, ...]) -> Any:
    """The value of the first of these flags that is not None; None when all are."""
    return next((value for value in (getattr(args, name) for name in names) if value is not None), None)


def ensure_dataset_list(config: Any) -> list[dict[str, Any]]:
    """The `datasets` entry as a list of mappings: a list with names, or a mapping from name to settings."""
    if isinstance(config, Mapping):
        config = [{"name": name, **(settings or {})} for name, settings in config.items()]
    if not isinstance(config, list) or not config or not all(isinstance(entry, Mapping) for entry in config):
        raise UsageError("--eval-config: 'datasets' must be a list of mappings with 'name', or a mapping by name")
    return [dict(entry) for entry in config]


def build_eval_dataset_configs(
    args: Namespace, raw: list[dict[str, Any]], defaults: Mapping[str, Any] | None = None
) -> list[EvalDatasetConfig]:
    """Resolve every field of every data set.

    Args:
        args: the flags of `_FROM_ARGS`.
        raw: one mapping per data set, with at least `name` and `path`.
        defaults: settings for all data sets of the file.

    Raises:
        UsageError: an unknown key (with the nearest known ones), a missing name or path, a name used twice.
    """
    defaults = dict(defaults or {})
    known = [f.name for f in fields(EvalDatasetConfig)]
    _check_keys(defaults, [name for name in known if name not in ("name", "path")], where="defaults")
    configs = []
    for entry in raw:
        _check_keys(entry, known, where=f"data set {entry.get('name', '?')}")
        if "name" not in entry or "path" not in entry:
            raise UsageError(f"--eval-config: data set {dict(entry)!r} needs both 'name' and 'path'")
        flags = {name: pick_from_args(args, sources) for name, sources in _FROM_ARGS.items()}
        given = {name: value for name, value in flags.items() if value is not None}
        configs.append(EvalDatasetConfig(**{**given, **defaults, **entry}))
    names = [config.name for config in configs]
    if len(set(names)) < len(names):
        raise UsageError(f"evaluation data sets must have different names, not {', '.join(names)}")
    return configs


def _check_keys(given: Mapping[str, Any], known: list[str], *, where: str) -> None:
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(known)}"
            raise UsageError(f"--eval-config, {where}: unknown key {key!r}; {hint}")


def load_eval_config(path: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Read an --eval-config file (YAML or JSON).

    Returns:
        (data sets as mappings, defaults), both as written.

    Raises:
        UsageError: the file is missing, malformed or has keys other than `defaults` and `datasets` (under `eval:` or
            at the root).
    """
    import yaml

    if not Path(path).is_file():
        raise UsageError(f"--eval-config {path}: there is no such file")
    try:
        config = yaml.safe_load(Path(path).read_text())
    except yaml.YAMLError as error:
        raise UsageError(f"--eval-config {path} is not valid YAML: {error}") from error
    if isinstance(config, Mapping) and "eval" in config:
        config = config["eval"]
    if not isinstance(config, Mapping) or "datasets" not in config:
        raise UsageError(f"--eval-config {path} needs a 'datasets' entry at the root or under 'eval'")
    _check_keys(config, ["defaults", "datasets"], where=str(path))
    return ensure_dataset_list(config["datasets"]), dict(config.get("defaults") or {})
