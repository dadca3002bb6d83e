"""Command lines of upstream's scripts, end-to-end tests and documents, with the files that they point at.

`command_lines.json` is name -> "script arguments" as a shell would read it. Paths in it are the author's, with
`$ROOT` for the directory that they lay in: `place` writes what a path is expected to be (a model's config.json, a row
of data, a YAML file) below a directory of the test, and returns the arguments with those paths. No flag is changed or
dropped.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from tests.unit.script_fakes import hf_config

FILE = Path(__file__).with_name("command_lines.json")
# The beginning of the name of a --hf-checkpoint -> the config of its model; the first that fits.
MODELS = {
    "Qwen3-4B-Instruct-2507": "qwen3-4B-Instruct-2507",
    "Qwen3-0.6B": "qwen3-0.6B",
    "Qwen3-4B": "qwen3-4B",
    "Qwen3-8B": "qwen3-8B",
    "Qwen3-32B": "qwen3-32B",
    "Qwen3-30B-A3B": "qwen3-30B-A3B",
    "Qwen3-235B-A22B": "qwen3-235B-A22B",
    "Qwen3-Next-80B-A3B": "qwen3-next-80B-A3B",
    "Qwen3.5-0.8B": "qwen3.5-0.8B",
    "Qwen3.5-27B": "qwen3.5-27B",
    "Qwen3.5-35B-A3B": "qwen3.5-35B-A3B",
    "Qwen3.6-35B-A3B": "qwen3.5-35B-A3B",
    "Qwen2.5-0.5B": "qwen2.5-0.5B",
    "Qwen2.5-3B": "qwen2.5-3B",
    "GLM-Z1-9B": "glm4-9B",
    "GLM-4.7-Flash": "glm4.7-30B-A3B",
    "GLM-5.2": "glm5.2-744B-A40B",
    "GLM-5": "glm5-744B-A40B",
    "DeepSeek-R1": "deepseek-v3",
    "Kimi-K2-Thinking": "kimi-k2-thinking",
    "Kimi-K2": "kimi-k2",
    "MiMo-7B-RL": "mimo-7B-rl",
    "MiniMax-M2.5": "minimax-m2",
    "Moonlight-16B-A3B": "moonlight",
}
FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
    "activation_scheme": "dynamic",
}
CHAT = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
VALUES = {"messages": CHAT, "label": "2", "answer": "2", "images": ["a.png"], "metadata": {}}
HOOKS = {
    "generate_with_search.py": "async def generate(args, sample, sampling_params):\n    return sample\n"
    "async def reward_func(args, sample, **kwargs):\n    return 1.0\n",
    "generate_with_tau.py": "async def generate(args, sample, sampling_params):\n    return sample\n",
    "custom_generate.py": "async def custom_generate(args, samples, evaluation=False):\n    return samples\n",
    "examples/coding_agent_rl/generate.py": "async def generate(args, sample, sampling_params):\n    return sample\n",
    "examples/multi_agent/rollout_with_multi_agents.py": "async def generate_with_multi_agents(args, sample, "
    "sampling_params, evaluation=False):\n    return [sample]\n",
    "examples/strands_sglang/generate_with_strands.py": "async def generate(args, sample, sampling_params):\n"
    "    return sample\nasync def reward_func(args, sample, **kwargs):\n    return 1.0\n",
}


def command_lines() -> dict[str, tuple[str, list[str]]]:
    """Name -> (script, arguments)."""
    lines = {name: shlex.split(text) for name, text in json.loads(FILE.read_text()).items()}
    return {name: (words[0], words[1:]) for name, words in lines.items()}


def config_of(checkpoint: str) -> dict[str, Any]:
    """The config.json of the model whose directory has this name, quantised as the name says."""
    name = Path(checkpoint).name
    config = hf_config(next(model for prefix, model in MODELS.items() if name.startswith(prefix)))
    if "fp8" in name.lower():
        return config | {"quantization_config": FP8}
    if "int4" in name.lower():
        from slime.weights.formats import EXPERTS_ONLY, Int4Format

        return config | {"quantization_config": Int4Format(ignored=EXPERTS_ONLY).config()}
    return config


def value(arguments: list[str], flag: str, default: str = "") -> str:
    """The last value of a flag, as the parser takes it."""
    return next(
        (after for name, after in reversed(list(zip(arguments, arguments[1:], strict=False))) if name == flag), default
    )


def place(arguments: list[str], directory: Path) -> list[str]:
    """The arguments with every path below `directory`, where the files that must be there are written."""
    placed = [_below(word, directory) for word in arguments]
    for flag, word in zip(placed, placed[1:], strict=False):
        if flag == "--hf-checkpoint":
            _write_model(Path(word))
        elif flag in ("--ref-load", "--opd-teacher-load"):
            _write_megatron(Path(word))
        elif flag == "--prompt-data":
            _write_rows(Path(word), placed)
        elif flag == "--sglang-config":
            _write(Path(word), engines_yaml(placed))
        elif flag == "--megatron-config-path":
            _write(
                Path(word),
                "megatron:\n  - {name: a, role: actor}\n  - {name: c, role: critic, overrides: {lr: 1e-5}}\n",
            )
        elif flag == "--eval-config":
            data = directory / "eval.jsonl"
            _write_rows(data, placed)
            _write(Path(word), f"eval:\n  datasets:\n    - {{name: aime, path: {data}, rm_type: deepscaler}}\n")
        elif flag == "--load-debug-rollout-data":
            for rollout in range(int(value(placed, "--num-rollout", "1"))):
                _write(Path(word.format(rollout_id=rollout)), "")
    for at, flag in enumerate(placed):
        if flag == "--eval-prompt-data":
            name, path = placed[at + 1 : at + 3]
            _write_rows(Path(name if path.startswith("--") else path), placed)
    return placed


def write_hooks(directory: Path) -> None:
    """Write the modules of examples that the lines name; `directory` has to be on the Python path."""
    for name, text in HOOKS.items():
        _write(directory / name, text)


def engines_yaml(arguments: list[str]) -> str:
    """Engines of a --sglang-config: all GPUs of the run, prefill and decoding apart where the line is of that."""
    num_gpus = int(value(arguments, "--rollout-num-gpus") or 0)
    if "--colocate" in arguments or not num_gpus:
        num_gpus = int(value(arguments, "--actor-num-nodes")) * int(value(arguments, "--actor-num-gpus-per-node"))
    each = num_gpus // 2
    return (
        "sglang:\n  - name: actor\n    server_groups:\n"
        f"      - {{worker_type: prefill, num_gpus: {each}}}\n      - {{worker_type: decode, num_gpus: {each}}}\n"
    )


def _below(word: str, directory: Path) -> str:
    if word.startswith("$ROOT"):
        return str(directory / "root") + word.removeprefix("$ROOT")
    is_path = word.startswith(("/", "./")) or word.endswith((".pt", ".py"))
    return f"{directory}/{word.removeprefix('.').removeprefix('/')}" if is_path else word


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _write_model(path: Path) -> None:
    _write(path / "config.json", json.dumps(config_of(str(path))))
    _write(path / "tokenizer.json", "{}")
    _write(path / "model.safetensors", "")


def _write_megatron(path: Path) -> None:
    if (path / "config.json").is_file() or any(
        path.name.startswith(name) and "torch_dist" not in path.name for name in MODELS
    ):
        return _write_model(path)
    _write(path / "latest_checkpointed_iteration.txt", "release")
    (path / "release").mkdir(exist_ok=True)


def _write_rows(path: Path, arguments: list[str]) -> None:
    keys = [
        value(arguments, flag, default)
        for flag, default in (("--input-key", "input"), ("--label-key", ""), ("--metadata-key", "metadata"))
    ]
    row = {key: VALUES.get(key, "1+1=") for key in (*keys, "images") if key}
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row | {"metadata": "{}"}]), path)
    else:
        path.write_text(json.dumps(row) + "\n")
