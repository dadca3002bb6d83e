"""Turn an HF checkpoint into a Megatron torch_dist checkpoint ("release"), on CPU.

    python tools/convert_hf_to_torch_dist.py --hf-checkpoint Qwen3-0.6B --save Qwen3-0.6B_torch_dist
    python tools/convert_hf_to_torch_dist.py --hf-checkpoint ... --save ... --max-workers 8

Weights are read, re-laid and written one by one, by several threads: memory holds one weight a thread, whatever the
size of the model. A checkpoint has no layout: any sizes of tensor, pipeline and expert parallelism load it, and flags
of a layout mean nothing here. Under torchrun the first process does all of it. Megatron's model flags may be given
(scripts/models/*.sh) and must then agree with the HF config; without them, or with --model-args-from-hf, they are
derived from it. The dtype of the HF tensors is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script from a clone that is not installed

from slime.config.args import Args  # noqa: E402

TRAINER_DEFAULTS: dict[str, Any] = {
    "accelerator": "cpu",
    "actor_num_nodes": 1,
    "actor_num_gpus_per_node": 1,
    "distributed_timeout_minutes": 10,
    "enable_mtp_training": False,
    "offload_train": False,
    "load": None,
    "lr": 0.0,
    "model_name": None,
    "multimodal_keys": None,
    "qwen_gdn_backend": "fla",
    "ref_ckpt_step": None,
    "ref_load": None,
    "seed": 1234,
    "trust_remote_code": False,
}
"""Attributes that the trainer's own flags give, with the values that mean nothing here."""
NO_LAYOUT: dict[str, Any] = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
    "sequence_parallel": False,
    "allgather_cp": False,
    "num_layers_per_virtual_pipeline_stage": None,
    "num_virtual_stages_per_pipeline_rank": None,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "pipeline_model_parallel_layout": None,
    "transformer_impl": "local",
    "attention_backend": "auto",
}
"""Flags of a parallel layout and of kernels, which a checkpoint does not have."""


class ConversionArgs(Args):
    """The flags of the tool, beside Megatron's."""

    max_workers: int
    model_args_from_hf: bool
    save: str


def make_parser() -> argparse.ArgumentParser:
    """The command line: ours and all of Megatron's flags."""
    from slime.config.megatron.arguments import add_megatron_arguments
    from slime.conversion.writer import usual_threads

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("--hf-checkpoint", required=True, help="HF directory with safetensors")
    parser.add_argument("--save", required=True, help="checkpoint root to write")
    parser.add_argument("--model-args-from-hf", action="store_true", help="derive the model flags from the HF config")
    parser.add_argument("--custom-model-provider-path", help="function that builds the Megatron model")
    parser.add_argument(
        "--model-name", help="family of weight rules, or module:NAME; default: the config's model_type"
    )
    parser.add_argument("--max-workers", type=int, default=usual_threads(), help="threads that read, re-lay and write")
    parser.add_argument("--allgather-cp", action="store_true", help="a flag of a layout, which a checkpoint has not")
    return add_megatron_arguments(parser)


def parse_args(argv: Sequence[str] | None) -> ConversionArgs:
    """Parse, derive and check.

    Raises:
        UsageError: flags that disagree with the HF config, or directories that cannot work.
    """
    from slime.checkpoints.paths import TRACKER_FILE, iteration_dir, latest_iteration
    from slime.config.megatron.arguments import (
        megatron_problems,
        model_args_from_hf,
        set_default_megatron_args,
    )
    from slime.config.parser import explicit_flags
    from slime.conversion.reader import read_hf_config
    from slime.conversion.writer import check_target
    from slime.utils.errors import UsageError

    parser = make_parser()
    args = parser.parse_args(argv, namespace=ConversionArgs())
    hf_config = read_hf_config(args.hf_checkpoint, flag="--hf-checkpoint")
    release = iteration_dir(args.save, "release")
    check_target(release, flag="--save", sources={"--hf-checkpoint": args.hf_checkpoint})
    if Path(args.save).resolve() == Path(args.hf_checkpoint).resolve():
        raise UsageError(f"--save {args.save} is --hf-checkpoint; name another directory.")
    if (iteration := latest_iteration(args.save)) is not None:
        raise UsageError(
            f"--save {args.save} holds a run's checkpoints: its {TRACKER_FILE} says {iteration}, and would say "
            "release afterwards; name another directory."
        )
    if args.max_workers < 1:
        raise UsageError(f"--max-workers {args.max_workers} is not above 0.")
    given = {"model_name": args.model_name} if args.model_name else {}
    vars(args).update(TRAINER_DEFAULTS | NO_LAYOUT | given)
    if args.model_args_from_hf or args.num_layers is None:
        explicit = explicit_flags(parser, sys.argv[1:] if argv is None else argv)
        derived = model_args_from_hf(hf_config)
        vars(args).update({name: value for name, value in derived.items() if name not in explicit})
    if problems := megatron_problems(args, hf_config).all():
        raise UsageError(problems)
    set_default_megatron_args(args)
    return args


def convert(args: ConversionArgs) -> None:
    """Build the model without memory, and write the weights of the HF checkpoint in its places.

    Raises:
        UsageError: weights that are not there, are of another shape than the flags say, or left over.
    """
    import torch

    from slime.backends.megatron_utils import initialize
    from slime.config.megatron.arguments import model_shape
    from slime.conversion.reader import SafetensorsReader, config_dtype
    from slime.utils.misc import listen_anywhere
    from slime.weights.quantization import E4M3

    reader = SafetensorsReader(args.hf_checkpoint, flag="--hf-checkpoint")
    hf_config = json.loads((Path(args.hf_checkpoint) / "config.json").read_text())
    usual = config_dtype(hf_config)
    # What is stored in fp8 is trained in the config's dtype.
    stored = {name: (usual or torch.bfloat16) if dtype == E4M3 else dtype for name, dtype in reader.dtypes().items()}
    args.params_dtype = usual or torch.float32
    initialize.init(args, rank=0, world_size=1, master_addr="127.0.0.1", master_port=listen_anywhere("127.0.0.1"))
    try:
        from slime.backends.megatron_utils.checkpoint.torch_dist_writer import (
            HfWeights,
            check_vocabulary,
            model_without_memory,
            parameters_of,
            write_release,
        )

        start = time.perf_counter()
        weights = HfWeights(args, reader, stored)
        check_vocabulary(args, weights)
        parameters, objects = parameters_of(model_without_memory(args), weights.dtype_of)
        weights.check(parameters)
        unusual = {name: str(dtype).removeprefix("torch.") for name, dtype in stored.items() if dtype != usual}
        shape = model_shape(args)
        directory = write_release(
            Path(args.save),
            parameters,
            objects,
            value_of=weights.value_of,
            model_shape=shape | {"model_type": hf_config["model_type"], "hf_dtypes": unusual},
            num_threads=args.max_workers,
        )
    finally:
        initialize.shutdown()
    print(f"wrote {args.hf_checkpoint} to {directory} in {time.perf_counter() - start:.2f} s")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit status."""
    from slime.utils.errors import UsageError

    if int(os.environ.get("RANK", 0)) > 0:
        return 0
    try:
        convert(parse_args(argv))
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
