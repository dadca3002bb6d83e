"""Mistral: Llama's layers and names of weights, without sliding windows."""

from slime.models.family import ATTENTION, BASE, MLP, Part, family_of_parts

NO_WINDOW = Part(
    refuses=lambda hf: {f"sliding_window {hf['sliding_window']}": hf["sliding_window"] is not None},
    tiny={"sliding_window": None},
)
MISTRAL = family_of_parts(
    "mistral",
    BASE,
    ATTENTION,
    MLP,
    NO_WINDOW,
    defaults={"num_key_value_heads": 8, "sliding_window": 4096},  # what transformers takes where a config is silent
    hf_class="Mistral",
)
