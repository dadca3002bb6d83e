"""Every change that we make to megatron-core at run time, one file each, applied by one explicit call.

Each file says what is wrong for us, in which version, and when it can go. Nothing here changes Megatron's source or
knows about models.
"""

from __future__ import annotations

import warnings
from importlib import import_module

OF_KIND = {"cpu": ("cpu_device", "uneven_gloo"), "cuda": ("fused_swiglu", "single_rank_groups")}
"""What `slime.utils.accelerator.resolve` returned -> patches of that device alone; they go first."""
ALWAYS = (
    "checkpoint_reader",
    "checkpoint_writer",
    "frozen_weights",
    "fused_adam",
    "fused_clipping",
    "without_te",
    "gradient_accumulation",
    "known_shapes",
    "single_rank_regions",
    "packed_rope",
    "recomputation",
)


def apply(kind: str) -> None:
    """Apply all patches; call it before any other import of megatron in the process. Calling it again changes nothing.

    Args:
        kind: "cpu" or "cuda", what `slime.utils.accelerator.resolve` returned.
    """
    with warnings.catch_warnings():
        # megatron-core warns at import that TransformerEngine and Apex are absent; that is how we use it.
        warnings.simplefilter("ignore", UserWarning)
        for name in (*OF_KIND[kind], *ALWAYS):
            import_module(f"{__name__}.{name}").apply()
