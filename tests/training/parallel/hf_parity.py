"""Logits and gradients of the HF model, and of Megatron's under a layout, for the same samples.

The gradient is that of sum(logits x weights) with fixed random weights for each row and word, so that every logit of
every sample has one.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.integration.trainer_world import VOCAB, make_train_data
from tests.training.parallel.layout_world import hf_tensors

Parity = dict[str, dict[Any, torch.Tensor]]


def weights_of(sample: int, num_tokens: int) -> torch.Tensor:
    """[T, V] of a sample."""
    return torch.randn(num_tokens, VOCAB, generator=torch.Generator().manual_seed(sample))


def of_hf_model(model: Any, directory: Path) -> Parity:
    """{"logits": {sample: [T, V]}, "gradients": {HF name: tensor}} of the HF model, sample by sample.

    Args:
        directory: gradients are saved there as weights, since files name the tensors of each expert, the model in
            memory those of all experts together.
    """
    logits = {}
    for sample, tokens in enumerate(make_train_data()["tokens"]):
        logits[sample] = model(torch.tensor([tokens])).logits[0]
        (logits[sample] * weights_of(sample, len(tokens))).sum().backward()
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.zeros_like(param) if param.grad is None else param.grad)  # None of an indexer's
        for buffer in model.buffers():  # biases of routers have no gradients
            buffer.zero_()
    model.save_pretrained(directory)
    gradients = load_file(directory / "model.safetensors")
    return {"logits": {sample: rows.detach() for sample, rows in logits.items()}, "gradients": gradients}


def of_layout(args: argparse.Namespace) -> Parity:
    """The same of this world's model; every rank calls it and returns everything."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.utils import get_model_config

    from slime.backends.megatron_utils.data import Packing
    from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights
    from slime.backends.megatron_utils.model.setup import build_model, freeze_parameters
    from slime.backends.megatron_utils.passes.forward import run_model, run_pass
    from slime.ray.rollout.shares import split_train_data
    from slime.training.micro_batches import MicroBatches, to_tensors
    from slime.utils import accelerator

    args.global_batch_size, args.calculate_per_token_loss = 12, False  # Megatron's scaling is undone below
    stages = range(args.virtual_pipeline_model_parallel_size or 1)
    virtual = args.virtual_pipeline_model_parallel_size is not None
    bare = [build_model(args, stage if virtual else None) for stage in stages]
    freeze_parameters(bare, only=args.only_train_params_name_list, frozen=args.freeze_params_name_list)
    config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)  # gradients whole on every rank
    model = [DistributedDataParallel(get_model_config(chunk), config, chunk) for chunk in bare]
    get_model_config(model[0]).finalize_model_grads_func = finalize_model_grads
    load_hf_weights(args, model, args.load)

    cp_rank, cp_size = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
    dp_rank, dp_size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    group = args.microbatch_group_size_per_vp_stage or args.pipeline_model_parallel_size
    layout = {"dp_size": dp_size, "cp_size": cp_size, "vpp_group": group if virtual else 1}
    share = to_tensors(split_train_data(args, make_train_data(), layout)[dp_rank], accelerator.current_device())
    micro_batches = MicroBatches(share, Packing(args.tensor_model_parallel_size, cp_rank, cp_size))
    found: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def loss(batch: dict[str, Any], logits: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        total = weigh(batch, logits, found, cp=(cp_rank, cp_size))
        # Megatron divides by micro-batches and averages over data-parallel ranks
        return total * micro_batches.num_microbatches[0] * dp_size, {}

    def forward_step(batches: Iterator[dict[str, Any]], chunk: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        batch = next(batches)
        return run_model(chunk, batch), partial(loss, batch)

    run_pass(model, micro_batches, forward_step, step_id=0, seq_length=args.seq_length, comes_from_flags=True)
    with torch.no_grad():
        for chunk in model:
            for param in chunk.parameters():
                # So that gradients are gathered as weights are; what is frozen has none.
                param.copy_(param.main_grad if param.requires_grad else torch.zeros_like(param))
            for _, buffer in chunk.named_buffers():  # "buffers" are those of the gradients here
                buffer.zero_()
    return {"logits": join(found), "gradients": hf_tensors(args, model)}


def weigh(
    batch: dict[str, Any],
    logits: torch.Tensor,
    found: dict[int, list[tuple[torch.Tensor, torch.Tensor]]],
    *,
    cp: tuple[int, int],
) -> torch.Tensor:
    """This rank's part of the sum; puts (positions, logits over the whole vocabulary) of each sample into `found`."""
    from megatron.core import parallel_state

    from slime.backends.megatron_utils.cp_utils import slice_with_cp
    from tests.unit.megatron_fakes import gather_vocab

    width = logits.shape[-1]
    first_word = parallel_state.get_tensor_model_parallel_rank() * width
    num_words = max(0, min(width, VOCAB - first_word))
    whole = gather_vocab(logits.detach())[0, :, :VOCAB].float().cpu()
    row, total = 0, logits.sum() * 0
    for sample, tokens in zip(batch["sample_indices"], batch["unconcat_tokens"], strict=True):
        place = {"cp_rank": cp[0], "cp_size": cp[1]}
        weights = slice_with_cp(weights_of(sample, len(tokens)), 0, **place).to(logits.device)
        positions = slice_with_cp(torch.arange(len(tokens)), -1, **place)
        rows = slice(row, row + len(positions))
        total = total + (logits[0, rows, :num_words] * weights[:, first_word : first_word + num_words]).sum()
        found.setdefault(sample, []).append((positions, whole[rows]))
        row += len(positions)
    return total


def join(found: dict[int, list[tuple[torch.Tensor, torch.Tensor]]]) -> dict[int, torch.Tensor]:
    """{sample: [T, V]} from what all ranks found."""
    parts: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(parts, found)
    lengths = [len(tokens) for tokens in make_train_data()["tokens"]]
    joined = {sample: torch.full((length, VOCAB), float("nan")) for sample, length in enumerate(lengths)}
    for part in parts:
        for sample, pieces in part.items():
            for positions, rows in pieces:
                joined[sample][positions[positions >= 0]] = rows[positions >= 0]
    return joined
