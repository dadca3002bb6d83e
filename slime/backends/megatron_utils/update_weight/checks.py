"""Check that nothing of a weight sync was lost: what was sent, and what the engines hold afterwards.

1. Names: those sent, over all buckets, must be those of the HF checkpoint that the engines were started from.
2. Bytes: a later sync sends as many as the first one.
3. Versions: an engine sets a version when it has loaded a bucket; the last one says that there are no more.
4. Samples: a few elements of a few tensors that engines keep under their HF names are remembered as they are sent, and
   compared with those that the engines answer with (`weight_samples`).

Ranks that send take notes, the source rank asks the engines and compares.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from slime.backends.megatron_utils.update_weight.bucket_stream import Bucket, check_versions
from slime.backends.megatron_utils.update_weight.engines import Calls, EngineFleet, WeightSyncError, contact_of
from slime.backends.sglang_utils.weight_transfer import agrees, on_host, sample
from slime.weights.names import expected_hf_names

logger = logging.getLogger(__name__)

NUM_TENSORS = 8
# SGLang fuses these, so that it has no tensor under their names.
FUSED = re.compile(r"\.(q|k|v|gate|up|q_a|kv_a)_proj\b|_proj_with_mqa|\.experts\.")


@dataclass
class Sent:
    """What went through one attempt of a sync, on one rank or on several.

    Attributes:
        names: of tensors.
        num_bytes: of all of them.
        samples: name of a chosen tensor -> its shape and a sample of it.
    """

    names: set[str] = field(default_factory=set)
    num_bytes: int = 0
    samples: dict[str, tuple[tuple[int, ...], torch.Tensor]] = field(default_factory=dict)

    def add(self, other: Sent) -> None:
        """Count in what another rank has sent."""
        self.names |= other.names
        self.num_bytes += other.num_bytes
        self.samples |= other.samples

    def on_host(self) -> Sent:
        """The same with samples in the host's memory; the device is waited for once."""
        shapes, samples = zip(*self.samples.values(), strict=True) if self.samples else ((), ())
        held = dict(zip(self.samples, zip(shapes, on_host(samples), strict=True), strict=True))
        return Sent(self.names, self.num_bytes, held)


def choose(names: Iterable[str]) -> set[str]:
    """A handful of tensors, evenly spread over the sorted names of those that engines do not fuse."""
    candidates = sorted(name for name in names if name.endswith("weight") and not FUSED.search(name))
    count = min(NUM_TENSORS, len(candidates))
    return {candidates[i * (len(candidates) - 1) // max(1, count - 1)] for i in range(count)}


class SyncChecks:
    """The checks of each sync of a run.

    Args:
        hf_checkpoint: that the engines were started from.
        num_predictions: layers that predict further tokens in the trainer's model.

    Attributes:
        sent: what went through the present attempt.
    """

    def __init__(self, hf_checkpoint: str, num_predictions: int) -> None:
        self._checkpoint = hf_checkpoint
        self._expected = expected_hf_names(Path(hf_checkpoint), num_predictions)
        self._chosen = choose(self._expected)
        self._has_samples = bool(self._chosen)
        self._bytes_of_first_sync: int | None = None
        self.sent = Sent()

    def begin(self) -> None:
        """Forget the last attempt."""
        self.sent = Sent()

    def note(self, bucket: Bucket) -> None:
        """Note a bucket that is sent, with samples of the chosen tensors in it."""
        self.sent.names |= {name for name, _ in bucket}
        self.sent.num_bytes += sum(tensor.nbytes for _, tensor in bucket)
        self.sent.samples |= {
            name: (tuple(tensor.shape), sample(tensor)) for name, tensor in bucket if name in self._chosen
        }

    def compare(self, fleet: EngineFleet, version: int) -> None:
        """See that everything was sent, set the version that says so, and compare samples.

        Raises:
            WeightSyncError: something is missing, or an engine holds something else.
        """
        self._check_complete(version)
        naming = fleet.start("set_weight_version", str(version))
        asked = fleet.start("sample_weights", sorted(self.sent.samples)) if self._has_samples else {}
        sent = self.sent.on_host() if asked else self.sent  # meanwhile
        found = fleet.wait(naming, "setting the weight version")
        check_versions(fleet, dict(zip(naming, found, strict=True)), str(version))
        if asked:
            self._compare_samples(fleet, asked, sent)

    def _check_complete(self, version: int) -> None:
        missing = sorted(self._expected - self.sent.names)
        if missing:
            raise WeightSyncError(
                f"weight sync {version} sent {len(self.sent.names)} tensors; {len(missing)} of "
                f"{self._checkpoint} were not among them: {', '.join(missing[:5])}",
                is_final=True,
            )
        if self._bytes_of_first_sync is None:
            self._bytes_of_first_sync = self.sent.num_bytes
        if self.sent.num_bytes != self._bytes_of_first_sync:
            raise WeightSyncError(
                f"weight sync {version} sent {self.sent.num_bytes} bytes, the first one {self._bytes_of_first_sync}",
                is_final=True,
            )

    def _compare_samples(self, fleet: EngineFleet, asked: Calls, sent: Sent) -> None:
        num_equal = 0
        for number, ranks in zip(asked, fleet.wait(asked, "looking at the engines' weights"), strict=True):
            for held in ranks or ():
                verdicts = {name: agrees(*sent.samples[name], held[name]) for name in held}
                wrong = [name for name, verdict in verdicts.items() if verdict is False]
                if wrong:
                    raise WeightSyncError(
                        f"{contact_of(fleet.engines[number], number)} does not hold the weights that it confirmed: "
                        f"{', '.join(wrong)}"
                    )
                num_equal += sum(verdict is True for verdict in verdicts.values())
        if not num_equal:
            self._has_samples = False
            logger.warning("no weight of the engines can be looked at: the syncs are checked by version and size only")
