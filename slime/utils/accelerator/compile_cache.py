"""Compiled kernels kept in one directory that a run names: a later run, or another machine, need not compile them.

Each library keeps what it compiles where its own variable says (`VARIABLES`). Their keys hold the source and the GPU's
architecture but not always the versions of what compiled it, so every set of versions has a folder of its own here.
Python's bytecode comes there, too, where packages have none and may not keep any: an engine's two processes import
some 7,000 modules each, and compile them for half of their start then.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import os
import sys
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

logger = logging.getLogger(__name__)

PACKAGES = ("torch", "triton", "sglang", "sglang-kernel", "flashinfer-python")
VARIABLES = {
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "SGLANG_CACHE_DIR": "sglang",
    "SGLANG_DG_CACHE_DIR": "deep_gemm",  # DeepGEMM, as SGLang sets it up
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "TVM_FFI_CACHE_DIR": "tvm_ffi",
    "TILELANG_CACHE_DIR": "tilelang",
    "CUDA_CACHE_PATH": "cuda",  # what the driver compiles of PTX
}
_in_use: dict[str, str] = {}


def use(directory: str | Path | None, environment: MutableMapping[str, str]) -> None:
    """Point an environment's variables at the folder of a compile cache, and log it; those that are set stay.

    Args:
        directory: of --compile-cache-dir, made if it is not there; None does nothing.
        environment: of this process, whose children inherit it.

    Raises:
        OSError: the folder cannot be made.
    """
    if directory is None:
        return
    root = Path(directory).expanduser().resolve()
    folder = root / versions()
    is_warm = folder.is_dir() and any(folder.iterdir())
    folder.mkdir(parents=True, exist_ok=True)
    others = sorted(path.name for path in root.iterdir() if path.is_dir() and path != folder)
    logger.info("compiled kernels are %s %s", "read from" if is_warm else "kept in", folder)
    if others and not is_warm:
        logger.info("compiled kernels of other versions are not used: %s", ", ".join(others))
    ours = (str(root), f"{tempfile.gettempdir()}/torchinductor_")  # inductor sets its default when it is imported
    kept = [name for name in VARIABLES if name in environment and not environment[name].startswith(ours)]
    if kept:
        logger.info("set in the environment, and left so: %s", ", ".join(kept))
    _in_use.update({name: str(folder / part) for name, part in VARIABLES.items() if name not in kept})
    if "PYTHONPYCACHEPREFIX" not in environment and not keeps_bytecode("sglang"):
        logger.info("bytecode is kept there, too: the packages of %s have none", sys.prefix)
        _in_use.update({"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(folder / "bytecode")})
    environment.update(_in_use)


def versions() -> str:
    """Name the versions that compiled kernels depend on, as one folder name: "python3.11-torch2.11.0-triton3.6.0"."""
    found = [f"python{sys.version_info.major}.{sys.version_info.minor}"]
    for package in PACKAGES:
        try:
            found.append(f"{package}{importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return "-".join(found)


def keeps_bytecode(package: str) -> bool:
    """Return whether a package has bytecode beside its source, or will after its first import."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return True
    compiled = Path(importlib.util.cache_from_source(spec.origin))
    return compiled.exists() or (not sys.dont_write_bytecode and os.access(Path(spec.origin).parent, os.W_OK))


def passed_on() -> dict[str, str]:
    """Return the variables that `use` has set, for processes that do not inherit this one's environment."""
    return dict(_in_use)
