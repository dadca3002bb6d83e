"""Tokens per second and MFU of the trainer on CUDA: log-prob pass and train step of Qwen3 shapes, random weights.

    python benchmarks/gpu_train_step.py --shape 0.6B --layout "" [--layout "--tensor-model-parallel-size 2 ..."]
    python benchmarks/gpu_train_step.py --shape 4B --num-gpus 4 --profile 30
    python benchmarks/gpu_train_step.py --layout "--train-backend fsdp"        # compared by benchmarks/gpu_fsdp.py

The trainer is the one of a run (with the flags that train.py takes), without Ray and engines; each
rank is a process. A step is one optimizer update on `--tokens` packed tokens per data-parallel rank, in sequences of
`--length`. The first steps are warm-up; the median of the others counts: the whole by the wall clock with the device
drained before and after, its parts by the trainer's own timers, which are CUDA events on a GPU (behind each, the
fastest and the slowest step: of a rank that waits for its host they are far apart). MFU = FLOPs of the model's matrix
products (3 x forward, causal attention, logits of responses alone; recomputation does not count) / time / GPUs, beside
the bf16 matmul rate that the same GPU reaches in the same process (8192^3).

Only the loading of weights is replaced: random ones take the same time.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 128, "num_key_value_heads": 8,
         "rms_norm_eps": 1e-6, "vocab_size": 151936, "hidden_act": "silu", "max_position_embeddings": 40960,
         "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}  # fmt: skip
MOE = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "num_experts_per_tok": 8,
       "norm_topk_prob": True, "tie_word_embeddings": False}  # fmt: skip
SHAPES: dict[str, dict[str, object]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8},
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    # Qwen3-30B-A3B with 4 of its 48 layers, and the same for the CPU
    "30B-A3B": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 4, "num_attention_heads": 32,
                "num_key_value_heads": 4, **MOE, "num_experts": 128, "moe_intermediate_size": 768},
    "tiny-moe": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8,
                 **MOE, "num_experts": 16, "moe_intermediate_size": 32},
}  # fmt: skip
WARM_UP = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="0.6B", help=f"{', '.join(SHAPES)}; 4B:16 is the first 16 layers of 4B")
    parser.add_argument("--fp8-checkpoint", action="store_true", help="the config says that engines run in fp8")
    parser.add_argument("--num-gpus", type=int, default=1)
    parser.add_argument("--layout", default="", help="more flags of train.py: parallel sizes, recomputation")
    parser.add_argument("--tokens", type=int, default=16384, help="of a data-parallel rank and step")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of it that are prompt")
    parser.add_argument("--all-logits", action="store_true", help="of prompts, too, as before 2026-11-27 (Megatron)")
    parser.add_argument("--micro-batch-tokens", type=int, nargs="+", default=[16384], help="one size after the other")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--profile", type=int, default=0, help="print so many of the most expensive kernels of a step")
    parser.add_argument("--accelerator", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--result", type=Path, help="also write the figures, of the last size, to this JSON file")
    parser.add_argument("--rank", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--meet", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        run_rank(options)
        return
    with tempfile.TemporaryDirectory() as work:
        write_config(Path(work), options.shape, options.fp8_checkpoint)
        sys.exit(start_ranks(work))


def write_config(work: Path, shape: str, is_fp8: bool = False) -> None:
    """An HF directory with the shape's config.json and a tokenizer, without its weights."""
    name, _, layers = shape.partition(":")
    config = QWEN3 | SHAPES[name] | ({"num_hidden_layers": int(layers)} if layers else {})
    if is_fp8:
        config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    subprocess.run([sys.executable, ROOT / "tools/make_tiny_model.py", "--output", work / "model"], check=True)
    (work / "model" / "config.json").write_text(json.dumps(config))
    (work / "prompts.jsonl").write_text('{"input": "1+1=", "label": "2"}\n')


