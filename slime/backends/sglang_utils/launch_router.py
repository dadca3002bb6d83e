"""Run one SGLang router in this process: `python -m slime.backends.sglang_utils.launch_router FILE.json`.

The file holds the values of `sglang_router`'s own command line, by attribute name, and the environment the API key. It
needs no SGLang and no
stand-ins, and it does not know its workers: they are registered over HTTP (`server_control.register_worker`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from slime.utils.api_keys import ROUTER_ENV
from slime.utils.misc import url_host


def main(path: Path) -> None:
    """Route until told to stop."""
    from sglang_router.launch_router import launch_router
    from sglang_router.router_args import RouterArgs

    values = json.loads(path.read_text()) | {"api_key": os.environ.get(ROUTER_ENV)}
    values["host"] = url_host(values["host"])  # it joins this host and its port as text; that of the metrics it parses
    launch_router(RouterArgs.from_cli_args(argparse.Namespace(**values)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
