"""A look at a few tensors after each sync: do the engines hold what was sent?

It picks tensors that engines keep under their HF names, remembers a sample of each as it is sent, and compares that
with the samples that the engines answer with (`weight_samples`). Ranks that send remember, the source rank asks and
compares; it sends nothing.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable

import torch

from slime.backends.megatron_utils.update_weight.engines import Calls, EngineFleet, WeightSyncError, contact_of
from slime.backends.megatron_utils.update_weight.transport import Bucket
from slime.backends.sglang_utils.weight_transfer import agrees, on_host, sample

logger = logging.getLogger(__name__)

NUM_TENSORS = 8
# SGLang fuses these, so that it has no tensor under their names.
FUSED = re.compile(r"\.(q|k|v|gate|up|q_a|kv_a)_proj\b|_proj_with_mqa|\.experts\.")

Samples = dict[str, tuple[tuple[int, ...], torch.Tensor]]
"""Name of a tensor -> its shape and a sample of it."""


def choose(names: Iterable[str]) -> set[str]:
    """A handful of tensors, evenly spread over the sorted names of those that engines do not fuse."""
    candidates = sorted(name for name in names if name.endswith("weight") and not FUSED.search(name))
    count = min(NUM_TENSORS, len(candidates))
    return {candidates[i * (len(candidates) - 1) // max(1, count - 1)] for i in range(count)}


class SpotCheck:
    """The comparison of each sync.

    Args:
        names: of all tensors that a sync sends.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._chosen = choose(names)
        self._samples: Samples = {}
        self._is_possible = bool(self._chosen)

    def begin(self) -> None:
        """Forget the last attempt."""
        self._samples = {}

    def look_at(self, bucket: Bucket) -> None:
        """Remember samples of the chosen tensors among those of a bucket."""
        for name, tensor in bucket:
            if name in self._chosen:
                self._samples[name] = (tuple(tensor.shape), sample(tensor))

    def taken(self) -> Samples:
        """What was remembered, in the host's memory."""
        shapes, samples = zip(*self._samples.values(), strict=True) if self._samples else ((), ())
        return dict(zip(self._samples, zip(shapes, on_host(samples), strict=True), strict=True))

    def add(self, others: Samples) -> None:
        """Remember what another rank has sent."""
        self._samples |= others

    def ask(self, fleet: EngineFleet) -> Calls:
        """Begin asking the engines for their samples; those of what was sent are fetched meanwhile."""
        if not self._is_possible:
            return {}
        asked = fleet.start("sample_weights", sorted(self._samples))
        self._samples = self.taken()
        return asked

    def compare(self, fleet: EngineFleet, asked: Calls) -> None:
        """Wait for the answers.

        Raises:
            WeightSyncError: an engine holds something else.
        """
        if not asked:
            return
        answers = fleet.wait(asked, "looking at the engines' weights")
        num_equal = 0
        for number, ranks in zip(asked, answers, strict=True):
            for held in ranks or ():
                verdicts = {name: agrees(*self._samples[name], held[name]) for name in held}
                wrong = [name for name, verdict in verdicts.items() if verdict is False]
                if wrong:
                    raise WeightSyncError(
                        f"{contact_of(fleet.engines[number], number)} does not hold the weights that it confirmed: "
                        f"{', '.join(wrong)}"
                    )
                num_equal += sum(verdict is True for verdict in verdicts.values())
        if not num_equal:
            self._is_possible = False
            logger.warning("no weight of the engines can be looked at: the syncs are checked by version and size only")
