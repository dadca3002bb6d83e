"""From the command line to an exit status: what train.py and train_async.py have in common around their schedule.

It turns every end of a run into one readable message and a status: 0 done, 1 something failed, 2 unusable input
(nothing was started), 130 Ctrl-C, 143 SIGTERM.
"""

from __future__ import annotations

import dataclasses
import logging
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

from slime.config.args import Args
from slime.config.parse import Checked, CommandLine, accept
from slime.config.problems import collected
from slime.config.resume import line_to_go_on
from slime.observability.logging_utils import configure_logger
from slime.ray.plan_check import check_plan, dry_run
from slime.ray.utils import ActorFailure
from slime.utils.checkpoint_paths import latest_iteration
from slime.utils.errors import UsageError
from slime.utils.pipes import reader_may_leave
from slime.utils.secret_names import command_line_without_secrets

logger = logging.getLogger(__name__)

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED, EXIT_TERMINATED = 1, 2, 130, 143


def drive(
    train: Callable[[Any], None],
    *,
    check: Callable[[Any], None] | None = None,
    warn: Callable[[Any], Iterable[str]] | None = None,
) -> int:
    """Parse the command line and run `train(args)`.

    Args:
        train: the schedule.
        check: raises UsageError for flags that this driver cannot work with.
        warn: what flags this driver works with but are seldom meant for it.

    Returns:
        the exit status.
    """
    configure_logger()
    logging.getLogger("megatron").setLevel(logging.WARNING)  # it reports each optional package that is not there
    signal.signal(signal.SIGTERM, _leave)
    args: Args | None = None
    try:
        command_line = CommandLine()
        if (text := command_line.answer(sys.argv[1:])) is not None:
            with reader_may_leave():
                sys.stdout.write(text)
            return 0
        checked = _checked(command_line, check, warn)
        if checked.args.dry_run:
            return dry_run(checked)
        args = accept(checked)
        check_plan(args)
        train(args)
    except UsageError as error:
        for message in error.messages:
            _say(f"error: {message}")
        return EXIT_USAGE
    except SystemExit:
        if not _Terminated.arrived:
            raise
        _say_how_to_go_on(args)
        return EXIT_TERMINATED  # Ray's wait makes a SystemExit(1) of ours
    except KeyboardInterrupt:
        _say("interrupted")
        _say_how_to_go_on(args)
        return EXIT_INTERRUPTED
    except (ActorFailure, TimeoutError, RuntimeError) as error:
        _report(error, None if args is None else args.output_dir)
        return EXIT_FAILED
    return 0


def _checked(
    command_line: CommandLine,
    check: Callable[[Any], None] | None,
    warn: Callable[[Any], Iterable[str]] | None,
) -> Checked:
    checked = command_line.check(sys.argv[1:])
    if check is not None:
        collected(checked.problems.wrong, check, checked.args)
    if warn is not None:
        checked = dataclasses.replace(checked, driver_warnings=tuple(warn(checked.args)))
    return checked


class _Terminated:
    """Whether this process was sent SIGTERM."""

    arrived = False


def _leave(signum: int, frame: Any) -> NoReturn:
    """SIGTERM becomes an exception of the main thread, so that every `finally` ends what it started."""
    _Terminated.arrived = True
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # ending takes seconds: a second one must not cut it short
    raise SystemExit(EXIT_TERMINATED)


def _say_how_to_go_on(args: Args | None) -> None:
    """Print, as the last line, the command that resumes a run that was interrupted, if one can."""
    if args is None or not args.save or args.eval_only or args.debug_rollout_only:
        return
    newest = latest_iteration(args.save)
    what = "begin again, for there is no checkpoint yet" if newest is None else f"go on after rollout {newest}"
    _say(f"to {what}:")
    _say(shlex.join(command_line_without_secrets(line_to_go_on(sys.orig_argv), vars(args))))


def _report(error: Exception, output_dir: str | None) -> None:
    """Print one line for the user; both tracebacks go into a file next to the logs."""
    _say(f"error: {error}")
    if output_dir is None:
        traceback.print_exception(error)
        return
    path = Path(output_dir).resolve() / "logs" / "error.txt"
    details = error.details if isinstance(error, ActorFailure) else ""
    text = details + "\n\n" + "".join(traceback.format_exception(error))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as problem:  # a full disk may be why the run ends
        _say(f"{text}\n{path} cannot be written: {problem}")
        return
    _say(f"full traceback: {path}")


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
