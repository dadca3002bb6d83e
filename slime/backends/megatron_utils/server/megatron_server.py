"""Serve a Megatron model as a teacher: it scores sequences over HTTP, in the shape of SGLang's /generate.

    python -m slime.backends.megatron_utils.server.megatron_server --hf-checkpoint DIR --teacher-port 7999
    torchrun --nproc-per-node 2 -m slime.backends.megatron_utils.server.megatron_server --hf-checkpoint DIR

The main thread of each process runs the model, on rank 0 another one HTTP. SIGTERM ends it cleanly: no new requests,
those that were taken are answered, then every rank ends with status 0 (torchrun itself, given the signal, says 1; the
process of /info's `pid` may be sent it instead).
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from slime.backends.megatron_utils.server.arguments import ServerArgs, parse_server_args
from slime.utils.errors import UsageError
from slime.utils.misc import listen_anywhere
from slime.utils.wait import WaitTimeout, wait

if TYPE_CHECKING:
    import uvicorn

    from slime.backends.megatron_utils.server.app import Handlers
    from slime.backends.megatron_utils.server.model_loop import ModelLoop
    from slime.backends.megatron_utils.server.waiting_line import WaitingLine

logger = logging.getLogger(__name__)

SHUTDOWN_S = 30
"""How long requests that were taken may go on after SIGTERM."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the server; returns the exit status."""
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    try:
        args = parse_server_args(argv, world_size)
        listener = _listener(args.teacher_host, args.teacher_port) if rank == 0 else None
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
        return _serve(args, rank, world_size, listener)
    except UsageError as error:
        print("\n".join(f"error: {message}" for message in error.messages), file=sys.stderr)
        return 2


def _listener(host: str, port: int) -> socket.socket:
    """The address, bound before the model is loaded, and not listened at."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise UsageError(f"--teacher-host {host} --teacher-port {port} cannot be used: {error.strerror}.") from error
    return sock


def _meeting_point(world_size: int) -> tuple[str, int | socket.socket]:
    """Where ranks meet: torchrun says it; one process alone keeps to the loopback."""
    if world_size == 1:
        return "127.0.0.1", listen_anywhere("127.0.0.1")
    return os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ["MASTER_PORT"])


def _serve(args: ServerArgs, rank: int, world_size: int, listener: socket.socket | None) -> int:
    from slime.backends.megatron_utils import initialize

    address, port = _meeting_point(world_size)
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    initialize.init(
        args, rank=rank, world_size=world_size, master_addr=address, master_port=port, local_rank=local_rank
    )
    from slime.backends.megatron_utils.server.model_loop import ModelLoop
    from slime.backends.megatron_utils.server.scoring import Scorer
    from slime.backends.megatron_utils.server.waiting_line import WaitingLine
    from slime.utils.distributed_utils import init_gloo_group

    init_gloo_group(timedelta(minutes=args.distributed_timeout_minutes))
    line = WaitingLine(args.teacher_max_waiting_requests, args.teacher_max_tokens_per_batch)
    loop = ModelLoop(Scorer(args), line)
    if listener is None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)  # rank 0 says when to end
        loop.follow()
        status = 0
    else:
        status = _lead(args, loop, line, listener)
    initialize.shutdown()
    return status


def _lead(args: ServerArgs, loop: ModelLoop, line: WaitingLine, listener: socket.socket) -> int:
    """Rank 0: HTTP in a thread, the model here."""
    import uvicorn

    from slime.backends.megatron_utils.server.app import Handlers, create_app

    handlers = Handlers(args, line, loop)
    config = uvicorn.Config(create_app(handlers), log_level="warning", timeout_graceful_shutdown=SHUTDOWN_S)
    server = uvicorn.Server(config)
    failed: list[str] = []

    def stop(*_: object) -> None:
        server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    http = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="http", daemon=True)
    http.start()
    threading.Thread(target=_warm_up, args=(args, handlers, server, failed), name="warm-up", daemon=True).start()
    try:
        loop.lead(http.is_alive)
    finally:
        stop()
        http.join(SHUTDOWN_S)
    return 1 if failed else 0


def _warm_up(args: ServerArgs, handlers: Handlers, server: uvicorn.Server, failed: list[str]) -> None:
    """Say that the server is there, after it has answered a request; end it when it does not."""
    url = f"http://{_reachable(args.teacher_host)}:{args.teacher_warmup_port}/generate"
    body = json.dumps({"input_ids": [0] * 8}).encode()

    def is_answered() -> bool:
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        try:
            # its own address
            with urllib.request.urlopen(request, timeout=args.teacher_warmup_timeout_s):  # nosec B310
                return True
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{url} answered {error.code}: {error.read()[:500]!r}") from error
        except OSError:
            return False  # nobody listens yet

    if args.megatron_server_warmup:
        try:
            wait(f"{url} to answer the warm-up request", args.teacher_warmup_timeout_s, is_answered)
        except (WaitTimeout, RuntimeError) as error:
            logger.error("the warm-up failed: %s", error)
            failed.append(str(error))
            server.should_exit = True
            return
    handlers.is_ready = True
    logger.info("serving %s at http://%s:%s", args.load or args.hf_checkpoint, args.teacher_host, args.teacher_port)


def _reachable(host: str) -> str:
    # asked, not bound
    return "127.0.0.1" if host in ("0.0.0.0", "::") else host  # nosec B104


if __name__ == "__main__":
    sys.exit(main())
