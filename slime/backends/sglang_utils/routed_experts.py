"""Let an engine that records routed experts return them with every answer.

SGLang returns them where a request asks (`return_routed_experts`), and the router (0.3.2) drops that field, which it
does not know, from the requests that it forwards. So an engine started with `enable_return_routed_experts` takes every
request as asking. It can go when the router forwards the field. It knows nothing about what the experts are for.
"""

from __future__ import annotations

from typing import Any


def install() -> None:
    """Set the field when the server normalises a request; called in the server's process, once."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    normalize = GenerateReqInput.normalize_batch_and_arguments

    def normalize_with_experts(request: Any, *args: Any, **options: Any) -> Any:
        request.return_routed_experts = True
        return normalize(request, *args, **options)

    GenerateReqInput.normalize_batch_and_arguments = normalize_with_experts
