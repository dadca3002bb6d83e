"""Every tool says what it does and what each of its flags does, and refuses a flag that it does not have."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# The flags of each tool that users of slime know, beside Megatron's.
KNOWN = {
    "convert_hf_to_torch_dist": "hf-checkpoint custom-model-provider-path allgather-cp padded-vocab-size save",
    "convert_torch_dist_to_hf": "input-dir output-dir origin-hf-dir model-name force add-missing-from-origin-hf "
    "chunk-size vocab-size",
    "convert_torch_dist_to_hf_parallel": "input-dir output-dir origin-hf-dir model-name force chunk-size vocab-size "
    "load-max-workers save-max-workers",
    "convert_hf_to_fp8": "model-dir save-dir strategy block-size max-workers scale-fmt",
    "convert_hf_to_int4": "input-dir output-dir data-dir quant-type num-calibration-samples max-sequence-length "
    "dampening-frac trust-remote-code quant-group-size",
    "convert_hf_to_int4_direct": "model-dir save-dir group-size is-symmetric ignore-rules max-workers",
    "convert_k2_thinking_int4_to_bf16": "model-dir output-dir files config-path overwrite",
    "fp8_cast_bf16": "input-fp8-hf-path output-bf16-hf-path",
    "profile_rollout": "router-url action output-dir num-steps activities profile-by-stage with-stack record-shapes",
    "analyze_profile": "profile-dir rank all-ranks top-n",
    "trace_timeline_viewer": "rebuild serve no-serve port",
}
TOOLS = sorted({path.name for path in ROOT.glob("tools/[!_]*.py")} | {f"{name}.py" for name in KNOWN})


def run(tool: str, *argv: str) -> int | str | None:
    """The status with which a tool ends that is given this command line."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(sys, "argv", [tool, *argv])
        patch.setattr(sys, "path", [*sys.path])
        runpy.run_path(str(ROOT / "tools" / tool), run_name="__main__")
    return ended.value.code


@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_explains_itself_and_each_of_its_flags(tool, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert run(tool, "--help") == 0
    said = capsys.readouterr().out
    options = re.split(r"\n  (?=-)", said.partition("options:")[2])
    flags = {flag for option in options for flag in re.findall(r"(?<=--)[\w-]+", option.partition("  ")[0])}
    assert set(KNOWN.get(tool.removesuffix(".py"), "").split()) <= flags
    unexplained = [option for option in options if option.strip() and not re.search(r"\S(  +|\n +)\S", option)]
    assert unexplained == []
    assert run(tool, "--no-such-flag") == 2
