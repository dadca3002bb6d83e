"""A rollout function that only waits: the engines stay up, for calls by hand, a profiler or a client of your own.

Use: --rollout-function-path slime.rollout.sleep_rollout.sleep. It generates nothing and never returns; end the run
with Ctrl-C. (A driver gives up on a rollout after a day.)
"""

from __future__ import annotations

import logging
import time
from typing import Any, NoReturn

from slime.config.args import Args
from slime.rollout.sampling.engine_request import router_url

logger = logging.getLogger(__name__)
_HOUR_S = 3600.0


def sleep(args: Args, rollout_id: int, data_source: Any, evaluation: bool = False) -> NoReturn:
    """Wait, and say so every hour.

    Args:
        args: reads the router's address.
        rollout_id, data_source, evaluation: unused; the signature of a rollout function.
    """
    hours = 0
    while True:
        logger.warning("the engines behind %s are up; asleep for %d h, end with Ctrl-C", router_url(args), hours)
        time.sleep(_HOUR_S)
        hours += 1
