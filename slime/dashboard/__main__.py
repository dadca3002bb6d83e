"""`python -m slime.dashboard DIR...`: what `slime view` does; `DIR HOST --fd N`: what a driver starts."""

from __future__ import annotations

import os
import runpy
import socket
import sys
from pathlib import Path

from slime.dashboard.address import TOKEN_VARIABLE
from slime.dashboard.app import make_app, serve

if __name__ == "__main__":
    if "--fd" not in sys.argv:
        sys.argv.insert(1, "view")
        runpy.run_module("slime.cli", run_name="__main__")  # with typer, which next to a run would only take memory
    else:
        directory, host, descriptor = sys.argv[1], sys.argv[2], int(sys.argv[4])
        token = os.environ.pop(TOKEN_VARIABLE)
        serve(make_app([Path(directory)]), socket.socket(fileno=descriptor), token=token, host=host)
