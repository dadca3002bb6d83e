"""What quantising cannot store: weights that are not finite. It knows no formats but their scales."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class QuantizationError(RuntimeError):
    """A weight has no place in the format: it is not finite."""


def check_finite(named_scales: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Raise for the first weight with a scale that is not finite; one answer from the device for the whole bucket.

    Raises:
        QuantizationError: names the weight.
    """
    if not named_scales:
        return
    largest = torch.stack([scales.amax() for _, scales in named_scales])
    if bool(largest.isfinite().all()):
        return
    index = int((~largest.isfinite()).nonzero()[0])
    raise QuantizationError(
        f"{named_scales[index][0]} has a weight that is infinite or no number, and so cannot be quantized for the "
        "engines: training has diverged (look at train/grad_norm and train/loss of the last steps)"
    )
