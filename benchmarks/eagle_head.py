"""Train an EAGLE head (arXiv:2401.15077) of a Llama-shaped model on texts of its own, by plain torch.

The head is one layer: it joins the embedding of the next token with the model's last hidden state, runs a decoder
layer without a norm in front, and the model's own output layer reads it. It learns what the model itself would
predict at the next place (cross-entropy with the model's distribution) and its hidden state there (smooth L1, as in
the paper). The directory is one that SGLang serves: --sglang-speculative-algorithm EAGLE
--sglang-speculative-draft-model-path DIR.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

LR, BATCH, HIDDEN_SCALE = 1e-3, 32, 0.1


class Head(nn.Module):
    """The joining layer and one decoder layer of the model's own shape.

    Args:
        config: the model's; one of Llama's kind.
    """

    def __init__(self, config: Any) -> None:
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

        super().__init__()
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size)
        self.layer = LlamaDecoderLayer(config, layer_idx=0)
        self.layer.input_layernorm = nn.Identity()
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """[B, T, H] embeddings of the next tokens and hidden states here -> hidden states [B, T, H] there."""
        joined = self.fc(torch.cat([embedded, hidden], dim=-1))
        places = torch.arange(joined.shape[1], device=joined.device)[None]
        output = self.layer(joined, position_embeddings=self.rotary(joined, places), attention_mask=None)
        return output[0] if isinstance(output, tuple) else output


def train_head(
    model_path: Path, texts: Sequence[Sequence[int]], folder: Path, *, device: str, seconds: float
) -> list[float]:
    """Train a head for so long and write it.

    Args:
        model_path: HF directory of the model.
        texts: tokens of prompts with the model's answers; cut to the shortest.
        folder: where the head's HF directory goes.

    Returns:
        the loss of each step.
    """
    from transformers import AutoModelForCausalLM

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype).to(device).eval().requires_grad_(False)
    torch.manual_seed(0)
    head = Head(model.config).to(device)  # fp32: it is small
    optimizer = torch.optim.AdamW(head.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
    length = min(map(len, texts))
    data = torch.tensor([list(text)[:length] for text in texts])
    begin, losses = time.monotonic(), []
    while time.monotonic() - begin < seconds:
        tokens = data[torch.randint(len(data), (BATCH,))].to(device)
        with torch.no_grad():
            hidden = model.model(tokens).last_hidden_state
            embedded = model.model.embed_tokens(tokens)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            predicted = head(embedded[:, 1:].float(), hidden[:, :-1].float())
            theirs = model.lm_head(hidden[:, 1:]).float()
            ours = F.linear(predicted.to(dtype), model.lm_head.weight).float()
        loss = -(theirs.softmax(-1) * ours.log_softmax(-1)).sum(-1).mean()
        total = loss + HIDDEN_SCALE * F.smooth_l1_loss(predicted.float(), hidden[:, 1:].float())
        optimizer.zero_grad()
        total.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 0.5)
        for group in optimizer.param_groups:  # linear to a tenth over the given time
            group["lr"] = LR * (1 - 0.9 * min(1.0, (time.monotonic() - begin) / seconds))
        optimizer.step()
        losses.append(loss.item())
    write_head(head, model, model_path, folder)
    return losses


def write_head(head: Head, model: nn.Module, model_path: Path, folder: Path) -> None:
    """The head as an HF directory that SGLang serves as a draft of the model."""
    from safetensors.torch import save_file

    tensors = {f"fc.{name}": tensor for name, tensor in head.fc.state_dict().items()}
    tensors |= {f"layers.0.{name}": tensor for name, tensor in head.layer.state_dict().items()}
    tensors["embed_tokens.weight"] = model.get_input_embeddings().weight  # SGLang puts the model's own in its place
    dtype = next(model.parameters()).dtype
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    config = json.loads((model_path / "config.json").read_text())
    config |= {"architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
