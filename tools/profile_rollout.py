"""Have every engine of a running job record its next steps with torch's profiler.

    python tools/profile_rollout.py --router-url http://127.0.0.1:30000                  # 3 steps, stops by itself
    python tools/profile_rollout.py --router-url http://127.0.0.1:30000 --num-steps 0    # until ...
    python tools/profile_rollout.py --router-url http://127.0.0.1:30000 --action stop
    python tools/analyze_profile.py --profile-dir /tmp/sglang_profile

The address is that of the job's router (its log names it) or of one engine. Each rank of an engine writes its trace on
its own machine: <output-dir>/<host>-<port>-<time>-TP-<rank>[-EXTEND|-DECODE].trace.json.gz.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script from a clone that is not installed

from slime.backends.sglang_utils import server_control
from slime.utils.errors import HttpError, UsageError
from slime.utils.http.api_keys import ENGINE_ENV, ROUTER_ENV, protect, protect_router
from slime.utils.http_utils import post_sync

ACTIVITIES = ("CPU", "GPU", "MEM")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status: 1 if an engine did not do what was asked, 2 for unusable input."""
    args = parse(argv)
    try:
        protect_router(args.router_url)
        engines = find_engines(args.router_url.rstrip("/"))
        if args.num_steps < 0:
            raise UsageError(f"--num-steps {args.num_steps} is no number of steps: use 1 or more, or 0 for until stop")
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    failed = 0
    for engine in engines:
        protect(engine, os.environ.get(ENGINE_ENV) or os.environ.get(ROUTER_ENV))
        try:
            if args.action == "start":
                post_sync(f"{engine}/start_profile", request_of(args, engine))
                what = f"records {args.num_steps} steps" if args.num_steps else "records until --action stop"
                print(f"{engine} {what} into {args.output_dir}")
            else:
                post_sync(f"{engine}/stop_profile", {}, timeout_s=600.0)  # a trace of many steps takes minutes
                print(f"{engine} stopped; its trace is written")
        except HttpError as error:
            failed += 1
            print(f"error: {explained(args.action, error)}", file=sys.stderr)
    return 1 if failed else 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--router-url", required=True, help="http://host:port of the router, or of one engine")
    parser.add_argument("--action", choices=["start", "stop"], default="start", help="(default: start)")
    parser.add_argument(
        "--output-dir",
        # SGLang's own default
        default="/tmp/sglang_profile",  # nosec B108
        help="folder on the engines' machines (default: %(default)s)",
    )
    parser.add_argument(
        "--num-steps", type=int, default=3, help="forward passes to record, 0: until --action stop (default: 3)"
    )
    parser.add_argument(
        "--activities",
        nargs="+",
        choices=ACTIVITIES,
        default=["GPU"],
        help="an engine on CPU takes CPU (default: GPU)",
    )
    parser.add_argument("--profile-by-stage", action="store_true", help="prefill and decoding in files of their own")
    parser.add_argument("--with-stack", action="store_true", help="the Python stack of each operator (much larger)")
    parser.add_argument("--record-shapes", action="store_true", help="the shapes of each operator's inputs")
    return parser.parse_args(argv)


def find_engines(url: str) -> list[str]:
    """Addresses of the engines behind a router; an address that is no router's is an engine's.

    Raises:
        UsageError: nobody answers there, or the router has no healthy engine.
    """
    try:
        engines = server_control.list_workers_sync(url)
    except HttpError as error:
        if error.status == 404:
            return [url]
        raise UsageError(f"--router-url {url} is not the address of a running router or engine: {error}") from error
    if not engines:
        raise UsageError(f"--router-url {url}: the router has no healthy engine now; ask again during a rollout")
    return engines


def request_of(args: argparse.Namespace, engine: str) -> dict[str, Any]:
    """What /start_profile takes; two engines never write the same file."""
    return {
        "output_dir": str(Path(args.output_dir).resolve()),
        "num_steps": args.num_steps or None,
        "activities": args.activities,
        "profile_by_stage": args.profile_by_stage,
        "with_stack": args.with_stack,
        "record_shapes": args.record_shapes,
        "profile_prefix": engine.partition("//")[2].replace(":", "-"),
    }


def explained(action: str, error: HttpError) -> str:
    """An engine answers 500 without a reason where it already records, or does not."""
    if error.status != 500:
        return str(error)
    if action == "start":
        return f"{error}; does it record already? --action stop ends that"
    return f"{error}; was it not recording any more? After --num-steps passes it stops by itself"


if __name__ == "__main__":
    sys.exit(main())
