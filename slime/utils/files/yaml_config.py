"""Reads the YAML (or JSON) files behind flags and checks them against a pydantic model; every problem names its line.

It differs from `yaml.safe_load` in that the values of a file are those its writer sees: `1e-6` is a number, `007`,
`12:30` and `2024-01-01` are texts, and a key that is written twice is an error.
"""

from __future__ import annotations

import os
import re
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar, Union, get_args, get_origin

import yaml

from slime.utils.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from pydantic import BaseModel

M = TypeVar("M", bound="BaseModel")
KeyPath = tuple[str | int, ...]

MAX_VALUES = 100_000  # more than any file of settings has; a few lines of aliases can make billions
MAX_DEPTH = 50


class FileUnusable(UsageError):
    """The file is not there or cannot be read, which says nothing about the command line itself."""


@dataclass
class LocatedYaml:
    """A file's content, and where each part of it is written.

    Attributes:
        file: its path; empty for values that come from no file.
        flag: the option that names the file, as in "--eval-config".
        value: dicts, lists, texts, numbers, bools and None.
        lines: path of a part, as in ("datasets", 1, "top_p") -> its line, counted from 1.
    """

    file: str
    flag: str
    value: Any
    lines: dict[KeyPath, int] = field(default_factory=dict)

    def line(self, path: Sequence[str | int]) -> int:
        """The line of a part, or of the innermost part around it that is written somewhere; 0 without a file."""
        parts = (tuple(path[:end]) for end in range(len(path), -1, -1))
        return next((self.lines[part] for part in parts if part in self.lines), 0)

    def where(self, path: Sequence[str | int] = ()) -> str:
        """Flag, file and line of a part."""
        place = f"{self.flag} {self.file}".strip()
        return f"{place}:{self.line(path)}" if self.line(path) else place

    def sentence(self, path: Sequence[str | int], text: str) -> str:
        """What is wrong with a part, in front of it the place and the part's name."""
        return ": ".join(filter(None, (self.where(path), dotted(path), text)))


