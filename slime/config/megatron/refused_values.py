"""Values of Megatron's options that are refused though the option works, and those that say the same as its default.

The options themselves are classified in megatron_flags.py.
"""

from __future__ import annotations

from typing import Any

from slime.config.megatron.megatron_flags import NO_SGD

# Values of options that are used: option -> {value: reason or topic}
REFUSED_VALUES: dict[str, dict[Any, tuple[str, str | None]]] = {
    "--normalization": {"LayerNorm": ("no family of docs/model_families.md has it; use RMSNorm", None)},
    "--position-embedding-type": {
        "mrope": ("on text it is the same as rope, and images are not trained on; use rope", None),
        **dict.fromkeys(
            ("learned_absolute", "relative", "none"), ("no family of docs/model_families.md has it; use rope", None)
        ),
    },
    "--optimizer": {
        "sgd": (f"{NO_SGD}; use adam", None),
        **dict.fromkeys(
            ("muon", "dist_muon"),
            ("it requires the library emerging_optimizers, which slime does not install; use adam", None),
        ),
    },
    "--attention-backend": {
        "local": ("it does not know packed samples; use unfused or auto", None),
    },
    "--transformer-impl": {"inference_optimized": ("slime trains the model; use local", None)},
    "--exp-avg-dtype": dict.fromkeys(
        ("fp16", "fp8"), ("only TransformerEngine scales moments of so small a range; use bf16 or fp32", None)
    ),
    "--ckpt-format": dict.fromkeys(
        ("torch", "zarr", "torch_dcp", "fsdp_dtensor"), ("slime's checkpoints are torch_dist", None)
    ),
}
# Values that say the same as leaving a refused option out.
SAME_AS_DEFAULT: dict[str, tuple[Any, ...]] = {
    "--num-virtual-stages-per-pipeline-rank": (1,),
    "--moe-z-loss-coeff": (0,),
    "--moe-token-drop-policy": ("probs",),
}
