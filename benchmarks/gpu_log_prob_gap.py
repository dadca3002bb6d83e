"""How far are the trainer's log-probs from the engine's in bf16, does it grow, and what is it made of?

    python benchmarks/gpu_log_prob_gap.py                         the 0.6B shape, over the cycles of gpu_soak.py
    python benchmarks/gpu_log_prob_gap.py --explain [--model DIR]   SmolLM2, by cause
    python benchmarks/gpu_log_prob_gap.py --tiny [--explain]

The first reads train/train_rollout_logprob_abs_diff of the run that benchmarks/gpu_soak.py makes. Targets: a mean of
at most 0.02 over its steps, and the last third at most 1.2 times the first.

--explain takes one rollout of real text each from an engine as it is and from one with --sglang-enable-fp32-lm-head,
with the trainer's log-probs of the same tokens, and computes those tokens anew with transformers: in fp32, which
counts as the truth, with the body or the output layer or both in bf16, and with logits that are only rounded to bf16.
The table has each one's mean absolute difference from the truth and from the engine.
"""

from __future__ import annotations

import statistics
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_models import SMOLLM2, prepare_model  # noqa: E402
from benchmarks.gpu_runs import (  # noqa: E402
    Row,
    Run,
    Series,
    colocated,
    folder_of,
    make_parser,
    not_measured,
    parse_options,
    report,
    run_train,
    series_of,
)
from benchmarks.gpu_soak import soak_run  # noqa: E402
from slime.checkpoints.rollout_files import load_dump  # noqa: E402

GAP = "train/train_rollout_logprob_abs_diff"
TARGET, GROWTH = 0.02, 1.2
QUESTIONS = ("Why is the sky blue?", "Write a sentence about a dog.", "What is 17 + 25?", "Name three colours.")
VARIANTS = {
    "fp32 (the truth)": (torch.float32, torch.float32, False),
    "fp32, logits rounded to bf16": (torch.float32, torch.float32, True),
    "bf16 body, fp32 output layer": (torch.bfloat16, torch.float32, False),
    "bf16 body, bf16 output layer": (torch.bfloat16, torch.bfloat16, False),
}
"""Types of body and output layer, and whether logits are rounded."""
TRUTH = next(iter(VARIANTS))


def main() -> None:
    parser = make_parser(__doc__, "gpu_log_prob_gap")
    parser.add_argument("--explain", action="store_true", help="by cause, on a real model")
    parser.add_argument("--model", default=SMOLLM2, help="of --explain; or an HF directory")
    parser.add_argument("--cycles", type=int, default=50, help="of the run of gpu_soak.py")
    options = parse_options(parser)
    if options.explain:
        explain(options)
        return
    run = soak_run(options, cycles=options.cycles)
    run_train(run, options)
    sys.exit(report([judge(series_of(run, options), run.model)], options))


def judge(series: Series, model: str) -> Row:
    """The row of a run: the mean over its steps, and the last third beside the first."""
    values = [value for _, value in sorted(series.get(GAP, {}).items())]
    what, shape, third = "train / rollout log-prob gap, bf16", f"{model}, {len(values)} steps", len(values) // 3
    target = f"mean <= {TARGET}, last third <= {GROWTH} x first"
    if third < 2:
        return not_measured(what, shape, target, f"{len(values)} steps logged {GAP}")
    mean, first, last = statistics.mean(values), statistics.mean(values[:third]), statistics.mean(values[-third:])
    holds = mean <= TARGET and last <= GROWTH * first
    figure = f"mean {mean:.4f}, largest {max(values):.4f}"
    return Row(what, shape, figure, f"first third {first:.4f}, last {last:.4f}", last / first, target, holds)


# ---- by cause


