"""Every change that we make to megatron-core at run time, one file each, applied by one explicit call.

Each file says what is wrong for us, in which version, and when it can go. Nothing here changes Megatron's source or
knows about models.
"""

from __future__ import annotations

import warnings


def apply(kind: str) -> None:
    """Apply all patches; call it before any other import of megatron in the process. Calling it again changes nothing.

    Args:
        kind: "cpu" or "cuda", what `slime.utils.accelerator.resolve` returned.
    """
    with warnings.catch_warnings():
        # megatron-core warns at import that TransformerEngine and Apex are absent; that is how we use it.
        warnings.simplefilter("ignore", UserWarning)
        if kind == "cpu":
            from slime.backends.megatron_utils.megatron_patch import cpu_device, uneven_gloo

            cpu_device.apply()
            uneven_gloo.apply()
        else:
            from slime.backends.megatron_utils.megatron_patch import fused_swiglu, single_rank_groups

            fused_swiglu.apply()
            single_rank_groups.apply()
        from slime.backends.megatron_utils.megatron_patch import (
            checkpoint_reader,
            checkpoint_writer,
            frozen_weights,
            fused_adam,
            fused_clipping,
            gradient_accumulation,
            known_shapes,
            packed_rope,
            recomputation,
            single_rank_regions,
            without_te,
        )

        checkpoint_reader.apply()
        checkpoint_writer.apply()
        frozen_weights.apply()
        fused_adam.apply()
        fused_clipping.apply()
        without_te.apply()
        gradient_accumulation.apply()
        known_shapes.apply()
        single_rank_regions.apply()
        packed_rope.apply()
        recomputation.apply()
