"""Turn an HF checkpoint into a Megatron torch_dist checkpoint ("release"), on CPU, alone or under torchrun.

    python tools/convert_hf_to_torch_dist.py --hf-checkpoint Qwen3-0.6B --save Qwen3-0.6B_torch_dist
    torchrun --nproc-per-node 4 tools/convert_hf_to_torch_dist.py --hf-checkpoint ... --save ...

Under torchrun each process holds some of the layers, unless flags of a layout say otherwise. Megatron's model flags
may be given (scripts/models/*.sh) and must then agree with the HF config; without them, or with --model-args-from-hf,
they are derived from it. The dtype of the HF tensors is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script from a clone that is not installed

TRAINER_DEFAULTS: dict[str, Any] = {
    "accelerator": "cpu",
    "actor_num_nodes": 1,
    "distributed_timeout_minutes": 10,
    "offload_train": False,
    "load": None,
    "lr": 0.0,
    "model_name": None,
    "ref_ckpt_step": None,
    "ref_load": None,
    "seed": 1234,
}
"""Attributes that the trainer's own flags give, with the values that mean nothing here."""


def make_parser() -> argparse.ArgumentParser:
    """The command line: ours and all of Megatron's flags."""
    from slime.backends.megatron_utils.arguments import add_megatron_arguments

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--hf-checkpoint", required=True, help="HF directory with safetensors")
    parser.add_argument("--save", required=True, help="checkpoint root to write")
    parser.add_argument("--model-args-from-hf", action="store_true", help="derive the model flags from the HF config")
    parser.add_argument("--custom-model-provider-path", help="function that builds the Megatron model")
    return add_megatron_arguments(parser)


def parse_args(argv: Sequence[str] | None, world_size: int) -> argparse.Namespace:
    """Parse, derive and check.

    Raises:
        UsageError: flags that disagree with the HF config, or a directory that is no HF checkpoint.
    """
    from slime.backends.megatron_utils.arguments import (
        megatron_problems,
        model_args_from_hf,
        set_default_megatron_args,
    )
    from slime.utils.errors import UsageError

    args = make_parser().parse_args(argv)
    vars(args).update(TRAINER_DEFAULTS, actor_num_gpus_per_node=world_size)
    config_file = Path(args.hf_checkpoint) / "config.json"
    if not config_file.is_file():
        raise UsageError(f"--hf-checkpoint {args.hf_checkpoint} is no HF checkpoint: it has no config.json.")
    hf_config = json.loads(config_file.read_text())
    if args.model_args_from_hf or args.num_layers is None:
        vars(args).update(model_args_from_hf(hf_config))
    spread = (args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.expert_model_parallel_size)
    if world_size > 1 and max(spread) == 1:
        spread_layers(args, world_size)
    if problems := megatron_problems(args, hf_config).all():
        raise UsageError(problems)
    return set_default_megatron_args(args)


def spread_layers(args: argparse.Namespace, num_ranks: int) -> None:
    """One pipeline stage on each rank, the last one smaller if need be; too few layers are spread by their tensors."""
    per_stage = -(-args.num_layers // num_ranks)
    last = args.num_layers - per_stage * (num_ranks - 1)
    if last < 1:
        args.tensor_model_parallel_size = num_ranks
        return
    args.pipeline_model_parallel_size = num_ranks
    if last != per_stage:
        args.num_layers_in_last_pipeline_stage = last


def convert(args: argparse.Namespace, *, rank: int, world_size: int, address: str, port: int | socket.socket) -> None:
    """Build the model, load the HF weights into it and save them; every rank calls it."""
    import torch

    from slime.backends.megatron_utils import initialize
    from slime.backends.megatron_utils.arguments import model_shape
    from slime.backends.megatron_utils.hf_export import config_dtype
    from slime.backends.megatron_utils.hf_to_megatron.safetensors_reader import SafetensorsReader
    from slime.utils.fp8 import E4M3

    hf_config = json.loads((Path(args.hf_checkpoint) / "config.json").read_text())
    usual = config_dtype(hf_config)
    stored = SafetensorsReader(args.hf_checkpoint).dtypes()
    # What is stored in fp8 is trained in the config's dtype.
    stored = {name: (usual or torch.bfloat16) if dtype == E4M3 else dtype for name, dtype in stored.items()}
    args.params_dtype = reduce(torch.promote_types, stored.values())  # the narrowest that holds them all exactly
    initialize.init(args, rank=rank, world_size=world_size, master_addr=address, master_port=port)

    from slime.backends.megatron_utils.checkpoint import save_checkpoint
    from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights
    from slime.backends.megatron_utils.model_provider import build_stage, virtual_stages_here

    model = [build_stage(args, stage) for stage in virtual_stages_here(args)]
    load_hf_weights(args, model, args.hf_checkpoint)
    unusual = {name: str(d).removeprefix("torch.") for name, d in stored.items() if d != usual}
    shape = model_shape(args) | {"model_type": hf_config["model_type"], "hf_dtypes": unusual}
    directory = save_checkpoint(args.save, "release", model=model, model_shape=shape)
    if rank == 0:
        print(f"wrote {args.hf_checkpoint} to {directory}")
    initialize.shutdown()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit status."""
    from slime.utils.errors import UsageError
    from slime.utils.misc import listen_anywhere

    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    try:
        args = parse_args(argv, world_size)
        address = os.environ.get("MASTER_ADDR", "127.0.0.1")
        port = int(os.environ["MASTER_PORT"]) if world_size > 1 else listen_anywhere()
        convert(args, rank=rank, world_size=world_size, address=address, port=port)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