def explain(options: Namespace) -> None:
    """Print and write the table of causes."""
    name = "tiny" if options.tiny else options.model
    runs = {"engine": probe_run(name, options), "engine, fp32 output layer": probe_run(name, options, fp32_head=True)}
    model = prepare_model(name, options.output / "models", device=options.accelerator, gguf=options.gguf)
    lines = ["| log-probs of | tokens | from fp32 | from the engine |", "|---|---|---|---|"]
    for title, run in runs.items():
        if not run_train(run, options):
            continue
        dump = load_dump(folder_of(run, options) / "train-0.pt", trusted=True)
        lines += table_of(title, dump["samples"], model, options.accelerator)
    text = "\n".join(["Mean absolute difference of log-probs of sampled tokens.", "", *lines])
    print(text)
    (options.output / "gpu_log_prob_causes.md").write_text(text + "\n")


def probe_run(model: str, options: Namespace, *, fp32_head: bool = False) -> Run:
    """One rollout of real text, dumped with the log-probs of engine and trainer."""
    name = "gap-fp32-head" if fp32_head else "gap"
    folder = options.output / "runs" / name
    prompts = options.output / "questions.jsonl"
    prompts.parent.mkdir(parents=True, exist_ok=True)
    prompts.write_text("".join(f'{{"prompt": "{question}"}}\n' for question in QUESTIONS))
    flags = [
        "--prompt-data", prompts, "--input-key", "prompt", "--apply-chat-template", "--rm-type", "random",
        "--num-rollout", 1, "--rollout-batch-size", 4, "--n-samples-per-prompt", 2 if options.tiny else 32,
        "--global-batch-size", 8 if options.tiny else 128, "--rollout-max-response-len", 8 if options.tiny else 128,
        "--use-dynamic-batch-size", "--recompute-old-log-probs", "--lr", "1e-6", "--lr-decay-style", "constant",
        "--save-debug-train-data", folder / "train-{rollout_id}.pt", *colocated(options),
        *(["--sglang-enable-fp32-lm-head"] if fp32_head else []),
        *(["--sglang-disable-cuda-graph"] if options.accelerator == "cuda" else []),
    ]  # fmt: skip
    return Run(name, model, tuple(map(str, flags)))


def table_of(title: str, samples: Sequence[Mapping[str, Any]], model: Path, device: str) -> list[str]:
    """Lines of an engine's rollout: the engine, the trainer and each variant, beside the truth and the engine."""
    found = {
        title: torch.cat([sample["rollout_log_probs"] for sample in samples]).double(),
        f"trainer, on the tokens of: {title}": torch.cat([sample["log_probs"] for sample in samples]).double(),
    }
    for name, (body, head, rounds) in VARIANTS.items():
        computed = log_probs_of(samples, model, device=device, body=body, head=head, rounds_logits=rounds)
        found[f"transformers {name}"] = computed.double()
    truth, engine = found[f"transformers {TRUTH}"], found[title]
    return [
        f"| {name} | {len(values)} | {(values - truth).abs().mean():.5f} | {(values - engine).abs().mean():.5f} |"
        for name, values in found.items()
    ]


@torch.no_grad()
def log_probs_of(
    samples: Sequence[Mapping[str, Any]],
    model: Path,
    *,
    device: str,
    body: torch.dtype,
    head: torch.dtype,
    rounds_logits: bool,
) -> torch.Tensor:
    """Log-probs of every response token by transformers, samples behind each other."""
    network = load_network(model, body).to(device)
    weight = network.get_output_embeddings().weight.to(head)
    found = []
    for sample in samples:
        tokens = torch.as_tensor(sample["tokens"], device=device)
        length = int(sample["response_lengths"])
        hidden = network.model(tokens[None]).last_hidden_state[0, -length - 1 : -1]
        logits = hidden.to(head) @ weight.T
        logits = logits.bfloat16() if rounds_logits else logits
        log_p = logits.float().log_softmax(-1)
        found.append(log_p.gather(1, tokens[-length:, None])[:, 0].cpu())
    return torch.cat(found)


def load_network(model: Path, dtype: torch.dtype) -> Any:
    """The causal model of a directory; classes are imported by themselves, for torchvision may be missing."""
    import json

    if json.loads((model / "config.json").read_text())["model_type"] == "llama":
        from transformers.models.llama.modeling_llama import LlamaForCausalLM as Network
    else:
        from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM as Network
    return Network.from_pretrained(model, dtype=dtype).eval()


if __name__ == "__main__":
    main()
