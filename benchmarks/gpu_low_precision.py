"""Training in fp8 and with weights rounded to int4, on one Hopper GPU: are its numbers right, and what does it cost?

    python benchmarks/gpu_low_precision.py --part check                 products against float64, and their speeds
    python benchmarks/gpu_low_precision.py --part deep_gemm             the products of linear_fc1 by another library
    python benchmarks/gpu_low_precision.py --part step --shape 4B:16    a train step: bf16, fp8 forward pass, fp8
    python benchmarks/gpu_low_precision.py --part gap --mode fp8        one run; also bf16-for-fp8, int4, bf16-for-int4
    python benchmarks/gpu_low_precision.py --part learn                 the loss of a model that learns sums
    python benchmarks/gpu_low_precision.py --part check --tiny          on the CPU: shows that a part works

`check` compares quantisers with those of slime.weights byte for byte, and the three products of a linear layer with
float64 products of the same rounded values, then times them at the four linear layers of Qwen3-4B.

`step` is benchmarks/gpu_train_step.py once for each precision, in one call, with the kernels that take longest.
Target: fp8 at least 1.2 times as fast as bf16. The forward pass alone in fp8 needs the package sgl-deep-gemm.

`gap` is a short colocated GRPO run of the 0.6B shape with random weights, whose engine has a checkpoint in fp8 or
int4. It reads train/train_rollout_logprob_abs_diff. Target, over both runs of a pair: the trainer that rounds is no
farther from the engine than the one in bf16.

`learn` trains the 0.6B shape with eight layers, from random weights, to write sums (supervised, no engine), in bf16
with two seeds and in fp8 with the first. Target: the last losses differ by no more than those of the two seeds do, or
by 2%.
"""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_models import prepare_model, run_python  # noqa: E402
from benchmarks.gpu_runs import (  # noqa: E402
    Row,
    Run,
    colocated,
    grpo_flags,
    make_parser,
    not_measured,
    parse_options,
    report,
    run_train,
    series_of,
)
from slime.backends.megatron_utils.layers.fp8_linears import (  # noqa: E402
    Fp8Products,
    multiply,
    quantized,
    quantized_weight,
    rows_per_scale,
)
from slime.backends.megatron_utils.layers.rounded_linear import Int4Weights  # noqa: E402
from slime.config.megatron.precision.fp8_training_plan import FLAGS  # noqa: E402
from slime.config.megatron.precision.int4_plan import FLAG as INT4_FLAG  # noqa: E402
from slime.weights.quantization import dequantize, quantize_blocks, quantize_rows  # noqa: E402

LINEARS = {
    "linear_qkv": (6144, 2560),
    "linear_proj": (2560, 4096),
    "linear_fc1": (19456, 2560),
    "linear_fc2": (2560, 9728),
}
"""Rows and columns of the weights of a layer of Qwen3-4B."""
TOKENS = 16384
FASTER = 1.2
GAP = "train/train_rollout_logprob_abs_diff"
PRECISIONS = ["bf16", "fp8", "fp8 forward"]
MODES = {"fp8": "fp8", "bf16-for-fp8": "fp8", "int4": "int4", "bf16-for-int4": "int4"}
"""Name of a run of `gap` -> number format of the checkpoint that its engine serves."""
GROUP_SIZE = 128


def main() -> None:
    parser = make_parser(__doc__, "gpu_low_precision")
    parser.add_argument("--part", choices=["check", "deep_gemm", "step", "gap", "learn"], required=True)
    parser.add_argument("--only", nargs="+", choices=PRECISIONS, default=PRECISIONS, help="of step; bf16 is the base")
    parser.add_argument("--shape", default="4B:16", help="of step: a shape of gpu_train_step.py, and how many layers")
    parser.add_argument("--layout", default="", help="of step: more flags of train.py, of all precisions")
    parser.add_argument("--mode", nargs="+", choices=list(MODES), default=list(MODES), help="of gap")
    parser.add_argument("--steps", type=int, default=120, help="of learn: updates of a run")
    options = parse_options(parser)
    options.output.mkdir(parents=True, exist_ok=True)
    options.benchmark += f"-{options.part}" + (f"-{options.shape}" if options.part == "step" else "")
    parts = {"check": check, "deep_gemm": deep_gemm, "step": step, "gap": gap, "learn": learn}
    rows = parts[options.part](options)
    sys.exit(report(list(rows), options))