def start_ranks(work: str) -> int:
    """One process per GPU; the worst exit status."""
    num_gpus = argparse.ArgumentParser(add_help=False)
    num_gpus.add_argument("--num-gpus", type=int, default=1)
    count = num_gpus.parse_known_args()[0].num_gpus
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        meet = f"{probe.getsockname()[1]}:{work}"
    ranks = [
        subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "--rank", str(rank), "--meet", meet])
        for rank in range(count)
    ]
    return max(abs(rank.wait()) for rank in ranks)


def run_rank(options: argparse.Namespace) -> None:
    """Train as one rank; rank 0 prints."""
    sys.path.insert(0, str(ROOT))
    import torch

    args = flags(options)
    port, _ = options.meet.split(":", 1)
    actor = start_trainer(args, options, int(port))
    if options.all_logits:
        from slime.backends.megatron_utils.passes import forward

        forward.run_model_on_responses = forward.run_model
    layout = actor.parallel_config()
    for size in options.micro_batch_tokens:
        share = make_share(args.replace(max_tokens_per_gpu=size), options, layout)
        if options.accelerator == "cuda":
            torch.cuda.reset_peak_memory_stats()
        timed = [one_rollout(actor, i, share) for i in range(WARM_UP + options.steps)][WARM_UP:]
        if options.rank == 0:
            report(args, options, layout, timed, size)
    if options.profile:
        profile(actor, share, options)
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)  # the communicators need no farewell


def flags(options: argparse.Namespace) -> Any:
    """The run's flags, through the parser of train.py."""
    from slime.config.parse import parse_args

    _, work = options.meet.split(":", 1)
    line = (
        f"--hf-checkpoint {work}/model --model-args-from-hf --accelerator {options.accelerator} --debug-train-only "
        f"--prompt-data {work}/prompts.jsonl --label-key label --rm-type math --num-rollout 2 "
        f"--rollout-batch-size {options.num_gpus} --global-batch-size {options.num_gpus} "
        f"--rollout-max-response-len {options.length - options.prompt} --rollout-max-prompt-len {options.prompt} "
        "--rollout-function-path slime.rollout.sft_rollout.generate_rollout --use-dynamic-batch-size "
        f"--max-tokens-per-gpu {max(options.micro_batch_tokens)} --actor-num-gpus-per-node {options.num_gpus} "
        f"--recompute-old-log-probs --log-probs-chunk-size 4096 --lr 1e-6 --output-dir {work}/out {options.layout}"
    )
    args = parse_args(argv=line.split())
    return args


def start_trainer(args: Any, options: argparse.Namespace, port: int) -> Any:
    """The trainer of a run with random weights."""
    from slime.backends.megatron_utils import megatron_patch
    from slime.ray.train_actor import TRAINERS
    from slime.utils.misc import load_function

    megatron_patch.apply(args.accelerator)
    trainer_class = load_function(TRAINERS[args.train_backend]["actor"])
    actor = trainer_class(
        args,
        rank=options.rank,
        world_size=options.num_gpus,
        master_addr="127.0.0.1",
        master_port=port,
        local_rank=options.rank,
    )
    with mock.patch.object(trainer_class.backend_class, "load", random_weights):
        actor.init()
    return actor


def random_weights(backend: Any, source: Any) -> None:
    """In place of loading; Megatron's model has random weights, FSDP2's is empty."""
    import torch

    if backend.args.train_backend == "fsdp":
        for _, tensor in backend.named_weights():
            tensor.fill_(1.0) if tensor.dim() == 1 else tensor.normal_(std=0.02)
    else:
        backend.state.optimizer.reload_model_params()
    torch.manual_seed(0)


def make_share(args: Any, options: argparse.Namespace, layout: dict[str, int]) -> dict[str, Any]:
    """This rank's share of a rollout of random tokens: one train step."""
    from slime.ray.rollout.shares import split_train_data

    rng = random.Random(0)
    count = options.tokens * layout["dp_size"] // options.length
    response = options.length - options.prompt
    data = {
        "tokens": [[rng.randrange(90) for _ in range(options.length)] for _ in range(count)],
        "response_lengths": [response] * count,
        "loss_masks": [[1] * response] * count,
        "rewards": [rng.gauss(0, 1) for _ in range(count)],
        "raw_reward": [0.0] * count,
        "truncated": [0] * count,
        "sample_indices": list(range(count)),
        "rollout_ids": list(range(count)),
        "rollout_mask_sums": [response] * count,
        "rollout_log_probs": [[-5.0] * response] * count,
    }
    scheduled = args.replace(global_batch_size=count)
    return split_train_data(scheduled, data, layout)[layout["dp_rank"]]


