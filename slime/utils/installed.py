"""What a command says that is run by a Python without slime's packages. It imports nothing that may be missing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

EXIT_USAGE = 2
OLDEST = (3, 11)


@contextmanager
def explain_missing_packages() -> Iterator[None]:
    """End the process with one sentence where an import inside fails because this Python is not slime's."""
    try:
        yield
    except ImportError as error:
        lacks = (error.name or "").partition(".")[0]
        if sys.version_info < OLDEST:
            why = f"is Python {sys.version_info.major}.{sys.version_info.minor}, and slime needs 3.11"
        elif isinstance(error, ModuleNotFoundError) and lacks not in ("slime", "slime_plugins"):
            why = f"has no package {lacks}"
        else:
            raise
        sys.stderr.write(
            f"error: {sys.executable} {why}: bash scripts/setup_env.sh makes .venv, an environment with everything "
            "(--cpu on a machine without a GPU); run this command with .venv/bin/python.\n"
        )
        raise SystemExit(EXIT_USAGE) from None
