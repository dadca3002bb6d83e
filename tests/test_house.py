"""What keeps the house in order: figures of the product's source, each with its limit.

`python tests/test_house.py [DIR]` prints the figures of a checkout. A limit that is above its aim may only fall.
"""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from functools import cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
UNKNOWN = "no_such_flag"
# figure -> (limit, aim of the second design)
LIMITS = {
    "statements": (47_279, 25_000),
    "files": (369, 270),
    "lines of the longest file": (450, 450),
    "lines of the longest function": (50, 50),
    "loose files of the fullest package": (16, 16),
    "import circles": (0, 0),
    "modules with one importer": (70, 70),
    "file names twice in a layer": (0, 0),
    "broad excepts": (25, 25),
}
# The public path of something that moved: it only imports its names, and is no file of ours.
PUBLIC_PATHS = (
    "slime.agent.harness.claude_code",
    "slime.agent.harness.codex",
    "slime.agent.harness.common",
    "slime.backends.megatron_utils.arguments",
    "slime.backends.megatron_utils.megatron_to_hf.processors",
    "slime.backends.sglang_utils.sglang_config",
    "slime.observability.profile_utils",
    "slime.observability.rollout_data_utils",
    "slime.observability.tensorboard_utils",
    "slime.observability.train_data_utils",
    "slime.observability.train_metric_utils",
    "slime.rollout.filter_hub.base_types",
    "slime.rollout.rm_hub.f1",
    "slime.rollout.rm_hub.gpqa",
    "slime.utils.reloadable_process_group",
    "slime.utils.seqlen_balancing",
    "slime.utils.tensor_backper",
)
LEAST_DOCUMENTED = 0.92
Function = ast.FunctionDef | ast.AsyncFunctionDef


class House:
    """The modules of slime/ in a checkout."""

    def __init__(self, root: Path) -> None:
        self.paths: dict[str, Path] = {}
        for path in (root / "slime").rglob("*.py"):
            parts = path.relative_to(root).with_suffix("").parts
            self.paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
        self.own = {module: path for module, path in self.paths.items() if module not in PUBLIC_PATHS}
        self.trees = {module: ast.parse(path.read_text()) for module, path in self.paths.items()}

    def nodes(self, *kinds: type) -> list[ast.AST]:
        """All nodes of these kinds."""
        return [node for tree in self.trees.values() for node in ast.walk(tree) if isinstance(node, kinds)]

    def figures(self) -> dict[str, int]:
        """Figure -> value."""
        functions = [node.end_lineno - node.lineno + 1 for node in self.nodes(ast.FunctionDef, ast.AsyncFunctionDef)]
        imported = Counter(module for modules in self.imports.values() for module in modules)
        loose = Counter(path.parent for path in self.own.values() if path.name != "__init__.py")
        return {
            "statements": len(self.nodes(ast.stmt)),
            "files": len(self.own),
            "lines of the longest file": max(path.read_text().count("\n") for path in self.paths.values()),
            "lines of the longest function": max(functions),
            "loose files of the fullest package": max(loose.values()),
            "import circles": len(self.circles()),
            "modules with one importer": sum(imported[module] == 1 for module in self.own),
            "file names twice in a layer": len(self.same_names()),
            "broad excepts": sum(_is_broad(node) for node in self.nodes(ast.ExceptHandler)),
        }

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        """Module -> modules of slime that it imports, anywhere but for types."""
        return {module: self._imports(module) - {module} for module in self.trees}

    def _imports(self, module: str) -> set[str]:
        found, stack = set(), [self.trees[module]]
        while stack:
            node = stack.pop()
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                continue
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    found.add(whole if whole in self.paths else node.module)
            stack += ast.iter_child_nodes(node)
        return found & set(self.paths)

    def circles(self) -> list[list[str]]:
        """Modules that import each other, also through others or inside functions."""
        reach = {module: set(direct) for module, direct in self.imports.items()}
        for via in reach:
            for seen in reach.values():
                if via in seen:
                    seen |= reach[via]
        groups = {tuple(sorted(n for n in seen if m in reach[n])) for m, seen in reach.items() if m in seen}
        return sorted(map(list, groups))

    def same_names(self) -> dict[tuple[str, str], list[str]]:
        """(layer, file name) -> modules, where there are several."""
        found = defaultdict(list)
        for module, path in self.own.items():
            if path.name != "__init__.py":
                depth = 3 if module.startswith("slime.backends.") else 2
                found[".".join(module.split(".")[:depth]), path.name].append(module)
        return {key: modules for key, modules in found.items() if len(modules) > 1}

    def bound_twice(self) -> set[tuple[str, str]]:
        """(module, name) where a module gives a name of its top level two values, as a careless merge does."""
        found = set()
        for module, tree in self.trees.items():
            seen = set[str]()
            for node in tree.body:
                is_overload = any(ast.unparse(d) == "overload" for d in getattr(node, "decorator_list", []))
                if isinstance(node, Function | ast.ClassDef) and not is_overload:
                    names = {node.name}
                elif isinstance(node, ast.Assign):
                    bound = [n for t in node.targets for n in (t.elts if isinstance(t, ast.Tuple) else [t])]
                    names = {n.id for n in bound if isinstance(n, ast.Name)}
                else:
                    names = set()
                found |= {(module, name) for name in names & seen}
                seen |= names
        return found

    def documented(self) -> float:
        """Share of public functions, methods of public classes included, that have a docstring."""
        bodies = [tree.body for tree in self.trees.values()]
        bodies += [node.body for node in self.nodes(ast.ClassDef) if not node.name.startswith("_")]
        public = [n for body in bodies for n in body if isinstance(n, Function) and not n.name.startswith("_")]
        return sum(ast.get_docstring(node) is not None for node in public) / len(public)