def one_rollout(actor: Any, rollout_id: int, share: dict[str, Any]) -> dict[str, float]:
    """Seconds of the log-prob pass and of the train step."""
    from slime.observability.timer import Timer
    from slime.utils import accelerator

    Timer().reset()
    accelerator.synchronize()
    start = time.perf_counter()
    actor.train_on(rollout_id, dict(share))
    accelerator.synchronize()
    whole = time.perf_counter() - start
    seconds = Timer().log_dict()
    return {"whole": whole, "log-probs": seconds["log_probs"], "train": seconds["actor_train"]}


def report(
    args: Any, options: argparse.Namespace, layout: dict[str, int], timed: list[dict[str, float]], size: int
) -> None:
    """Print one line per part, of micro-batches of `size` tokens."""
    import torch

    from slime.utils.flops_utils import calculate_fwd_flops

    forward = calculate_fwd_flops([options.length] * (options.tokens // options.length), args)
    if not options.all_logits:
        forward -= 2 * args.hidden_size * args.vocab_size * options.prompt * (options.tokens // options.length)
    forward *= layout["dp_size"] / options.num_gpus / 1e12  # of one GPU
    peak = matmul_tflops() if options.accelerator == "cuda" else float("nan")
    tokens = options.tokens * layout["dp_size"]
    name = f"{options.shape} x {options.num_gpus} GPUs {options.layout}".strip()
    memory = torch.cuda.max_memory_allocated() / 2**30 if options.accelerator == "cuda" else 0.0
    found = {"memory_gib": memory, "tokens": tokens, "matmul_tflops": peak}
    print(
        f"{name}: {options.tokens} tokens a rank and step, micro-batches of {size}; "
        f"bf16 matmul of this GPU: {peak:.0f} TFLOP/s"
    )
    for part, passes in (("log-probs", 1), ("train", 3)):
        each = [step[part] for step in timed]
        seconds = statistics.median(each)
        rate, found[part] = passes * forward / seconds, seconds
        print(
            f"  {part:10} {1e3 * seconds:8.1f} ms  {tokens / seconds / options.num_gpus:9.0f} tok/s a GPU  "
            f"{rate:6.1f} TFLOP/s a GPU  MFU {100 * rate / peak:5.1f}%  "
            f"({1e3 * min(each):.1f} to {1e3 * max(each):.1f} ms)"
        )
    whole = statistics.median(step["whole"] for step in timed)
    found["whole"] = whole
    if options.result:
        options.result.write_text(json.dumps(found))
    print(f"  {'whole':10} {1e3 * whole:8.1f} ms  peak memory {memory:.1f} GiB", flush=True)


def matmul_tflops(size: int = 8192, repeats: int = 20) -> float:
    """What bf16 matrix products reach on this GPU."""
    import torch

    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    best = 0.0
    for _ in range(3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            a @ b
        torch.cuda.synchronize()
        best = max(best, 2 * size**3 * repeats / (time.perf_counter() - start) / 1e12)
    return best


def profile(actor: Any, share: dict[str, Any], options: argparse.Namespace) -> None:
    """Print where a rollout's time goes on the device, by kernel."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (options.accelerator == "cuda")
    with record(activities=activities) as trace:
        one_rollout(actor, 100, share)
    if options.rank == 0:
        key = "self_cuda_time_total" if options.accelerator == "cuda" else "self_cpu_time_total"
        print(trace.key_averages().table(sort_by=key, row_limit=options.profile, max_name_column_width=70))


if __name__ == "__main__":
    main()
