"""Does the memory plan hold? Tensor bytes that --dry-run estimates beside those that a run allocates, phase by phase.

    python benchmarks/plan_accuracy.py [--only NAME ...] [--output results.json] [--accelerator cpu|cuda]

A Qwen3-shaped model of 108 M parameters, or one of `MODELS` with experts or latent attention (random weights, the
tokenizer of tools/make_tiny_model.py), is trained for one rollout by the trainer that a run uses (Megatron's or
FSDP2's, without Ray), once per case of `CASES`, each in a process of its own. On CPU every allocation and release of
torch's allocator is read from the profiler's memory events, so temporaries inside a kernel count as well; on CUDA
torch.cuda.max_memory_allocated is read. Reported:

    state       weights, gradients and optimizer after the first train step
    log-probs   peak while the forward-only pass runs
    train       peak while the loss, the backward pass and the optimizer run
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MODELS = {
    "dense": "--layers 12 --hidden-size 768 --ffn-size 2304 --heads 12 --kv-heads 4 --vocab-multiple 32768",
    "experts": "--family qwen3_moe --layers 8 --hidden-size 512 --heads 8 --kv-heads 4 --experts 8 "
    "--expert-ffn-size 512 --vocab-multiple 4096",
    "latent": "--family deepseek_v3 --layers 8 --hidden-size 512 --heads 32 --experts 8 --expert-ffn-size 256 "
    "--vocab-multiple 4096",
    "images": "--family qwen3_vl --layers 6 --hidden-size 512 --ffn-size 1536 --heads 8 --kv-heads 4 "
    "--vision-layers 6 --vision-hidden-size 512 --vocab-multiple 4096",
}
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
IMAGES = '--max-tokens-per-gpu 712 --multimodal-keys {{"image":"images"}}'  # two samples, each with its image
CASES = {
    "512 tokens": "--max-tokens-per-gpu 512",
    "1024 tokens": "--max-tokens-per-gpu 1024",
    "1024 tokens, full recompute": f"--max-tokens-per-gpu 1024 {RECOMPUTE}",
    "1024 tokens, chunks of 128": "--max-tokens-per-gpu 1024 --log-probs-chunk-size 128",
    "1024 tokens, deferred logits": "--max-tokens-per-gpu 1024 --recompute-loss-function --log-probs-chunk-size 128",
    "512 tokens, KL loss": "--max-tokens-per-gpu 512 --use-kl-loss --kl-loss-coef 0.1 --ref-load {model}",
    "static, 2 samples, selective": "--micro-batch-size 2 --recompute-granularity selective",
    "512 tokens, FSDP2": "--max-tokens-per-gpu 512 --train-backend fsdp",
    "1024 tokens, FSDP2, full recompute": "--max-tokens-per-gpu 1024 --train-backend fsdp "
    "--recompute-granularity full",
    "1024 tokens, FSDP2, deferred logits": "--max-tokens-per-gpu 1024 --train-backend fsdp "
    "--recompute-loss-function --log-probs-chunk-size 128",
    "experts, 1024 tokens": "--max-tokens-per-gpu 1024 --moe-token-dispatcher-type alltoall",
    "images, 712 tokens": IMAGES,
    "images, FSDP2, a frozen tower": f"{IMAGES} --train-backend fsdp --freeze-vision-tower",
    "images, FSDP2, full recompute": f"{IMAGES} --train-backend fsdp --recompute-granularity full",
    "latent, 1024 tokens": "--max-tokens-per-gpu 1024 --moe-token-dispatcher-type alltoall",
}
"""Name -> flags; a name that begins with that of a model is that model's, others the first's."""
IMAGE_SIDE = 10  # Tokens of an image, in each direction
PROMPT, LENGTHS = 32, (288, 224)  # two samples fill the smaller budget; they differ, as those of a run do
SAMPLES = 8
TARGETS = {"state": 0.10, "log-probs": 0.25, "train": 0.25}
MARK = "plan:"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(CASES), help="these cases alone")
    parser.add_argument("--accelerator", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--output", type=Path, help="also write the table as JSON")
    parser.add_argument("--case", nargs=2, metavar=("NAME", "DIR"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        name, work = options.case
        print(json.dumps(run_case(name, Path(work), options.accelerator)))
        sys.stdout.flush()
        os._exit(0)  # gloo's threads need no farewell
    with tempfile.TemporaryDirectory() as work:
        rows = compare(Path(work), options)
    if options.output:
        options.output.write_text(json.dumps(rows, indent=1))
    return int(any(abs(row["ratio"] - 1) > TARGETS[row["phase"]] for row in rows))


def compare(work: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run every case and print the table; a ratio is estimate / measured."""
    for name, sizes in MODELS.items():
        command = [sys.executable, f"{ROOT}/tools/make_tiny_model.py", "--output", f"{work}/{name}", *sizes.split()]
        subprocess.run(command, check=True)
    (work / "prompts.jsonl").write_text('{"input": "1+1=", "label": "2"}\n')
    rows = []
    print(f"{'case':34}{'phase':12}{'estimate, MiB':>15}{'measured, MiB':>15}{'ratio':>8}")
    for name in options.only or CASES:
        command = [sys.executable, __file__, "--accelerator", options.accelerator, "--case", name, str(work)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        for phase, (estimate, measured) in json.loads(done.stdout.splitlines()[-1]).items():
            ratio = estimate / measured
            rows.append({"case": name, "phase": phase, "estimate": estimate, "measured": measured, "ratio": ratio})
            print(f"{name:34}{phase:12}{estimate / 2**20:15.1f}{measured / 2**20:15.1f}{ratio:8.3f}", flush=True)
    return rows


def run_case(name: str, work: Path, accelerator: str) -> dict[str, tuple[float, float]]:
    """Estimate and measure one case in this process: phase -> (estimate, measured), bytes."""
    sys.path.insert(0, str(ROOT))
    from slime.config.parse import parse_args

    model = work / next((name_of for name_of in MODELS if name.startswith(name_of)), "dense")
    flags = (
        f"--hf-checkpoint {model} --model-args-from-hf --accelerator {accelerator} --debug-train-only "
        f"--prompt-data {work}/prompts.jsonl --label-key label --rm-type math --num-rollout 2 "
        f"--rollout-batch-size {SAMPLES} --rollout-max-response-len {max(LENGTHS) - PROMPT} "
        f"--rollout-max-prompt-len {PROMPT + IMAGE_SIDE**2 * ('images' in name)} "
        "--rollout-function-path slime.rollout.sft_rollout.generate_rollout "
        f"--actor-num-gpus-per-node 1 --recompute-old-log-probs --output-dir {work}/out " + CASES[name]
    ).format(model=model)
    if "--max-tokens-per-gpu" in flags:
        flags += " --use-dynamic-batch-size"
    args = parse_args(argv=flags.split())
    estimates = estimate(args)
    measured = measure(args)
    return {phase: (estimates[phase], measured[phase]) for phase in measured}


def estimate(args: Any) -> dict[str, float]:
    """What the plan says, by phase."""
    from slime.plan import Facts, make_plan
    from slime.plan.layout import DataFacts
    from slime.ray.driver import tower_of

    length, images = args.rollout_max_prompt_len, IMAGE_SIDE**2 if args.multimodal_keys else 0
    data = DataFacts(SAMPLES, SAMPLES, length, length, images)
    trainer = make_plan(args, Facts(tower=tower_of(args.hf_checkpoint), data=data)).trainer_memory
    assert trainer is not None
    stage = trainer.stages[0]
    # A reference's weights lie in host memory: without a GPU that is the same memory.
    state = stage.state + (stage.host_copies if args.accelerator == "cpu" else 0)
    return {"state": state, "log-probs": stage.log_probs_peak, "train": stage.train_peak}


def measure(args: Any) -> dict[str, float]:
    """What a run allocates, by phase: two rollouts of `SAMPLES` samples on one rank."""
    meter = CudaMeter() if args.accelerator == "cuda" else CpuMeter()
    with meter.whole():
        actor = start_trainer(args)
        actor.train_on(0, train_share(args))
        meter.note("state")
        watch(meter, actor)  # from the second rollout on the optimizer's state is there in every phase
        actor.train_on(1, train_share(args))
    found = meter.bytes_by_phase()
    return {"state": found["state"][0], "log-probs": found["log-probs"][1], "train": found["train"][1]}


def start_trainer(args: Any) -> Any:
    """The trainer of a run, as rank 0 of one."""
    from slime.ray.train_actor import TRAINERS
    from slime.utils.misc import load_function

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    make = load_function(TRAINERS[args.train_backend]["actor"])
    actor = make(args, rank=0, world_size=1, master_addr="127.0.0.1", master_port=port)
    actor.init()
    return actor


def watch(meter: Any, trainer: Any) -> None:
    """Let the meter see the phases of `train_on`."""
    if trainer.args.train_backend == "fsdp":
        backend = trainer.backend
        backend.forward = meter.around(backend.forward, "log-probs")
        backend.update = meter.around(backend.update, "train")
        return
    from slime.backends.megatron_utils import actor

    for function, phase in (("compute_log_probs", "log-probs"), ("train_one_step", "train")):
        setattr(actor, function, meter.around(getattr(actor, function), phase))


def train_share(args: Any) -> dict[str, Any]:
    """The only rank's share of a rollout of random tokens."""
    from slime.ray.rollout.shares import split_train_data

    rng = random.Random(0)
    tokens = [[rng.randrange(100) for _ in range(LENGTHS[i % len(LENGTHS)])] for i in range(SAMPLES)]
    responses = [len(sample) - PROMPT for sample in tokens]
    data = {
        "tokens": tokens,
        "response_lengths": responses,
        "loss_masks": [[1] * length for length in responses],
        "rewards": [rng.gauss(0, 1) for _ in tokens],
        "raw_reward": [0.0] * SAMPLES,
        "truncated": [0] * SAMPLES,
        "sample_indices": list(range(SAMPLES)),
        "rollout_ids": list(range(SAMPLES)),
        "rollout_mask_sums": responses,
        "rollout_log_probs": [[-5.0] * length for length in responses],
    }
    if args.multimodal_keys:
        add_images(args, data)
    return split_train_data(args, data, {"dp_size": 1, "cp_size": 1})[0]


def add_images(args: Any, data: dict[str, Any]) -> None:
    """Put an image into the prompt of each sample, one of its own."""
    import numpy as np

    config = json.loads(Path(args.hf_checkpoint, "config.json").read_text())
    vision, count = config["vision_config"], IMAGE_SIDE**2
    side, size = 2 * IMAGE_SIDE, 3 * vision["temporal_patch_size"] * vision["patch_size"] ** 2
    for tokens in data["tokens"]:
        tokens[1:1] = [config["image_token_id"]] * count
    data["image_spans"] = [[[1, count]] for _ in data["tokens"]]
    data["multimodal_train_inputs"] = [
        {
            "pixel_values": np.full((side**2, size), i / SAMPLES, dtype=np.float32),
            "image_grid_thw": np.array([[1, side, side]]),
        }
        for i in range(SAMPLES)
    ]


class CpuMeter:
    """Reads every allocation of torch's CPU allocator from the profiler, where phases are marked ranges."""

    def __init__(self) -> None:
        import torch

        self._record = torch.profiler.record_function
        self._profiler = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=False
        )

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Everything that is to be counted happens inside, the model's construction too."""
        with self._profiler:
            yield

    def around(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        """The function, as a phase."""

        def measured(*args: Any, **keywords: Any) -> Any:
            with self._record(MARK + phase):
                return function(*args, **keywords)

        return measured

    def note(self, name: str) -> None:
        """Mark this moment."""
        with self._record(MARK + name):
            pass

    def bytes_by_phase(self) -> dict[str, tuple[int, int]]:
        """Phase -> (bytes live at its start, most bytes live within it)."""
        events = self._profiler.profiler.kineto_results.events()
        changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
        marks = [(e.name().removeprefix(MARK), e.start_ns(), e.end_ns()) for e in events if e.name().startswith(MARK)]
        found: dict[str, tuple[int, int]] = {}
        for phase, start, end in marks:
            live = sum(size for when, size in changes if when < start)
            running = accumulate((size for when, size in changes if start <= when <= end), initial=live)
            found[phase] = (live, max(max(running), found.get(phase, (0, 0))[1]))
        return found


class CudaMeter:
    """The same from CUDA's caching allocator."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[int, int]] = {}

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Nothing to prepare."""
        yield

    def around(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        """The function, as a phase."""
        from torch import cuda

        def measured(*args: Any, **keywords: Any) -> Any:
            cuda.synchronize()
            cuda.reset_peak_memory_stats()
            live = cuda.memory_allocated()
            result = function(*args, **keywords)
            cuda.synchronize()
            peak = max(cuda.max_memory_allocated(), self._found.get(phase, (0, 0))[1])
            self._found[phase] = (live, peak)
            return result

        return measured

    def note(self, name: str) -> None:
        """Mark this moment."""
        from torch import cuda

        self._found[name] = (cuda.memory_allocated(), 0)

    def bytes_by_phase(self) -> dict[str, tuple[int, int]]:
        """Phase -> (bytes live at its start, most bytes live within it)."""
        return self._found


if __name__ == "__main__":
    sys.exit(main())