def _is_broad(handler: ast.ExceptHandler) -> bool:
    kinds = (
        {node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)} if handler.type else {"Exception"}
    )
    return bool(kinds & {"Exception", "BaseException"})


@pytest.fixture(scope="module")
def house() -> House:
    return House(ROOT)


def test_no_figure_of_the_source_is_above_its_limit(house: House) -> None:
    above = {name: value for name, value in house.figures().items() if value > LIMITS[name][0]}
    assert not above, f"{above}; circles {house.circles()}, names {house.same_names()}"


def test_a_public_path_of_what_moved_only_imports_its_names(house: House) -> None:
    for module in PUBLIC_PATHS:
        _, *imports, names = house.trees[module].body
        assert all(isinstance(node, ast.ImportFrom) for node in imports), module
        assert isinstance(names, ast.Assign) and ast.unparse(names.targets[0]) == "__all__", module
        exported = {alias.name for node in imports if isinstance(node, ast.ImportFrom) for alias in node.names}
        assert set(ast.literal_eval(names.value)) == exported, module


def test_no_module_gives_a_name_two_values(house: House) -> None:
    assert not house.bound_twice()


def test_public_functions_say_what_they_do(house: House) -> None:
    assert house.documented() >= LEAST_DOCUMENTED


def _with_unknown_reads(source: str) -> tuple[str, int]:
    """The source with a read of an unknown flag in every function that takes `args`, and how many there are."""
    tree, count = ast.parse(source), 0
    for node in ast.walk(tree):
        if isinstance(node, Function):
            names = {parameter.arg for parameter in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
            if "args" in names:
                node.body.insert(0, ast.parse(f"args.{UNKNOWN}").body[0])
                count += 1
    return ast.unparse(tree), count


def test_mypy_notices_an_unknown_flag_in_every_function_that_takes_args(tmp_path: Path) -> None:
    inserted = 0
    for package in ("slime", "slime_plugins"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
        for path in (tmp_path / package).rglob("*.py"):
            text, count = _with_unknown_reads(path.read_text())
            if count:
                path.write_text(text)
            inserted += count
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    command = [sys.executable, "-m", "mypy", "slime", "slime_plugins"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    lines = [line for line in run.stdout.splitlines() if f'has no attribute "{UNKNOWN}"' in line]
    noticed = {line.partition(" error:")[0] for line in lines}  # "Args | None" is noticed twice
    assert inserted > 300
    assert len(noticed) == inserted, run.stdout[-2000:]


def test_no_flag_is_of_any_type() -> None:
    stubs = [*(ROOT / "slime" / "config").rglob("values.pyi")]
    assert len(stubs) == 2
    assert not any("Any" in stub.read_text() for stub in stubs)
    args = ast.parse((ROOT / "slime" / "config" / "args.py").read_text())
    assert not any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in ast.walk(args))


def test_the_types_of_megatrons_and_sglangs_flags_are_those_of_the_installed_packages() -> None:
    command = [sys.executable, "tools/make_args_stubs.py", "--check"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr


if __name__ == "__main__":
    measured = House(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
    for name, value in measured.figures().items():
        print(f"{name}: {value} (limit {LIMITS[name][0]}, aim {LIMITS[name][1]})")
    print(f"public functions with a docstring: {measured.documented():.1%}")