# ---- check


def normal(*shape: int, device: str, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).bfloat16().to(device)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference over that of what is expected."""
    difference = found.double().cpu() - expected.double().cpu()
    return float(difference.norm() / expected.double().cpu().norm())


def check(options: Namespace) -> Iterator[Row]:
    """Numbers, then speeds."""
    device = options.accelerator
    checks: dict[str, Callable[[str], Row]] = {
        "quantisers": check_quantisers,
        "products": check_products,
        "a linear layer": check_linear,
        "int4 rounding": check_int4,
    }
    for what, row_of in checks.items():
        yield guarded(what, functools.partial(row_of, device))
    if device == "cuda":
        for name in LINEARS:
            yield guarded(f"speed of {name}", functools.partial(speed, name))


def guarded(what: str, row_of: Callable[[], Row]) -> Row:
    """A row; one that says so where what it measures failed, so that the others are still measured."""
    try:
        row = row_of()
    except Exception as error:  # of a kernel: its message says what it did not take
        row = not_measured(what, "", "", f"{type(error).__name__}: {' '.join(str(error).split())[:600]}")
    print(f"{row.what}: {row.figure} {row.note}", flush=True)
    return row


def check_quantisers(device: str) -> Row:
    matrix = normal(1000, 1280, device=device) * torch.logspace(-4, 4, 1000, device=device)[:, None].bfloat16()
    padded = torch.nn.functional.pad(matrix.cpu(), (0, 0, 0, 24))
    weight = normal(768, 1280, device=device, seed=1)
    along_rows, along_columns = quantized(matrix, rows=True, columns=True)
    pairs = [(along_rows, quantize_rows(padded, 128)), (along_columns, quantize_rows(padded.t(), 128))]
    for is_ue8m0 in (False, True):
        values, scales = quantize_blocks(weight.cpu(), (128, 128), ue8m0=is_ue8m0)
        pairs.append((quantized_weight(weight, is_ue8m0=is_ue8m0), (values, scales)))
        turned = quantized_weight(weight, is_ue8m0=is_ue8m0, transposed=True)
        pairs.append((turned, (values.t(), scales.t())))
    differ = [
        int((one.view(torch.uint8).cpu() != other.contiguous().view(torch.uint8)).sum())
        for found, expected in pairs
        for one, other in ((found[0], expected[0]), (found[1].contiguous(), expected[1]))
    ]
    return Row(
        "quantisers: bytes other than those of slime.weights on the CPU", "1000 x 1280 and 768 x 1280",
        str(sum(differ)), "", None, "0", not any(differ), f"by tensor: {differ}",
    )  # fmt: skip


def check_products(device: str) -> Row:
    """The three kinds of operands that cuBLAS has, into both types."""
    tokens, weight = normal(512, 1280, device=device), normal(768, 1280, device=device, seed=1)
    along_rows, along_columns = quantized(tokens, rows=True, columns=True)
    _, other_columns = quantized(normal(512, 384, device=device, seed=2), columns=True)
    gradient, _ = quantized(normal(512, 768, device=device, seed=3), rows=True)
    kinds = {
        "tokens x weight": (along_rows, quantized_weight(weight, is_ue8m0=False)),
        "grad x weight": (gradient, quantized_weight(weight, is_ue8m0=False, transposed=True)),
        "columns x columns": (along_columns, other_columns),
    }
    found = {}
    for name, (left, right) in kinds.items():
        sides = [dequantize(x.values.cpu(), x.scales.cpu(), (rows_per_scale(x), 128)) for x in (left, right)]
        exact = sides[0].double() @ sides[1].double().t()
        for dtype in (torch.float32, torch.bfloat16):
            try:
                figure = relative(multiply(left, right, dtype), exact)
            except Exception as error:  # say which one cuBLAS does not take
                raise RuntimeError(f"{name} into {dtype}: {error}") from error
            found[f"{name} {str(dtype).removeprefix('torch.')}"] = figure
    note = ", ".join(f"{name} {figure:.1e}" for name, figure in found.items())
    worst = max(found.values())
    return Row("products of e4m3, relative to float64", "512 x 768 x 1280", f"{worst:.1e}", "", worst, "< 4e-3",
               worst < 4e-3, note)  # fmt: skip


def check_linear(device: str) -> Row:
    """Output and gradients on the device beside those of the CPU's emulation; and how far they are from bf16's."""
    rows, grad = normal(300, 1280, device=device), normal(300, 768, device=device, seed=1)
    weight = torch.nn.Parameter(normal(768, 1280, device=device, seed=2))

    def results(place: str) -> list[torch.Tensor]:
        x, g, w = rows.to(place), grad.to(place), torch.nn.Parameter(weight.detach().to(place))
        products, buffer = Fp8Products(False), torch.ones(768, 1280, device=place)
        of_input, of_weight = products.gradients(g, w)
        of_weight(x, buffer)
        return [products.product(x, w), of_input, buffer - 1]

    exact = [rows @ weight.t(), grad @ weight, grad.t() @ rows]
    near = [relative(a, b) for a, b in zip(results(device), results("cpu"), strict=True)]
    far = [relative(a.detach(), b.detach()) for a, b in zip(results(device), exact, strict=True)]
    note = "off bf16's by " + ", ".join(f"{figure:.3f}" for figure in far)
    return Row(
        "a linear layer, relative to the CPU's emulation", "300 x 768 x 1280",
        ", ".join(f"{figure:.1e}" for figure in near), "", max(near), "< 4e-3", max(near) < 4e-3, note,
    )  # fmt: skip


def check_int4(device: str) -> Row:
    weight = normal(256, 1024, device=device)
    differ = [
        int((Int4Weights(size)._rounded(weight).cpu() != Int4Weights(size)._rounded(weight.cpu())).sum())
        for size in (32, 128)
    ]
    return Row("int4: values other than on the CPU, groups of 32 and 128", "256 x 1024", str(differ), "", None, "0",
               not any(differ))  # fmt: skip


def milliseconds(function: Callable[[], Any], repeats: int = 20) -> float:
    """Time one call on the device: the median of three series."""
    for _ in range(3):
        function()
    series = []
    for _ in range(3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repeats):
            function()
        end.record()
        torch.cuda.synchronize()
        series.append(begin.elapsed_time(end) / repeats)
    return statistics.median(series)


def speed(name: str) -> Row:
    """All three products of a linear layer with what quantises for them, beside bf16's."""
    size = LINEARS[name]
    rows, grad = (torch.randn(TOKENS, width, device="cuda", dtype=torch.bfloat16) for width in reversed(size))
    weight = torch.nn.Parameter(torch.randn(size, device="cuda", dtype=torch.bfloat16))
    buffer, products = torch.zeros(size, device="cuda"), Fp8Products(False)
    plain = weight.detach()
    of_rows, of_columns = quantized(rows, rows=True, columns=True)
    grad_rows, grad_columns = quantized(grad, rows=True, columns=True)
    turned = quantized_weight(weight, is_ue8m0=False, transposed=True)
    straight = quantized_weight(weight, is_ue8m0=False)

    def backward() -> None:
        _, of_weight = products.gradients(grad, weight)
        of_weight(rows, buffer)

    parts = {
        "bf16 out": lambda: rows @ plain.t(),
        "bf16 dx": lambda: grad @ plain,
        "bf16 dw": lambda: torch.addmm(buffer, grad.t(), rows, out_dtype=torch.float32, out=buffer),
        "fp8 out": lambda: multiply(of_rows, straight, torch.bfloat16),
        "fp8 dx": lambda: multiply(grad_rows, turned, torch.bfloat16),
        "fp8 dw": lambda: multiply(grad_columns, of_columns, torch.float32),
        "quantise input": lambda: quantized(rows, rows=True),
        "quantise weight": lambda: quantized_weight(weight, is_ue8m0=False),
        "quantise grad": lambda: quantized(grad, rows=True, columns=True),
        "turn weight": lambda: quantized_weight(weight, is_ue8m0=False, transposed=True),
        "turn input": lambda: quantized(rows, columns=True),
        "all fp8 forward": lambda: products.product(rows, plain),
        "all fp8 backward": backward,
    }
    with torch.no_grad():
        taken = {part: milliseconds(function) for part, function in parts.items()}
    bf16 = sum(taken[part] for part in ("bf16 out", "bf16 dx", "bf16 dw"))
    fp8 = taken["all fp8 forward"] + taken["all fp8 backward"]
    note = ", ".join(f"{part} {duration:.3f}" for part, duration in taken.items())
    return Row(f"{name}: forward and backward, bf16 / fp8", f"{TOKENS} tokens, {size[0]} x {size[1]}",
               f"{fp8:.2f} ms", f"{bf16:.2f} ms", bf16 / fp8, f">= {FASTER}", bf16 / fp8 >= FASTER, note)  # fmt: skip


