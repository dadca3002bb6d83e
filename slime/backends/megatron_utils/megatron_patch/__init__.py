"""Every change that we make to megatron-core at run time, one function each, applied by one explicit call.

Each function says what is wrong for us, in which version, and when it can go. Nothing here changes Megatron's source
or knows about models.
"""

from __future__ import annotations

import functools
import warnings


@functools.cache
def apply(kind: str) -> None:
    """Apply all patches; call it before any other import of megatron in the process. Calling it again changes nothing.

    Args:
        kind: "cpu" or "cuda", what `slime.utils.accelerator.resolve` returned.
    """
    with warnings.catch_warnings():
        # megatron-core warns at import that TransformerEngine and Apex are absent; that is how we use it.
        warnings.simplefilter("ignore", UserWarning)
        from slime.backends.megatron_utils.megatron_patch import (
            checkpoints,
            cpu,
            known_shapes,
            layers,
            without_apex,
        )

        if kind == "cpu":
            cpu.use_cpu_as_cuda()
            cpu.exchange_uneven_shares()
        else:
            without_apex.use_fused_swiglu()
            layers.use_small_groups()
        checkpoints.read_data_alone()
        checkpoints.write_in_process()
        layers.use_frozen_weights()
        layers.recompute_behind_frozen()
        without_apex.use_fused_adam()
        without_apex.use_fused_clipping()
        without_apex.do_without_te()
        without_apex.accumulate_in_product()
        known_shapes.send_known_shapes()
        layers.skip_regions()
        layers.rotate_packs_at_once()
