"""What is in a checkpoint: the name, dtype and shape of every tensor, checksums, and how two checkpoints differ.

    python tools/inspect_checkpoint.py Qwen3-4B
    python tools/inspect_checkpoint.py Qwen3-4B --checksums --match 'model.layers.0.*'
    python tools/inspect_checkpoint.py Qwen3-4B --diff Qwen3-4B_slime/iter_0000100 --origin-hf-dir Qwen3-4B

Whether it is HF's, torch_dist or FSDP's is found out by its files. Headers alone are read, unless values are asked
for; then one tensor after the other. A diff of an HF directory and a torch_dist checkpoint needs the family:
--origin-hf-dir or --model-name. The status is 1 where two checkpoints differ.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script from a clone that is not installed

if TYPE_CHECKING:
    import torch

    from slime.conversion.reader import TensorInfo


@dataclass(frozen=True)
class Checkpoint:
    """The tensors of one checkpoint.

    Attributes:
        kind: "hf", "torch_dist" or "fsdp".
        infos: name -> dtype and shape.
        read: the values of a tensor.
    """

    kind: str
    infos: Mapping[str, TensorInfo]
    read: Callable[[str], torch.Tensor]


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint", help="HF directory, checkpoint root, or a directory with .metadata")
    parser.add_argument("--diff", help="another checkpoint: what differs")
    parser.add_argument(
        "--checksums", action="store_true", help="also xxh3 of every tensor's bytes (reads all values)"
    )
    parser.add_argument("--match", help="tensors alone whose name matches, as 'model.layers.0.*'")
    parser.add_argument("--origin-hf-dir", help="show a torch_dist checkpoint under HF's names, by this config")
    parser.add_argument("--model-name", help="the same, by the name of a family (and what the checkpoint says)")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    return parser


def open_checkpoint(path: str, origin: str | None, model_name: str | None) -> Checkpoint:
    """Find out what is at `path`.

    Raises:
        UsageError: it is no checkpoint that is known, or not whole; names the file.
    """
    from slime.backends.megatron_utils.checkpoint.torch_dist_reader import TorchDistReader
    from slime.checkpoints.paths import TRACKER_FILE, resolve_checkpoint_dir
    from slime.conversion.reader import RawTensors
    from slime.utils.errors import UsageError

    directory = Path(path)
    if (directory / TRACKER_FILE).is_file():
        directory = resolve_checkpoint_dir(path)[0]
    if (directory / ".metadata").is_file():
        is_megatron = (directory / "common.pt").is_file()
        reader = TorchDistReader(directory, is_stacked=is_megatron)
        if is_megatron and (origin or model_name):
            return as_hf(directory, reader, origin, model_name)
        return Checkpoint("torch_dist" if is_megatron else "fsdp", reader.infos(), reader.read)
    if not directory.is_dir():
        raise UsageError(f"{path} is no directory.")
    raw = RawTensors(path)
    raw.check()
    return Checkpoint("hf", {name: raw.info(name) for name in raw.file_of}, raw.read)


def as_hf(directory: Path, reader: Any, origin: str | None, model_name: str | None) -> Checkpoint:
    """A torch_dist checkpoint as the tensors that tools/convert_torch_dist_to_hf.py would write."""
    import threading

    from slime.models.families import family_of
    from tools.convert_torch_dist_to_hf import read_origin_config, saved_shape, weight_jobs

    config = read_origin_config(origin)
    saved = saved_shape(directory, config)
    family = family_of(model_name or config.get("model_type") or saved.get("model_type") or "")
    jobs = weight_jobs(reader, family, saved, config, None, threading.Semaphore())
    job_of = {name: job for job in jobs for name in job.outputs}

    def read(name: str) -> torch.Tensor:
        job = job_of[name]
        return dict(zip(job.outputs, job.make(), strict=True))[name]

    return Checkpoint("torch_dist", {name: job.outputs[name] for name, job in job_of.items()}, read)


def checksum(tensor: torch.Tensor) -> str:
    """xxh3 of the bytes of a tensor, in hexadecimal."""
    import xxhash

    from slime.conversion.reader import bytes_of

    return str(xxhash.xxh3_64(bytes_of(tensor.contiguous())).hexdigest())


def listing(one: Checkpoint, names: Sequence[str], *, with_checksums: bool) -> Iterator[dict[str, Any]]:
    """One row a tensor."""
    for name in names:
        row = {"name": name, **shown(one.infos[name])}
        yield row | ({"xxh3": checksum(one.read(name))} if with_checksums else {})


def shown(info: TensorInfo) -> dict[str, Any]:
    """Dtype and shape in words."""
    return {"dtype": str(info.dtype).removeprefix("torch."), "shape": list(info.shape)}


def differences(one: Checkpoint, other: Checkpoint, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """One row for each tensor that is not the same in both; values are compared in fp32."""
    for name in names:
        here, there = one.infos.get(name), other.infos.get(name)
        if here is None or there is None:
            yield {"name": name, "only in": "the second" if here is None else "the first"}
        elif here != there:
            yield {"name": name, "differs": "form", "first": shown(here), "second": shown(there)}
            if here.shape == there.shape:
                yield from value_difference(name, one.read(name), other.read(name))
        else:
            yield from value_difference(name, one.read(name), other.read(name))


def value_difference(name: str, first: torch.Tensor, second: torch.Tensor) -> Iterator[dict[str, Any]]:
    """A row where values differ: how many, the largest difference, and the mean one relative to the mean size."""
    import torch

    from slime.conversion.reader import bytes_of

    if first.dtype == second.dtype and bytes_of(first.contiguous()) == bytes_of(second.contiguous()):
        return
    a, b = first.float(), second.float()
    gap = (a - b).abs()
    gap = torch.where(a.isnan() & b.isnan(), torch.zeros_like(gap), gap)
    if not bool((gap != 0).any()):
        return
    size = max(float(a.abs().mean()), 1e-30)
    yield {
        "name": name,
        "differs": "values",
        "count": int((gap != 0).sum()),
        "of": gap.numel(),
        "largest": float(gap.max()),
        "relative": float(gap.mean()) / size,
    }


def summary(one: Checkpoint, names: Sequence[str]) -> str:
    """A line about the tensors that were looked at."""
    chosen = [one.infos[name] for name in names]
    dtypes: dict[str, int] = {}
    for info in chosen:
        key = str(info.dtype).removeprefix("torch.")
        dtypes[key] = dtypes.get(key, 0) + info.num_bytes
    parts = ", ".join(f"{dtype} {size / 1e9:.3f} GB" for dtype, size in sorted(dtypes.items()))
    return f"{one.kind}: {len(chosen)} tensors, {sum(dtypes.values()) / 1e9:.3f} GB ({parts})"


def inspect(args: argparse.Namespace) -> int:
    """Print what was asked for; returns the exit status.

    Raises:
        UsageError: what was named is no checkpoint, or nothing matches.
    """
    from slime.utils.errors import UsageError

    one = open_checkpoint(args.checkpoint, args.origin_hf_dir, args.model_name)
    other = open_checkpoint(args.diff, args.origin_hf_dir, args.model_name) if args.diff else None
    names = sorted(one.infos.keys() | (other.infos.keys() if other else set()))
    names = [name for name in names if fnmatch.fnmatchcase(name, args.match or "*")]
    if not names:
        raise UsageError(f"--match {args.match}: no tensor of {args.checkpoint} is called so.")
    if other is None:
        for row in listing(one, names, with_checksums=args.checksums):
            print(json.dumps(row) if args.json else "  ".join(str(value) for value in row.values()))
        if not args.json:
            print(summary(one, names))
        return 0
    found = 0
    for row in differences(one, other, names):
        found += 1
        print(json.dumps(row) if args.json else "  ".join(f"{key} {value}" for key, value in row.items())[5:])
    if not args.json:
        print(f"{found} difference(s) in {len(names)} tensors")
    return 1 if found else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit status."""
    from slime.utils.errors import UsageError

    try:
        return inspect(make_parser().parse_args(argv))
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