# ---- deep_gemm


def deep_gemm(options: Namespace) -> Iterator[Row]:
    """The products of linear_fc1 by DeepGEMM (sgl-deep-gemm), beside cuBLAS's: would training gain by it?"""
    if options.tiny:
        yield not_measured("products by DeepGEMM", "", "", "it needs a Hopper GPU")
        return
    yield guarded("products by DeepGEMM", deep_gemm_row)


def deep_gemm_row() -> Row:
    import deep_gemm as library

    rows_of, columns_of = LINEARS["linear_fc1"]
    rows, grad = (torch.randn(TOKENS, width, device="cuda").bfloat16() for width in (columns_of, rows_of))
    weight = torch.randn(rows_of, columns_of, device="cuda").bfloat16()
    of_rows, of_columns = quantized(rows, rows=True, columns=True)
    grad_rows, grad_columns = quantized(grad, rows=True, columns=True)
    straight = quantized_weight(weight, is_ue8m0=False)
    turned = quantized_weight(weight, is_ue8m0=False, transposed=True)
    output, of_input = torch.empty_like(grad), torch.empty_like(rows)
    buffer = torch.zeros(rows_of, columns_of, device="cuda")

    def add_weight_gradient() -> None:
        library.fp8_gemm_nt(tuple(grad_columns), tuple(of_columns), buffer, c=buffer, recipe=(1, 1, 128))

    add_weight_gradient()
    wrong = {"dw": relative(buffer, multiply(grad_columns, of_columns, torch.float32))}
    library.fp8_gemm_nt(tuple(of_rows), (straight[0], straight[1].contiguous()), output)
    wrong["out"] = relative(output, multiply(of_rows, straight, torch.bfloat16))
    library.fp8_gemm_nt(tuple(grad_rows), (turned[0], turned[1].contiguous()), of_input)
    wrong["dx"] = relative(of_input, multiply(grad_rows, turned, torch.bfloat16))
    parts = {
        "out": lambda: library.fp8_gemm_nt(tuple(of_rows), (straight[0], straight[1].contiguous()), output),
        "dx": lambda: library.fp8_gemm_nt(tuple(grad_rows), (turned[0], turned[1].contiguous()), of_input),
        "dw": add_weight_gradient,
        "cuBLAS out": lambda: multiply(of_rows, straight, torch.bfloat16),
        "cuBLAS dx": lambda: multiply(grad_rows, turned, torch.bfloat16),
        "cuBLAS dw": lambda: buffer.add_(multiply(grad_columns, of_columns, torch.float32)),
    }
    taken = {part: milliseconds(function) for part, function in parts.items()}
    ours, theirs = (sum(taken[prefix + part] for part in ("out", "dx", "dw")) for prefix in ("cuBLAS ", ""))
    note = ", ".join(f"{part} {duration:.3f}" for part, duration in taken.items())
    note += "; off cuBLAS's by " + ", ".join(f"{part} {figure:.1e}" for part, figure in wrong.items())
    return Row("linear_fc1, three products in fp8: cuBLAS / DeepGEMM", f"{TOKENS} tokens", f"{theirs:.2f} ms",
               f"{ours:.2f} ms", ours / theirs, "", max(wrong.values()) < 4e-3, note)  # fmt: skip


