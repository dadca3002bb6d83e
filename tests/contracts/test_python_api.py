"""The names that user code imports: each is there, takes the arguments of the interface, and has its attributes.

python_api.tsv is the interface of rollout, utilities and observability: dotted name, signature (empty where the
interface gives none) and attributes. A function may have more parameters than the interface, as long as a call by the
interface works: they come after the others and have defaults.
The interface shortens the names of required parameters, which are passed by position; these are compared by number,
parameters with a default and those behind a star by name, place and default.
"""

from __future__ import annotations

import csv
import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest

from slime.utils.types import Sample

with (Path(__file__).parent / "python_api.tsv").open() as file:
    ROWS = {row["name"]: row for row in csv.DictReader(file, delimiter="\t")}
OPEN = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
# Modules of which the interface names nothing; they give what they are for from these of ours.
ELSEWHERE = {
    "slime.observability.profile_utils": "slime.observability.profiler",
    "slime.observability.rollout_data_utils": "slime.checkpoints.rollout_files",
    "slime.observability.train_data_utils": "slime.training.reports",
    "slime.observability.train_metric_utils": "slime.training.reports",
    "slime_plugins.models.flash_dot_product_attention": "slime.backends.megatron_utils.layers.varlen_attention",
}
SAMPLE = {
    **dict.fromkeys(("group_index", "index", "rollout_id", "multimodal_inputs", "multimodal_train_inputs"), None),
    **dict.fromkeys(("multimodal_train_input_id", "label", "reward", "loss_mask", "rollout_log_probs"), None),
    **dict.fromkeys(("rollout_top_p_token_ids", "rollout_top_p_token_offsets", "rollout_routed_experts"), None),
    **dict.fromkeys(("teacher_log_probs", "generate_function_path", "custom_rm_path", "train_metadata"), None),
    "session_id": None,
    **dict.fromkeys(("token_rewards", "turn_rewards"), None),
    "end_reason": None,
    "image_spans": None,
    "reward_is_trusted": True,
    "prompt": "",
    "response": "",
    "tokens": [],
    "weight_versions": [],
    "apply_chat_template_kwargs": {},
    "metadata": {},
    "response_length": 0,
    "non_generation_time": 0.0,
    "remove_sample": False,
    "status": Sample.Status.PENDING,
    "spec_info": Sample.SpecInfo(),
    "prefix_cache_info": Sample.PrefixCacheInfo(),
}


def find(name: str) -> Any:
    """What a dotted name stands for: a module, or an attribute of one at any depth."""
    parts = name.split(".")
    for split in range(len(parts), 0, -1):
        module = ".".join(parts[:split])
        try:
            found: Any = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name and module.startswith(error.name):
                continue
            raise
        for part in parts[split:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(name)


def difference(wanted: str, fn: Any) -> str | None:
    """Why a call by the wanted signature would not work, or mean something else; None when it does."""
    if wanted.startswith("async ") and not inspect.iscoroutinefunction(fn):
        return "it is not async"
    scope: dict[str, Any] = {}
    exec(compile(f"def wanted{wanted.removeprefix('async ')}: pass", "signature", "exec"), scope)
    due, own = parameters_of(scope["wanted"]), parameters_of(fn)
    places = [p for p in own if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    used = []
    for place, parameter in enumerate(due):
        if parameter.kind in OPEN:
            if parameter.kind not in [p.kind for p in own]:
                return f"{parameter} is missing"
            continue
        if parameter.kind is parameter.KEYWORD_ONLY:
            found = next((p for p in own if p.name == parameter.name), None)
        else:
            found = places[place] if place < len(places) else None
        is_optional = parameter.default is not parameter.empty
        if found is None or (is_optional and found.name != parameter.name):
            return f"it has no {parameter.name} there"
        if is_optional and found.default != parameter.default:
            return f"{parameter.name} has the default {found.default!r}"
        used.append(found.name)
    for parameter in own:
        if parameter.kind not in OPEN and parameter.default is parameter.empty and parameter.name not in used:
            return f"{parameter.name} is required, which the interface does not have"
    return None


def parameters_of(fn: Any) -> list[inspect.Parameter]:
    """A function's parameters; a class's are those of its constructor (a metaclass hides them)."""
    if inspect.isclass(fn):
        return list(inspect.signature(fn.__init__).parameters.values())[1:]
    return list(inspect.signature(fn).parameters.values())


@pytest.mark.parametrize("name", ROWS)
def test_a_public_name_is_there_with_its_signature_and_attributes(name: str) -> None:
    row, found = ROWS[name], find(name)
    if row["signature"]:
        problem = difference(row["signature"], found)
        assert problem is None, f"{name}{row['signature']}, but {inspect.signature(found)}: {problem}"
    for attribute in row["attributes"].split():
        assert hasattr(found, attribute), f"{name} has no {attribute}"


def test_a_new_sample_has_the_fields_of_the_interface_with_their_defaults() -> None:
    assert vars(Sample()) == SAMPLE


@pytest.mark.parametrize("path", ELSEWHERE)
def test_a_module_of_which_the_interface_names_nothing_gives_ours(path: str) -> None:
    theirs, ours = importlib.import_module(path), importlib.import_module(ELSEWHERE[path])
    assert theirs.__all__ and all(getattr(theirs, name) is getattr(ours, name) for name in theirs.__all__)


def f(a: int, b: int = 1, *, c: int = 2, **rest: int) -> None: ...


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        ("(a, b=1)", None),
        ("(a, b=1, *, c=2, **kw)", None),
        ("(a)", None),
        ("(a, b=2)", "b has the default 1"),
        ("(first, b=1)", None),
        ("(b=1)", "it has no b there"),
        ("(a, *args)", "*args is missing"),
        ("(a, d=1)", "it has no d there"),
        ("(a, b=1, *, d=1)", "it has no d there"),
        ("(a, b=1, c=2)", "it has no c there"),
        ("()", "a is required, which the interface does not have"),
        ("async (a)", "it is not async"),
    ],
)
def test_a_signature_is_compared_by_what_a_caller_may_write(wanted: str, problem: str | None) -> None:
    assert difference(wanted, f) == problem
