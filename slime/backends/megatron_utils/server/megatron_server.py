"""Serve a Megatron model as a teacher: it scores sequences over HTTP, in the shape of SGLang's /generate.

    python -m slime.backends.megatron_utils.server.megatron_server --hf-checkpoint DIR --teacher-port 7999
    torchrun --nproc-per-node 2 -m slime.backends.megatron_utils.server.megatron_server --hf-checkpoint DIR

The main thread of each process runs the model, on rank 0 another one HTTP. Status 4xx: the request is wrong and will
always be. 503: too many wait, try again. 504: it took too long. 500: the model failed. SIGTERM ends it cleanly: no
new requests, those that were taken are answered, then every rank ends with status 0 (torchrun itself, given the
signal, says 1; the process of /info's `pid` may be sent it instead).
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import uvicorn
from fastapi import Depends, FastAPI, HTTPException
from fastapi.exceptions import RequestValidationError
from fastapi.requests import Request
from fastapi.responses import JSONResponse

from slime.backends.megatron_utils.server.flags import ServerArgs, parse_server_args
from slime.backends.megatron_utils.server.requests import (
    GenerateBody,
    Job,
    JobFailed,
    ModelLoop,
    QueueFull,
    RequestQueue,
    UpdateBody,
    answer_of,
    check_request,
)
from slime.processes.wait import WaitTimeout, wait
from slime.utils.errors import HttpError, UsageError
from slime.utils.http.api_keys import SERVICE_ENV, is_refused, protect_service
from slime.utils.http_utils import post_sync
from slime.utils.misc import listen_anywhere

logger = logging.getLogger(__name__)

KIND = "megatron_teacher"
SHUTDOWN_S = 30
"""How long requests that were taken may go on after SIGTERM."""


class Handlers:
    """What the paths do; they run in the event loop and only wait for the model."""

    def __init__(self, args: ServerArgs, queue: RequestQueue, loop: ModelLoop) -> None:
        self._args, self._queue, self._loop = args, queue, loop
        self._model_path, self._weight_version, self._num_updates = args.load or args.hf_checkpoint, "0", 0
        self.is_ready = False

    async def generate(self, body: GenerateBody) -> dict[str, Any]:
        """Score one sequence."""
        started, args = time.monotonic(), self._args
        try:
            check_request(body, vocab_size=args.vocab_size, max_length=args.megatron_server_max_length)
        except UsageError as error:
            raise HTTPException(400, str(error)) from error
        job = Job(body, num_tokens=len(body.input_ids))
        score = await self._wait(job, args.teacher_request_timeout_s)
        latency = time.monotonic() - started
        return answer_of(body, score, weight_version=self._weight_version, latency_s=latency)

    async def update_weights_from_disk(self, body: UpdateBody) -> dict[str, Any]:
        """Load other weights; requests that came before are scored with the old ones."""
        job = Job((body.model_path, body.ckpt_step), alone=True)
        await self._wait(job, self._args.megatron_server_update_timeout_s)
        self._num_updates += 1
        self._model_path = body.model_path
        self._weight_version = body.weight_version or str(self._num_updates)
        return {"success": True, "message": f"loaded {body.model_path}", "num_paused_requests": 0}

    async def _wait(self, job: Job, timeout_s: float) -> Any:
        try:
            self._queue.put(job)
        except QueueFull as error:
            raise HTTPException(503, f"{error}; try again later", headers={"Retry-After": "1"}) from error
        try:
            return await asyncio.wait_for(asyncio.wrap_future(job.result), timeout_s)
        except TimeoutError as error:
            raise HTTPException(504, f"no result within {timeout_s:g} s") from error
        except UsageError as error:
            raise HTTPException(400, str(error)) from error
        except JobFailed as error:
            raise HTTPException(500, str(error)) from error

    async def healthz(self) -> JSONResponse:
        """200 as soon as the model has scored something (or without a warm-up)."""
        return JSONResponse({"status": "ok" if self.is_ready else "warming up"}, 200 if self.is_ready else 503)

    async def detect(self) -> dict[str, Any]:
        """What kind of server this is."""
        return {"server": KIND, "generates": False, "endpoints": ["/generate", "/update_weights_from_disk"]}

    async def info(self) -> dict[str, Any]:
        """The model, its weights and the limits."""
        args = self._args
        return {
            "server": KIND,
            "pid": os.getpid(),
            "model_path": self._model_path,
            "weight_version": self._weight_version,
            "vocab_size": args.vocab_size,
            "tensor_model_parallel_size": args.tensor_model_parallel_size,
            "max_length": args.megatron_server_max_length,
            "max_tokens_per_batch": args.teacher_max_tokens_per_batch,
            "max_waiting_requests": args.teacher_max_waiting_requests,
            "num_done": self._loop.num_scored,
        }

    async def get_loads(self) -> dict[str, Any]:
        """How much is to do, as SGLang says it."""
        waiting, tokens = self._queue.counts()
        load = {"dp_rank": 0, "num_running_reqs": self._loop.num_running, "num_waiting_reqs": waiting}
        return {"loads": [load | {"num_waiting_tokens": tokens}]}


async def _check_key(request: Request) -> None:
    """Refuse whoever does not send the key, where there is one: every user of a machine reaches its loopback."""
    if is_refused(request.headers.get("authorization")):
        raise HTTPException(401, f"this server asks for a key: Authorization: Bearer ${SERVICE_ENV}")


async def _refuse(request: Request, error: RequestValidationError) -> JSONResponse:
    """What is wrong with a body, without the body, which may be long."""
    wrong = [f"{'.'.join(map(str, one['loc'][1:])) or 'body'}: {one['msg']}" for one in error.errors()]
    return JSONResponse({"detail": "; ".join(wrong[:5])}, status_code=400)


def create_app(handlers: Handlers) -> FastAPI:
    """The server as an application."""
    app = FastAPI(title="slime Megatron teacher", dependencies=[Depends(_check_key)])
    app.add_exception_handler(RequestValidationError, _refuse)  # type: ignore[arg-type]
    app.post("/generate")(handlers.generate)
    app.post("/update_weights_from_disk")(handlers.update_weights_from_disk)
    app.get("/healthz")(handlers.healthz)
    app.get("/detect")(handlers.detect)
    app.get("/info")(handlers.info)
    app.get("/get_loads")(handlers.get_loads)
    return app


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
    from slime.backends.megatron_utils.server.scoring import Scorer
    from slime.utils.distributed_utils import init_gloo_group

    init_gloo_group(timedelta(minutes=args.distributed_timeout_minutes))
    queue = RequestQueue(args.teacher_max_waiting_requests, args.teacher_max_tokens_per_batch)
    loop = ModelLoop(Scorer(args), queue)
    if listener is None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)  # rank 0 says when to end
        loop.follow()
        status = 0
    else:
        status = _lead(args, loop, queue, listener)
    initialize.shutdown()
    return status


def _lead(args: ServerArgs, loop: ModelLoop, queue: RequestQueue, listener: socket.socket) -> int:
    """Rank 0: HTTP in a thread, the model here."""
    handlers = Handlers(args, queue, loop)
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
    host = "127.0.0.1" if args.teacher_host in ("0.0.0.0", "::") else args.teacher_host  # nosec B104 - asked, not bound
    url = f"http://{host}:{args.teacher_warmup_port}/generate"
    protect_service(url)

    def is_answered() -> bool:
        try:
            post_sync(url, {"input_ids": [0] * 8}, timeout_s=args.teacher_warmup_timeout_s)
        except HttpError as error:
            if error.status is not None:
                raise
            return False  # nobody listens yet
        return True

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


if __name__ == "__main__":
    sys.exit(main())