# ---- step


def step(options: Namespace) -> Iterator[Row]:
    """One train step in each precision."""
    shape = "tiny" if options.tiny else options.shape
    layers = 2 if options.tiny else int(shape.partition(":")[2] or 36)
    numbers = " ".join(map(str, range(layers)))
    forward = f"--megatron-deepgemm-forward-layers {numbers}"
    layouts = {"bf16": "", "fp8": FLAGS, "fp8 forward": forward}
    layouts = {name: flags for name, flags in layouts.items() if name in options.only}
    if options.tiny:
        layouts = {"bf16": ""}  # the others need a GPU
    baseline: dict[str, float] = {}
    for name, flags in layouts.items():
        found, output = train_step(name, shape, f"{flags} {options.layout}", options)
        what, target = f"train step, {name}", f">= {FASTER}" if name == "fp8" else ""
        if found is None:
            yield not_measured(what, shape, target, " ".join(output.split())[-500:])
            continue
        baseline = baseline or found
        ratio = baseline["train"] / found["train"]
        holds = ratio >= FASTER if name == "fp8" else True
        note = f"whole {found['whole']:.3f} s, peak memory {found['memory_gib']:.1f} GiB"
        yield Row(what, f"{shape}, {found['tokens']:.0f} tokens", f"{found['train']:.3f} s",
                  f"{baseline['train']:.3f} s", ratio, target, holds, note)  # fmt: skip


