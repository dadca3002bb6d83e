"""A reward computed by an HTTP service (rm_type remote_rm).

It knows the request's three fields; the response's JSON is the reward as it is. How often and how long the service is
asked is in `slime.rollout.rm_hub.service`.
"""

from __future__ import annotations

from typing import Any

from slime.config.args import Args
from slime.rollout.rm_hub.service import Service, ask
from slime.utils.misc import needed
from slime.utils.types import Sample


async def remote_rm(args: Args, sample: Sample, max_retries: int = 10) -> Any:
    """POST prompt, response and label to `args.rm_url` and return the answer's JSON.

    At most 64 requests at a time, 120 s for a try. Server and connection errors are tried again, `max_retries` times
    in all.

    Raises:
        RewardError: the service refused the request (4xx, at once, with its text) or every try failed.
    """
    service = Service(
        "the reward service of --rm-url", needed(args.rm_url), max_tries=max_retries, proxy=args.http_proxy
    )
    payload = {"prompt": sample.prompt, "response": sample.response, "label": sample.label}
    return await ask(service, payload, sample)
