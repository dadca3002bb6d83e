"""The command `slime`.

slime view DIR...       pages over runs: docs/dashboard.md
slime runs DIR...       the same runs in the terminal, a line each
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from slime.dashboard.address import LOOPBACK, lines_for_user, listen, new_token

app = typer.Typer(add_completion=False, no_args_is_help=True, help="slime: RL post-training of language models.")


@app.callback()
def slime() -> None:
    """slime: RL post-training of language models."""


@app.command()
def view(
    directories: Annotated[list[Path], typer.Argument(help="--output-dir of runs, or directories of them")],
    port: Annotated[int, typer.Option(help="0: a free one", min=0, max=65535)] = 0,
    host: Annotated[str, typer.Option(help="address to listen on")] = LOOPBACK,
) -> None:
    """Serve pages over runs: while they run, and after they ended or crashed. Nothing is written."""
    from slime.dashboard.app import make_app  # `slime --help` needs no server
    from slime.dashboard.server import serve

    _check(directories)
    try:
        listening = listen(host, port)
    except OSError as error:
        raise typer.BadParameter(f"--host {host} --port {port} cannot be used: {error.strerror}") from None
    token = new_token()
    for line in lines_for_user(host, listening.getsockname()[1], token):
        typer.echo(line)
    serve(make_app(directories), listening, token=token, host=host)


@app.command()
def runs(
    directories: Annotated[list[Path], typer.Argument(help="--output-dir of runs, or directories of them")],
) -> None:
    """List runs: how each stands, rollouts done, newest reward, alarms of the last rollouts."""
    from slime.dashboard.pages import overview
    from slime.dashboard.runs import Library

    _check(directories)
    for run in Library(directories).runs():
        run.refresh()
        line = overview(run)
        done = f"{line['rollout']}/{line['num_rollout'] or '?'}"
        reward = "-" if line["reward"] is None else f"{line['reward']:.3f}"
        typer.echo(f"{line['status']:9} {done:>11}  reward {reward:>7}  alarms {line['alarms']}  {run.directory}")


def _check(directories: list[Path]) -> None:
    for directory in directories:
        if not directory.is_dir():
            raise typer.BadParameter(f"{directory} is not a directory; name the --output-dir of a run")


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    result = app(args=list(words) if words is not None else None, standalone_mode=True)
    return int(result or 0)


if __name__ == "__main__":
    sys.exit(main())