def train_step(name: str, shape: str, layout: str, options: Namespace) -> tuple[dict[str, float] | None, str]:
    """Run gpu_train_step.py; its figures, and what it printed, which is also kept in a file."""
    result = options.output / f"step-{shape}-{name.replace(' ', '-')}.json"
    result.unlink(missing_ok=True)
    command = [sys.executable, ROOT / "benchmarks/gpu_train_step.py", "--shape", shape, "--layout", layout]
    command += ["--accelerator", options.accelerator, "--steps", 2 if options.tiny else 4, "--result", result]
    command += ["--tokens", 2048 if options.tiny else TOKENS, "--profile", 14]
    if options.accelerator == "cuda" and "forward" in name:
        command.append("--fp8-checkpoint")
    log = result.with_suffix(".txt")
    with log.open("w") as file:
        line = list(map(str, command))
        process = subprocess.Popen(line, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            process.wait(options.timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its ranks are processes of their own
    text = log.read_text(errors="replace")
    print(text[-6000:], flush=True)
    return (json.loads(result.read_text()) if result.is_file() else None), text


# ---- gap


def gap(options: Namespace) -> Iterator[Row]:
    """The log-prob gap of each run; a pair is judged with its second."""
    for mode in options.mode:
        if options.tiny and mode == "fp8":
            continue  # it needs a GPU
        yield gap_row(mode, options)


def gap_row(mode: str, options: Namespace) -> Row:
    kind, model = MODES[mode], "tiny" if options.tiny else "0.6B"
    source = prepare_model(model, options.output / "models", device=options.accelerator)
    quantised = quantised_model(source, kind, options)
    prompts, samples, response = (2, 2, 16) if options.tiny else (16, 8, 256)
    more = [*colocated(options, tokens=16384, engine_share=0.4), "--ref-load", source]
    if mode == "fp8":
        more += FLAGS.split()
    if mode == "int4":
        more += ["--train-env-vars", json.dumps({INT4_FLAG: "1"})]
    flags = grpo_flags(prompts=prompts, samples=samples, response=response, rollouts=3, more=more)
    run = Run(f"gap-{mode}", str(quantised), flags)
    what, shape = f"train / rollout log-prob gap, {kind} engine, trainer {mode.partition('-')[0]}", model
    if not run_train(run, options):
        return not_measured(what, shape, "", "the run did not end well")
    values = [value for _, value in sorted(series_of(run, options).get(GAP, {}).items())]
    other = Run(f"gap-bf16-for-{kind}", str(quantised), ())
    plain = [value for _, value in sorted(series_of(other, options).get(GAP, {}).items())]
    mean = statistics.mean(values)
    if mode == kind and plain:
        limit = statistics.mean(plain)
        return Row(what, shape, f"{mean:.5f}", f"{limit:.5f}", mean / limit, "<= 1", mean <= limit, f"{values}")
    return Row(what, shape, f"{mean:.5f}", "", None, "", True, f"{values}")


def quantised_model(source: Path, kind: str, options: Namespace) -> Path:
    """An HF directory of the same weights in fp8 or int4."""
    folder = options.output / "models" / f"{source.name}-{kind}"
    if not (folder / "config.json").is_file():
        if kind == "fp8":
            more = ["--block-size", "16", "16"] if options.tiny else []
            run_python("tools/convert_hf_to_fp8.py", "--model-dir", str(source), "--save-dir", str(folder), *more)
        else:
            size = "16" if options.tiny else str(GROUP_SIZE)
            line = ["--model-dir", str(source), "--save-dir", str(folder), "--group-size", size]
            run_python("tools/convert_hf_to_int4_direct.py", *line)
    return folder


# ---- learn


def learn(options: Namespace) -> Iterator[Row]:
    """The last losses of supervised runs."""
    model = prepare_model("tiny" if options.tiny else "0.6B:8", options.output / "models", device=options.accelerator)
    data = write_sums(options.output / "sums.jsonl", 16 if options.tiny else 64, options.steps)
    losses: dict[str, list[float]] = {}
    kinds = {"bf16": ("1234", []), "fp8": ("1234", FLAGS.split()), "bf16, another seed": ("4321", [])}
    if options.tiny:
        kinds.pop("fp8")  # it needs a GPU
    for name, (seed, more) in kinds.items():
        batch = 16 if options.tiny else 64
        flags = [
            "--prompt-data", data, "--input-key", "messages", "--debug-train-only", "--num-rollout", options.steps,
            "--rollout-function-path", "slime.rollout.sft_rollout.generate_rollout", "--loss-type", "sft_loss",
            "--rollout-batch-size", batch, "--global-batch-size", batch, "--lr", "3e-4", "--lr-decay-style",
            "constant", "--use-dynamic-batch-size", "--max-tokens-per-gpu", 16384,
            "--rollout-shuffle", "--rollout-seed", seed,
            "--calculate-per-token-loss", "--disable-compute-advantages-and-returns", *more,
        ]  # fmt: skip
        run = Run(f"learn-{name.replace(', ', '-').replace(' ', '-')}", str(model), tuple(map(str, flags)))
        run_train(run, options)
        losses[name] = [value for _, value in sorted(series_of(run, options).get("train/loss", {}).items())]
    final = {name: statistics.mean(found[-10:]) for name, found in losses.items() if len(found) >= 10}
    note = "; ".join(f"{name}: {' '.join(f'{v:.3f}' for v in found[:: max(1, len(found) // 12)])}"
                     for name, found in losses.items())  # fmt: skip
    if final.keys() != kinds.keys():
        yield not_measured("loss of the last 10 updates", model.name, "", note)
        return
    noise = max(abs(final["bf16"] - final["bf16, another seed"]), 0.02 * final["bf16"])
    figure, limit = final.get("fp8", final["bf16"]), final["bf16"]
    yield Row("loss of the last 10 updates, fp8 beside bf16", f"{model.name}, {options.steps} updates",
              f"{figure:.4f}", f"{limit:.4f}", figure / limit, f"within {noise:.4f}", abs(figure - limit) <= noise,
              note)  # fmt: skip


def write_sums(path: Path, batch: int, steps: int) -> Path:
    """Conversations of a sum and its answer, `batch` for each step."""
    rng = random.Random(0)
    with path.open("w") as file:
        for _ in range(batch * steps):
            a, b = rng.randrange(1000), rng.randrange(1000)
            turns = [{"role": "user", "content": f"{a}+{b}="}, {"role": "assistant", "content": str(a + b)}]
            file.write(json.dumps({"messages": turns}) + "\n")
    return path


if __name__ == "__main__":
    main()
