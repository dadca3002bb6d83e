"""Run one SGLang router in this process: `python -m slime.backends.sglang_utils.launch_router FILE.json`.

The file holds the values of `sglang_router`'s own command line, by attribute name. It needs no SGLang and no
stand-ins, and it does not know its workers: they are registered over HTTP (`server_control.register_worker`).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path


def main(path: Path) -> None:
    """Route until told to stop."""
    from sglang_router.launch_router import launch_router
    from sglang_router.router_args import RouterArgs

    launch_router(RouterArgs.from_cli_args(argparse.Namespace(**json.loads(path.read_text()))))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
