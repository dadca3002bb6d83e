"""Write docs/reference/models.md: what is known of each model family, read from its weight rules and from the tests.

    python tools/make_model_reference.py

A mark in the table is a test that is there, found by what the tests are parametrised with; whether they pass they say
themselves. It needs the packages of the tests (scripts/setup_env.sh --dev) and runs none of them.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run as a script from a clone that is not installed

DEFAULT_OUTPUT = ROOT / "docs" / "reference" / "models.md"
PARITY, EXPORT = "tests.unit.test_model_parity", "tests.unit.test_hf_weights"
LAYOUTS, FAMILY_LAYOUTS = "tests.training.parallel.test_layouts", "tests.training.parallel.test_family_layouts"
ON_CPU = "tests.integration.test_families_e2e"
SERVED_IN_OTHERS = {"qwen3", "qwen3_moe"}
"""By tests/integration/test_train_e2e.py and test_moe_e2e.py."""
AXES = {
    "tensor-model-parallel-size": "TP",
    "pipeline-model-parallel-size": "PP",
    "context-parallel-size": "CP",
    "expert-model-parallel-size": "EP",
    "expert-tensor-parallel-size": "ETP",
}
INTRODUCTION = """# Model families: what is tested

Made by `python tools/make_model_reference.py` from the weight rules and the tests; do not edit. What is special about
each family: [Model families](../model_families.md).

- *logits*, *gradients*: those of transformers' model, in fp32, on packed sequences.
- *weights both ways*: what is exported, synced and converted is byte for byte what was loaded.
- *cut over*: axes over which the tests of logits and weights cut the latter, most of them together.
- *trained over*: axes over which two train steps are those of one process (DP: data-parallel ranks). Dense families
  share the code of `qwen3`, whose layouts are tested.
- *experts*, *predicts*: rules for experts, and for layers that predict further tokens.
- *engines in fp8*: the projections that a sync and `tools/convert_hf_to_fp8.py` quantise.
- *engine without a GPU*: a run with a weight sync on SGLang's CPU engine, or why there is none.
"""
HEAD = (
    *("`model_type`", "logits", "gradients", "weights both ways", "cut over", "trained over", "experts", "predicts"),
    *("engines in fp8", "engine without a GPU"),
)


def cases(test: Callable[..., Any]) -> Iterator[dict[str, Any]]:
    """The arguments of each case of a parametrised test (one mark)."""
    for mark in getattr(test, "pytestmark", ()):
        if mark.name != "parametrize":
            continue
        names = mark.args[0]
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
        for case in mark.args[1]:
            values = getattr(case, "values", case if len(names) > 1 else (case,))
            yield dict(zip(names, values, strict=True))


def axes_of(flags: str, dp: int = 1) -> set[str]:
    """The axes with more than one rank."""
    found = {axis for flag, axis in AXES.items() if re.search(rf"--{flag} (?!1\b)\d", flags)}
    return found | ({"DP"} if dp > 1 else set())


def axes_of_weights() -> Mapping[str, set[str]]:
    """model_type -> axes over which its weights are cut in the tests of logits and of weights."""
    found: dict[str, set[str]] = defaultdict(set)
    parity, export = import_module(PARITY), import_module(EXPORT)
    for test in (parity.test_logits_equal_those_of_the_hf_model, export.test_an_exported_model_is_the_loaded_one):
        for case in cases(test):
            found[case["family"]] |= axes_of(case["flags"])
    return found


def axes_of_training() -> Mapping[str, set[str]]:
    """model_type -> axes over which a test trains it."""
    found: dict[str, set[str]] = defaultdict(set)
    families = import_module(FAMILY_LAYOUTS)
    for case in cases(families.test_two_train_steps_are_those_of_one_process):
        layout = families.LAYOUTS[case["layout"]]
        found[families.MODELS[case["model"]][0]] |= axes_of(layout.flags, layout.dp)
    for layout in import_module(LAYOUTS).LAYOUTS.values():
        found["qwen3"] |= axes_of(layout.flags, layout.dp)  # what make_hf_model makes unless told otherwise
    return found


def quantized(hf_names: list[str]) -> str:
    """What of these matrices of a layer engines run in fp8."""
    from slime.weights.formats import Fp8Format

    fmt = Fp8Format()
    projections = [name for name in hf_names if re.search(r"(_proj(_with_mqa)?|\.w[123])\.weight$", name)]
    left = sorted({name.split(".", 3)[3].removesuffix(".weight") for name in projections if not fmt.quantizes(name)})
    left = [name for name in left if not name.endswith(("eh_proj", "input_proj"))]  # of prediction layers
    return "yes" if not left else f"all but {', '.join(f'`{name}`' for name in left)}"


def render() -> str:
    """The whole page, as Markdown."""
    from slime.models.families import FAMILIES

    parity, export = import_module(PARITY), import_module(EXPORT)
    tests = {
        "logits": parity.test_logits_equal_those_of_the_hf_model,
        "gradients": parity.test_gradients_equal_those_of_the_hf_model,
        "weights": export.test_an_exported_model_is_the_loaded_one,
    }
    tested = {what: {case["family"] for case in cases(test)} for what, test in tests.items()}
    served = {
        case["family"]
        for case in cases(import_module(ON_CPU).test_engine_and_trainer_agree_before_and_after_a_weight_sync)
    } | SERVED_IN_OTHERS
    layouts, order = (axes_of_weights(), axes_of_training()), ["DP", *AXES.values()]
    lines = [INTRODUCTION, row(HEAD), row(["---"] * len(HEAD))]
    for name, family in FAMILIES.items():
        hf_names = [re.sub(r"\{[iek]\}", "0", hf) for rule in family.rules for hf in rule.hf if ".layers." in hf]
        marks = ["yes" if name in tested[what] else "" for what in tests]
        axes = [", ".join(axis for axis in order if axis in one.get(name, ())) for one in layouts]
        in_fp8 = quantized(hf_names) if family.has_fp8 else "no: refused"
        on_cpu = "yes" if name in served else f"no: {family.needs_gpu}" if family.needs_gpu else ""
        more = ["yes" if family.has_experts else "", "yes" if family.predicts else "", in_fp8, on_cpu]
        lines.append(row([f"`{name}`", *marks, *axes, *more]))
    return "\n".join(lines) + "\n"


def row(cells: Any) -> str:
    """One line of a table."""
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Command line of this tool."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, help="file to write")
    output = parser.parse_args().output
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(render())
    print(f"wrote {output}")


if __name__ == "__main__":
    main()