def dotted(path: Sequence[str | int]) -> str:
    """`("datasets", 1, "top_p")` as `datasets[1].top_p`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")


def load_yaml(path: str, flag: str, *, interpolates: bool = False) -> LocatedYaml:
    """Read a YAML or JSON file without ever running what it says.

    Args:
        path: the file.
        flag: the option that names it.
        interpolates: fill in OmegaConf's `${oc.env:NAME}` and `${oc.env:NAME,default}`; any other `${...}` is an
            error. Otherwise they are texts like any other.

    Raises:
        FileUnusable: it is not there or cannot be read.
        UsageError: it is no YAML, has a key twice, a tag or far too many values.
    """
    text = _read_text(path, flag)
    if path.endswith(".json"):
        text = text.replace("\t", " ")  # legal in JSON, and there only between values; not in YAML
    reader = _Reader(LocatedYaml(path, flag, None), interpolates)
    try:
        return reader.located_of(text)
    except UsageError:
        raise
    except yaml.YAMLError as error:
        raise UsageError(f"{flag} {path}{_position(error, text)} is no valid YAML: {_reason(error)}.") from error
    except RecursionError as error:
        raise UsageError(f"{flag} {path} is nested too deeply.") from error
    except (ValueError, OverflowError) as error:  # PyYAML's answer to "\Uffffffff"
        raise UsageError(f"{flag} {path} is no valid YAML: {error}.") from error


def _read_text(path: str, flag: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{flag} {path} is no text file: byte {error.start} is not UTF-8.") from error
    except FileNotFoundError as error:
        raise FileUnusable(f"{flag} {path}: there is no such file.") from error
    except (OSError, ValueError) as error:  # a null byte in the path
        reason = getattr(error, "strerror", None) or error
        raise FileUnusable(f"{flag} {path!r} cannot be read: {reason}.") from error


def _position(error: yaml.YAMLError, text: str) -> str:
    """`:line:column` of a syntax error, where PyYAML tells."""
    if isinstance(error, yaml.MarkedYAMLError) and (mark := error.problem_mark or error.context_mark):
        return f":{mark.line + 1}:{mark.column + 1}"
    if isinstance(error, yaml.reader.ReaderError):
        before = text[: error.position]
        return f":{before.count(chr(10)) + 1}:{len(before) - before.rfind(chr(10))}"
    return ""


def _reason(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.reader.ReaderError):
        return f"the character {chr(error.character)!r} is not allowed"
    problem = getattr(error, "problem", None) or str(error)
    if "'\\t' that cannot start any token" in problem:
        return "found a tab; indent with spaces"
    return str(problem).rstrip(".")


class _Loader(yaml.SafeLoader):
    """SafeLoader whose plain scalars are what they look like (PyYAML follows YAML 1.1)."""

    yaml_implicit_resolvers: dict[Any, Any] = {}


_DIGITS = list("-+.0123456789")
for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"yes|Yes|YES|no|No|NO|true|True|TRUE|false|False|FALSE|on|On|ON|off|Off|OFF", list("yYnNtTfFoO")),
    ("int", r"[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F_]+|0b[01_]+)", _DIGITS),
    ("float", r"[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+", _DIGITS),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list("-+.")),
    ("merge", r"<<", ["<"]),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)

_SCALARS = {
    "tag:yaml.org,2002:null": yaml.SafeLoader.construct_yaml_null,
    "tag:yaml.org,2002:bool": yaml.SafeLoader.construct_yaml_bool,
    "tag:yaml.org,2002:int": yaml.SafeLoader.construct_yaml_int,
    "tag:yaml.org,2002:float": yaml.SafeLoader.construct_yaml_float,
    "tag:yaml.org,2002:str": yaml.SafeLoader.construct_scalar,
}
_MERGE, _STR = "tag:yaml.org,2002:merge", "tag:yaml.org,2002:str"
_INTERPOLATION = re.compile(r"\$\{([^{}]*)\}")


class _Reader:
    """Makes values of PyYAML's nodes and notes their lines."""

    def __init__(self, located: LocatedYaml, interpolates: bool) -> None:
        self._located, self._interpolates = located, interpolates
        self._loader = _Loader("")
        self._num_values = 0

    def located_of(self, text: str) -> LocatedYaml:
        """Read a whole file."""
        root = yaml.compose(text, Loader=_Loader)
        self._located.value = None if root is None else self._read(root, ())
        return self._located

    def _read(self, node: yaml.Node, path: KeyPath) -> Any:
        """The value of a node; `path` leads to it."""
        self._located.lines.setdefault(path, node.start_mark.line + 1)
        self._num_values += 1
        if len(path) > MAX_DEPTH or self._num_values > MAX_VALUES:
            self._fail(node, path, "too many values, or an alias that contains itself; write it out.")
        if isinstance(node, yaml.MappingNode) and node.tag == "tag:yaml.org,2002:map":
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode) and node.tag == "tag:yaml.org,2002:seq":
            return [self._read(item, (*path, number)) for number, item in enumerate(node.value)]
        if isinstance(node, yaml.ScalarNode) and node.tag in _SCALARS:
            return self._scalar(node, path)
        tag = node.tag.replace("tag:yaml.org,2002:", "!!")
        return self._fail(node, path, f"the tag {tag} is not allowed; write a plain value.")

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        values: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE:
                merged = self._merged(value_node, path) | merged
                continue
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag not in _SCALARS:
                self._fail(key_node, path, "a key must be a text.")
            key = self._text(key_node, path)  # just as it is written: `2024` and `on` are names here
            here = (*path, key)
            if key in values:
                first = self._located.lines[here]
                self._fail(key_node, path, f"the key {key!r} is there twice, first in line {first}; keep one.")
            self._located.lines[here] = key_node.start_mark.line + 1
            values[key] = self._read(value_node, here)
        return merged | values

    def _merged(self, node: yaml.Node, path: KeyPath) -> dict[str, Any]:
        """What `<<: *alias` brings in; the mapping's own keys go first."""
        value = self._read(node, path)
        parts = value if isinstance(value, list) else [value]
        if not all(isinstance(part, dict) for part in parts):
            self._fail(node, path, "<< takes the alias of a mapping.")
        return {key: part[key] for part in reversed(parts) for key in part}

    def _scalar(self, node: yaml.ScalarNode, path: KeyPath) -> Any:
        text, tag = self._text(node, path), node.tag
        if tag == _STR and node.style is None and text != node.value:
            # What a variable holds stands there as if it were written: a number is a number, unless it is in quotes.
            tag = self._loader.resolve(yaml.ScalarNode, text, (True, False))
        try:
            return _SCALARS.get(tag, _SCALARS[_STR])(self._loader, yaml.ScalarNode(tag, text))
        except (ValueError, KeyError, IndexError, yaml.YAMLError):  # an explicit tag, as in `!!int x`, or 5000 digits
            return self._fail(node, path, f"{_short(node.value)} is no {tag.rpartition(':')[2]}.")

    def _text(self, node: yaml.ScalarNode, path: KeyPath) -> str:
        try:  # JSON writes large code points as pairs
            text: str = node.value.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            self._fail(node, path, "half a surrogate pair is no character.")
        if not self._interpolates:
            return text
        return _INTERPOLATION.sub(lambda match: self._interpolated(match[1], node, path), text)

    def _interpolated(self, inside: str, node: yaml.Node, path: KeyPath) -> str:
        """The text for OmegaConf's `${oc.env:NAME}` or `${oc.env:NAME,default}`."""
        resolver, _, rest = inside.partition(":")
        name, comma, default = (part.strip() for part in rest.partition(","))
        if resolver.strip() != "oc.env" or not name:
            self._fail(node, path, f"${{{inside}}} is not supported, only ${{oc.env:NAME}}; write the value.")
        if name not in os.environ and not comma:
            self._fail(node, path, f"${{{inside}}}: the environment variable {name} is not set.")
        return os.environ.get(name, default.strip("'\""))

    def _fail(self, node: yaml.Node, path: KeyPath, text: str) -> NoReturn:
        located = self._located
        at = LocatedYaml(located.file, located.flag, None, {(): node.start_mark.line + 1})
        raise UsageError(at.sentence(path, text))


