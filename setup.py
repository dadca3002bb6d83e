"""Packages slime: a small base for the code that needs no accelerator, and extras for the rest.

It knows nothing about how an environment is made: scripts/setup_env.sh does that, with the pins of requirements*.txt.
"""

import sys
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def read_requirements(name: str) -> list[str]:
    """Return the requirements of one file, comments left out."""
    lines = (line.split("#")[0].strip() for line in (ROOT / name).read_text().splitlines())
    return [line for line in lines if line]


BASE = [
    "aiohttp",
    "fastapi",
    "Jinja2",
    "numpy",
    "pyarrow",
    "pydantic",
    "PyYAML",
    "requests",
    "rich",
    "safetensors",
    "shtab",
    "starlette",
    "sympy",
    "torch",
    "tqdm",
    "transformers",
    "typer",
    "uvicorn",
    "xxhash",
]

# sglang is not in it: its own metadata asks for a CUDA stack, so a machine without one installs it by
# `pip install --no-deps -r requirements-cpu.txt`, which also has the exact versions.
CPU = [
    "accelerate",
    "gguf",
    "matplotlib",
    "megatron-core==0.16.1",
    "ray[default]==2.55.1",
    "sglang-router==0.3.2",
    "tensorboard",
    "wandb",
]

# Where metrics go (docs/trackers.md): `pip install slime[mlflow]`.
TRACKERS = {
    "wandb": ["wandb"],
    "tensorboard": ["tensorboard"],
    "mlflow": ["mlflow-skinny"],
    "swanlab": ["swanlab"],
    "trackio": ["trackio"],
}

# What `slime init` and `slime convert` use, so that a wheel has it, too. An editable install has the folders.
IS_EDITABLE = any(word in sys.argv for word in ("develop", "editable_wheel"))
# Programs are a package of slime's, so that no other package's `train` or `tools` is replaced. They run as scripts in
# that folder, from which they import each other.
PROGRAMS = {"slime.programs": ".", "slime.programs.tools": "tools", "slime.programs.tools.parts": "tools/parts"}
COPIED = {} if IS_EDITABLE else {"slime.template": "examples/bring_your_own_task", **PROGRAMS}

setup(
    name="slime",
    version="0.1.0",
    description="Reinforcement learning for large language models on Megatron and SGLang",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    # The root itself is the source folder, so that an editable install also finds tools and examples by dotted path.
    package_dir={"": ".", **COPIED},
    packages=[*find_packages(include=["slime", "slime.*", "slime_plugins", "slime_plugins.*"]), *COPIED],
    package_data={
        "slime.template": ["*"],
        "slime": ["py.typed"],
        "slime.dashboard": ["static/*", "static/*/*", "static/*/*/*"],
        "slime_plugins.environments": ["requirements/*.txt"],
    },
    entry_points={"console_scripts": ["slime = slime.cli:main"]},
    install_requires=BASE,
    extras_require={
        "gpu": read_requirements("requirements.txt"),
        "cpu": CPU,
        **TRACKERS,
        "mcp": ["mcp<2"],  # tools of MCP servers (docs/mcp.md)
        "agents": ["mcp<2"],
        "s3": ["s3fs"],  # s3:// URLs (docs/remote_files.md)
        "hub": ["huggingface_hub"],  # --push-to-hub
        "cuda": read_requirements("requirements.txt"),
        "docs": ["furo", "myst-parser", "sphinx", "sphinx-copybutton"],
        "dev": read_requirements("requirements-dev.txt"),
    },
)
