"""How an engine lies on nodes: one server process a node, with an equal share of the engine's GPUs.

It reads where slots are, and starts nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from slime.ray.placement_group import Slot
from slime.utils.errors import UsageError


def nodes_of_engine(slots: Sequence[Slot], name: str) -> list[Slot]:
    """The first slot of an engine on each of its nodes.

    Args:
        slots: of the engine, in order.
        name: of the engine, for messages.

    Raises:
        UsageError: the nodes have unequal shares, which SGLang cannot do.
    """
    shares = [list(share) for _, share in itertools.groupby(slots, key=lambda slot: slot.node)]
    if len({len(share) for share in shares}) > 1:
        found = ", ".join(f"{len(share)} on {share[0].node}" for share in shares)
        raise UsageError(
            f"{name} of {len(slots)} GPUs (slots) would have {found}, but it takes as many of each of its nodes: "
            "choose --rollout-num-gpus-per-engine and the trainer's GPUs so that engines begin where a node begins or "
            "end where it ends."
        )
    return [share[0] for share in shares]