def validate(model: type[M], located: LocatedYaml, at: KeyPath = ()) -> M:
    """The part of a file at a path, as an instance of a pydantic model.

    Args:
        model: a model that forbids unknown keys.
        located: the file.
        at: path of the part; the whole file by default.

    Raises:
        UsageError: with one sentence per problem, in the order of the file.
    """
    from pydantic import ValidationError

    value = located.value
    for part in at:
        value = value[part]
    if not isinstance(value, Mapping):
        wanted = ", ".join(known_keys(model, ()))
        raise UsageError(located.sentence(at, f"{_short(value)} is no mapping; it needs keys of {wanted}."))
    try:
        return model.model_validate(value)
    except ValidationError as error:
        details = error.errors(include_url=False)
        paths = [(*at, *_without_brackets(detail["loc"])) for detail in details]
        sentences = [
            (located.line(path), located.sentence(path, _explain(model, detail)))
            for path, detail in zip(paths, details, strict=True)
        ]
        ordered = [sentence for _, sentence in sorted(sentences, key=lambda pair: pair[0])]
        raise UsageError(list(dict.fromkeys(ordered))) from error


def known_keys(model: type[BaseModel], path: Sequence[str | int]) -> list[str]:
    """The keys that a mapping at `path` inside a model's data may have; none where any may be there."""
    hint: Any = model
    for part in path:
        fields = _fields(hint)
        hint = fields.get(str(part)) if fields else [None, *get_args(_bare(hint))][-1]
    return list(_fields(hint))


def _fields(hint: Any) -> dict[str, Any]:
    """Name in a file -> type, of a model's fields; empty for another type."""
    fields = getattr(_bare(hint), "model_fields", {})
    return {alias: info.annotation for name, info in fields.items() for alias in _names_of(name, info)}


def _bare(hint: Any) -> Any:
    """X of `X | None` and of `Annotated[X, ...]`."""
    if get_origin(hint) in (Union, types.UnionType, Annotated):
        return _bare(next(part for part in get_args(hint) if part is not type(None)))
    return hint


def _names_of(name: str, info: Any) -> list[str]:
    """A field's names in a file."""
    alias = info.validation_alias
    return [name] if alias is None else [str(choice) for choice in getattr(alias, "choices", [alias])]


def _without_brackets(loc: Sequence[str | int]) -> KeyPath:
    """pydantic's path without its own notes, such as the "[key]" behind a mapping's key."""
    return tuple(part for part in loc if part != "[key]")


_WANTED = {
    "int": "a whole number",
    "float": "a number",
    "finite_number": "a finite number",
    "bool": "true or false",
    "string": "a text",
    "list": "a list",
    "dict": "a mapping",
    "model": "a mapping",
    "mapping": "a mapping",
}
_BOUNDS = {"greater_than": (">", "gt"), "greater_than_equal": (">=", "ge")}
_BOUNDS |= {"less_than": ("<", "lt"), "less_than_equal": ("<=", "le")}


def _explain(model: type[BaseModel], detail: Mapping[str, Any]) -> str:
    """One of pydantic's errors in our words; its path is said by the caller."""
    kind, given, context = detail["type"], _short(detail["input"]), detail.get("ctx", {})
    path = _without_brackets(detail["loc"])
    if kind == "extra_forbidden":
        known = known_keys(model, path[:-1])
        if path[-1] in known:
            return "there is another name of the same key beside it; keep one."
        return "unknown key; " + did_you_mean(str(path[-1]), known)
    said = {
        "missing": "is missing.",
        "too_short": "is empty.",
        "value_error": f"{context.get('error')}.",
        "literal_error": f"{given} is none of {str(context.get('expected')).replace(' or ', ', ')}.",
        **{bound: f"{given} must be {sign} {context.get(key, 0):g}." for bound, (sign, key) in _BOUNDS.items()},
    }
    wanted = _WANTED.get(kind) or _WANTED.get(kind.split("_")[0])
    quote = "; put it in quotes" if kind == "string_type" and isinstance(detail["input"], int | float) else ""
    other = (
        f"{given} is not {wanted}{quote}." if wanted else f"{given}: {detail['msg'][:1].lower()}{detail['msg'][1:]}."
    )
    return said.get(kind, other)


def _short(value: Any) -> str:
    """A value for a sentence: as YAML writes it, and not longer than half a line."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
