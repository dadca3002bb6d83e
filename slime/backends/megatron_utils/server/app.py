"""The HTTP side of the teacher server: paths, refusals and deadlines; the model is behind the waiting line.

Status 4xx: the request is wrong and will always be. 503: too many wait, try again. 504: it took too long. 500: the
model failed.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

from fastapi import FastAPI, HTTPException
from fastapi.exceptions import RequestValidationError
from fastapi.requests import Request
from fastapi.responses import JSONResponse

from slime.backends.megatron_utils.server.arguments import ServerArgs
from slime.backends.megatron_utils.server.model_loop import ModelLoop
from slime.backends.megatron_utils.server.protocol import GenerateBody, UpdateBody, answer_of, request_of
from slime.backends.megatron_utils.server.waiting_line import Job, LineFull, WaitingLine
from slime.utils.errors import UsageError

KIND = "megatron_teacher"


class Handlers:
    """What the paths do; they run in the event loop and only wait for the model."""

    def __init__(self, args: ServerArgs, line: WaitingLine, loop: ModelLoop) -> None:
        self._args, self._line, self._loop = args, line, loop
        self._model_path, self._weight_version, self._num_updates = args.load or args.hf_checkpoint, "0", 0
        self.is_ready = False

    async def generate(self, body: GenerateBody) -> dict[str, Any]:
        """Score one sequence."""
        started, args = time.monotonic(), self._args
        try:
            request = request_of(body, vocab_size=args.vocab_size, max_length=args.megatron_server_max_length)
        except UsageError as error:
            raise HTTPException(400, str(error)) from error
        job = Job(request, num_tokens=len(request.tokens))
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
            self._line.put(job)
        except LineFull as error:
            raise HTTPException(503, f"{error}; try again later", headers={"Retry-After": "1"}) from error
        try:
            return await asyncio.wait_for(asyncio.wrap_future(job.result), timeout_s)
        except TimeoutError as error:
            raise HTTPException(504, f"no result within {timeout_s:g} s") from error
        except UsageError as error:
            raise HTTPException(400, str(error)) from error
        except Exception as error:
            raise HTTPException(500, f"the model failed: {error}") from error

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
        waiting, tokens = self._line.counts()
        load = {"dp_rank": 0, "num_running_reqs": self._loop.num_running, "num_waiting_reqs": waiting}
        return {"loads": [load | {"num_waiting_tokens": tokens}]}


async def _refuse(request: Request, error: RequestValidationError) -> JSONResponse:
    """What is wrong with a body, without the body, which may be long."""
    wrong = [f"{'.'.join(map(str, one['loc'][1:])) or 'body'}: {one['msg']}" for one in error.errors()]
    return JSONResponse({"detail": "; ".join(wrong[:5])}, status_code=400)


def create_app(handlers: Handlers) -> FastAPI:
    """The server as an application."""
    app = FastAPI(title="slime Megatron teacher")
    app.add_exception_handler(RequestValidationError, _refuse)  # type: ignore[arg-type]
    app.post("/generate")(handlers.generate)
    app.post("/update_weights_from_disk")(handlers.update_weights_from_disk)
    app.get("/healthz")(handlers.healthz)
    app.get("/detect")(handlers.detect)
    app.get("/info")(handlers.info)
    app.get("/get_loads")(handlers.get_loads)
    return app
