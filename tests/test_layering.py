"""One way: ray, agent, megatron_utils | rollout, training, sglang_utils, observability, config, and the pure packages.

Those are models | plan | conversion over weights | algorithms | checkpoints over plugins over utils over processes.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYERS = {
    "slime.processes": 0,
    "slime.utils": 1,
    "slime.plugins": 2,
    "slime.algorithms": 3,
    "slime.checkpoints": 3,
    "slime.weights": 3,
    "slime.models": 4,
    "slime.plan": 4,
    "slime.conversion": 4,
    "slime.config": 5,
    "slime.observability": 6,
    "slime.dashboard": 7,
    "slime.backends.sglang_utils": 7,
    "slime.training": 8,
    "slime.backends.megatron_utils": 9,
    "slime.rollout": 9,
    "slime.backends.fsdp_utils": 10,
    "slime.agent": 10,
    "slime.ray": 11,
}
# The composition root of the command line may reach the hook Protocols and names; nothing else may.
COMPOSITION_ROOT = "slime.config.parse"
COMPOSITION_ROOT_MAY_IMPORT = (
    "slime.rollout.base_types",
    "slime.rollout.hooks.signatures",
    "slime.rollout.rm_hub",
    "slime.rollout.tool_calls",
)
# What the command line needs of a backend, inside functions: engines that run already, stand-ins.
CONFIG_MAY_IMPORT = {
    "slime.config.sglang": ("slime.backends.sglang_utils.external", "slime.backends.sglang_utils.cpu_standins"),
}
# The public path of something that moved: names and thin adapters.
PUBLIC_PATHS = {
    "slime.observability.train_data_utils": "slime.training",
    "slime.observability.train_metric_utils": "slime.training",
    "slime.utils.arguments": "slime.config",
    "slime.utils.ppo_utils": "slime.algorithms",
}
ARGS = ROOT / "slime" / "config" / "args.py"
TRANSFER_GATE = "slime.backends.sglang_utils.weight_transfer"
OWNERS = {
    "ray": ("slime.ray", "slime.utils.train_data", "slime.backends.megatron_utils.update_weight"),
    "megatron": ("slime.backends.megatron_utils", "slime.config.megatron"),
    "sglang": ("slime.backends.sglang_utils", "slime.config.sglang", "slime.agent.parsing"),
    "sglang_router": ("slime.backends.sglang_utils", "slime.config.sglang", "slime.utils.http_utils"),
}


def modules() -> dict[str, Path]:
    found = {}
    for path in (ROOT / "slime").rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path) -> set[str]:
    """What a module imports; the type of `args` may be named anywhere, and names what it is made of."""
    names: set[str] = set()
    tree = ast.parse(path.read_text())
    for_types = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
        if path == ARGS or (isinstance(node, ast.ImportFrom) and node.module == "slime.config.args")
    }
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def layer_of(module: str) -> str | None:
    return next((layer for layer in LAYERS if module == layer or module.startswith(layer + ".")), None)


def in_package(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def allowed_upwards(module: str) -> tuple[str, ...]:
    allowed = (*COMPOSITION_ROOT_MAY_IMPORT,) if module == COMPOSITION_ROOT else ()
    if module in PUBLIC_PATHS:
        allowed += (PUBLIC_PATHS[module],)
    for package, names in CONFIG_MAY_IMPORT.items():
        allowed += names if in_package(module, (package,)) else ()
    return allowed


def violations(module: str, imported: set[str]) -> list[str]:
    here, faults = layer_of(module), []
    for name in sorted(imported):
        there = layer_of(name)
        is_upwards = there and here and there != here and LAYERS[there] >= LAYERS[here]
        if is_upwards and not in_package(name, allowed_upwards(module)):
            faults.append(f"{module} (layer {LAYERS[here]}) imports {name} (layer {LAYERS[there]})")
        if here == "slime.backends.megatron_utils" and there == "slime.backends.sglang_utils":
            parent = TRANSFER_GATE.rpartition(".")[0]
            if name != parent and not in_package(name, (TRANSFER_GATE,)):
                faults.append(f"{module} imports {name}; it may import only {TRANSFER_GATE}")
        owners = OWNERS.get(name.split(".")[0])
        if owners and not in_package(module, owners):
            faults.append(f"{module} imports {name}, which only {' and '.join(owners)} may")
    return faults


def test_every_module_imports_only_layers_below_it():
    faults = [fault for name, path in modules().items() for fault in violations(name, imports(path))]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("module", "imported"),
    [
        ("slime.utils.misc", "slime.rollout.base_types"),
        ("slime.rollout.eval", "slime.backends.megatron_utils.actor"),
        ("slime.rollout.eval", "slime.agent.trajectory"),
        ("slime.rollout.eval", "ray"),
        ("slime.ray.run", "sglang"),
        ("slime.training.micro_batches", "megatron"),
        ("slime.training.micro_batches", "slime.backends.megatron_utils.actor"),
        ("slime.backends.megatron_utils.actor", "slime.backends.sglang_utils.server_control"),
    ],
)
def test_the_guard_notices_an_import_that_points_upwards(module: str, imported: str):
    assert violations(module, {imported})


def test_utils_rollout_and_observability_import_without_ray_sglang_or_megatron():
    packages = (
        "slime.processes",
        "slime.utils",
        "slime.checkpoints",
        "slime.algorithms",
        "slime.weights",
        "slime.plan",
        "slime.training",
        "slime.rollout",
        "slime.agent",
        "slime.observability",
    )
    light = [n for n in modules() if in_package(n, packages)]
    program = (
        "import importlib, sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in {'ray', 'sglang', 'sglang_router', 'megatron'}:\n"
        "            raise ImportError(name + ' is absent in this test')\n"
        "sys.meta_path.insert(0, Absent())\n"
        f"for name in {sorted(light)!r}: importlib.import_module(name)\n"
    )
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr[-2000:]
