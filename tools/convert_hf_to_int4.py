"""Turn an HF checkpoint into one in 4-bit integers (compressed-tensors) by GPTQ, calibrated on samples of text.

    python tools/convert_hf_to_int4.py --input-dir Qwen3-30B-A3B --output-dir Qwen3-30B-A3B-int4 --data-dir train.jsonl

--data-dir is a .jsonl or .parquet file, or a directory of them, whose rows have "text", or "prompt" or "messages" (a
text, or turns for the chat template). Samples go through one layer after the other: memory holds a layer, and a GPU is
used if there is one. Each layer is calibrated on what the quantised ones before it make. Of a model with experts only
these are quantised. Without data: tools/convert_hf_to_int4_direct.py.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script from a clone that is not installed

if TYPE_CHECKING:
    import torch

    from slime.conversion.reader import SafetensorsReader
    from slime.conversion.writer import Job
    from slime.weights.formats import Int4Format
    from tools.parts.int4_calibration import CalibratedLayers

LAYER = re.compile(r"model\.layers\.(\d+)\.")


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--input-dir", required=True, help="HF directory to read")
    parser.add_argument("--output-dir", required=True, help="HF directory to write")
    parser.add_argument(
        "--data-dir", required=True, help=".jsonl or .parquet file with samples, or a directory of such"
    )
    parser.add_argument(
        "--quant-type", choices=("W4A16", "W8A16"), default="W4A16", help="bits of weights (4 alone) and activations"
    )
    parser.add_argument("--num-calibration-samples", type=int, default=256, help="samples, from the first on")
    parser.add_argument("--max-sequence-length", type=int, default=2048, help="tokens of a sample that are taken")
    parser.add_argument("--dampening-frac", type=float, default=0.01, help="of the mean second moment, added to each")
    parser.add_argument("--quant-group-size", type=int, default=32, help="columns that share a scale")
    parser.add_argument("--shard-bytes", type=int, default=5 * 1024**3, help="bytes of a safetensors shard")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the checkpoint")
    return parser


def convert(args: argparse.Namespace) -> int:
    """Do what the command line says; returns the number of weights that are int4 now.

    Raises:
        UsageError: input or output that cannot work.
    """
    import torch

    from slime.conversion.reader import SafetensorsReader
    from slime.conversion.writer import HfTarget, write_hf
    from slime.utils.errors import UsageError
    from slime.weights.formats import EXPERTS_ONLY, Int4Format
    from tools.convert_hf_to_fp8 import config_to_quantize
    from tools.convert_hf_to_int4_direct import check_shapes
    from tools.parts.int4_calibration import CalibratedLayers

    for flag in (
        "num_calibration_samples",
        "max_sequence_length",
        "quant_group_size",
        "dampening_frac",
        "shard_bytes",
    ):
        if getattr(args, flag) <= 0:
            raise UsageError(f"--{flag.replace('_', '-')} {getattr(args, flag)} is not above 0.")
    if args.quant_type == "W8A16":
        raise UsageError(
            "--quant-type W8A16: engines that a trainer feeds take integers of 4 bits alone; use W4A16, or 8 bits in "
            "floating point (tools/convert_hf_to_fp8.py)."
        )
    flags = ("--input-dir", "--output-dir")
    beside = {"--data-dir": args.data_dir}
    config = config_to_quantize(args.input_dir, args.output_dir, flags=flags, kind="int4", beside=beside)
    reader = SafetensorsReader(args.input_dir, flag="--input-dir")
    has_experts = any(".experts." in name for name in reader.names())
    ignored = EXPERTS_ONLY if has_experts else ("lm_head",)
    more = prediction_layers(reader.names(), config["num_hidden_layers"])
    fmt = Int4Format(args.quant_group_size, True, (*ignored, *more))
    check_shapes(reader, fmt, f"--input-dir {args.input_dir}", "--quant-group-size", "give another size")
    samples = read_samples(args)
    target = HfTarget(
        path=Path(args.output_dir),
        flag="--output-dir",
        assets_from=Path(args.input_dir),
        config=config | {"quantization_config": fmt.config()},
        shard_bytes=args.shard_bytes,
    )
    layers = CalibratedLayers(
        Path(args.input_dir),
        fmt,
        flag="--input-dir",
        read=reader.get,
        infos=reader.infos(),
        samples=samples,
        dampening=args.dampening_frac,
        device=torch.device("cuda" if torch.cuda.is_available() else "cpu"),
        trust_remote_code=args.trust_remote_code,
    )
    write_hf(target, gptq_jobs(reader, fmt, layers, config["num_hidden_layers"]))
    return sum(fmt.quantizes(name) for name in reader.names())


def prediction_layers(names: Sequence[str], num_layers: int) -> list[str]:
    """Rules for `Int4Format.ignored` that name the layers that predict further tokens.

    Samples do not go through these, so they stay as they are, and engines have to know that.
    """
    numbers = {int(match[1]) for name in names if (match := LAYER.match(name))}
    return [rf"re:model\.layers\.{number}\..*" for number in sorted(numbers) if number >= num_layers]


def gptq_jobs(reader: SafetensorsReader, fmt: Int4Format, layers: CalibratedLayers, num_layers: int) -> list[Job]:
    """One job for the quantised weights of each layer, in order, and one for every other tensor."""
    import torch

    from slime.conversion.reader import TensorInfo
    from slime.conversion.writer import Job
    from slime.weights.formats import PACKED, SCALE, SHAPE
    from slime.weights.quantization import pack

    def plain_job(name: str, info: TensorInfo) -> Job:
        return Job({name: info}, lambda: [reader.get(name)])

    infos = reader.infos()
    of_layer: dict[int, list[str]] = defaultdict(list)
    plain: list[Job] = []
    for name, info in infos.items():
        match = LAYER.match(name)
        if match and fmt.quantizes(name):
            of_layer[int(match[1])].append(name)
        else:
            plain.append(plain_job(name, info))

    # Every layer is gone through, also one that has nothing to quantise.
    def layer_job(number: int, names: Sequence[str]) -> Job:
        outputs: dict[str, TensorInfo] = {}
        for name in names:
            (rows, columns), module = infos[name].shape, name.removesuffix("weight")
            outputs[module + PACKED] = TensorInfo(torch.int32, (rows, -(-columns // 8)))
            outputs[module + SCALE] = TensorInfo(infos[name].dtype, (rows, columns // fmt.group_size))
            outputs[module + SHAPE] = TensorInfo(torch.int64, (2,))

        def make() -> list[torch.Tensor]:
            found = layers.quantize(number)
            made = [(pack(found[name][0]), found[name][1], torch.tensor(infos[name].shape)) for name in names]
            return list(itertools.chain.from_iterable(made))

        return Job(outputs, make)

    return plain + [layer_job(number, of_layer[number]) for number in range(num_layers)]


def read_samples(args: argparse.Namespace) -> list[torch.Tensor]:
    """Token ids of the first samples.

    Raises:
        UsageError: there are none, or rows without a text.
    """
    import torch
    from transformers import AutoTokenizer

    from slime.utils.errors import UsageError

    try:
        more = {"trust_remote_code": args.trust_remote_code}
        tokenizer = AutoTokenizer.from_pretrained(args.input_dir, **more)  # nosec B615
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"--input-dir {args.input_dir} has no tokenizer that can be loaded ({error}).") from error
    texts = itertools.islice(read_texts(Path(args.data_dir), tokenizer), args.num_calibration_samples)
    samples = [torch.tensor(tokenizer(text)["input_ids"][: args.max_sequence_length]) for text in texts]
    samples = [ids.long() for ids in samples if ids.numel()]
    if not samples:
        raise UsageError(f"--data-dir {args.data_dir} has no sample; give a .jsonl or .parquet file with rows.")
    return samples


def read_texts(path: Path, tokenizer: Any) -> Iterator[str]:
    """The text of each row: "text", or "prompt" or "messages", through the chat template where they are turns."""
    from slime.utils.errors import UsageError
    from slime.utils.files.rows import read_file

    files = sorted(one for one in path.iterdir() if one.suffix in (".jsonl", ".parquet")) if path.is_dir() else [path]
    for file in files:
        if not file.is_file():
            raise UsageError(f"--data-dir {file}: no such file or directory.")
        for row in read_file(str(file)):
            found = next((row[key] for key in ("text", "prompt", "messages") if row.get(key)), None)
            if found is None:
                raise UsageError(f'{file}: a row has none of "text", "prompt" and "messages"; it has {sorted(row)}.')
            yield found if isinstance(found, str) else tokenizer.apply_chat_template(found, tokenize=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns the exit status."""
    from slime.utils.errors import exit_status

    args = make_parser().parse_args(argv)
    return exit_status(lambda: f"wrote {args.output_dir}: {convert(args)} weights in int4")


if __name__ == "__main__":
    sys.exit(main())
