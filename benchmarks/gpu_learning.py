"""Does a real model learn on one GPU? SmolLM2-135M-Instruct, one-digit arithmetic of reasoning-gym, GRPO.

    python benchmarks/gpu_learning.py --make-data                                   where reasoning_gym is installed
    python benchmarks/gpu_learning.py --only grpo --timeout 500                     again, until it is complete
    python benchmarks/gpu_learning.py --only random --timeout 500                   the control
    python benchmarks/gpu_learning.py --report                                      table and plot

Questions: sums of two and of three one-digit numbers (chain_sum) and + - * of two (basic_arithmetic), in equal shares
in training and in the held-out set, which has no question of the training set. The prompt is the question alone: told
to "answer with the number only", this model is right one time in twelve; left alone it often writes the equation
first, and is right far more often. Reward: the last number of the response is the answer; of the control, a coin.
Accuracy: the last number is the answer, on the held-out set at temperature 1, 4 samples a question, for both.

A call ends after --timeout seconds; the next goes on from the last checkpoint (--save, every 20 rollouts). The sum of
the seconds of all calls is kept in seconds.txt. Targets: at least 20 points more at the end than at the start within
20 minutes of GPU time, and the control, whose rewards are random, at most 5 points above its start.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_models import SMOLLM2  # noqa: E402
from benchmarks.gpu_runs import (  # noqa: E402
    Row,
    Run,
    colocated,
    folder_of,
    is_complete,
    make_parser,
    not_measured,
    parse_options,
    report,
    run_train,
)
from benchmarks.tiny_runs import Curve, plot_curves, read_curve  # noqa: E402
from slime.utils.types import Sample  # noqa: E402

LAST_NUMBER = "examples.reasoning_gym.reward:last_number"
REWARDS = {"grpo": LAST_NUMBER, "random": "benchmarks.gpu_learning:coin"}
EVALUATION = "arithmetic"
PARTS = (
    ("chain_sum", "min_terms=2", "max_terms=2", "min_digits=1", "max_digits=1"),
    ("chain_sum", "min_terms=3", "max_terms=3", "min_digits=1", "max_digits=1"),
    (
        "basic_arithmetic", "min_terms=2", "max_terms=2", "min_digits=1", "max_digits=1", 'operators=["+","-","*"]',
        "allow_parentheses=false", "allow_negation=false",
    ),
)  # fmt: skip
GAIN, CONTROL_RISE, LAST = 0.20, 0.05, 3
MINUTES = 20.0
CONCURRENCY = 1024


async def coin(args: Namespace, sample: Sample, **kwargs: Any) -> float:
    """The reward of the control: 1 or 0, whatever was answered."""
    return float(random.random() < 0.5)


def main() -> None:
    parser = make_parser(__doc__, "gpu_learning")
    parser.add_argument("--only", nargs="+", choices=list(REWARDS), default=list(REWARDS))
    parser.add_argument("--data", type=Path, default=ROOT / "outputs/gpu/arithmetic", help="train.jsonl, eval.jsonl")
    parser.add_argument("--make-data", action="store_true", help="make --data, and nothing else")
    parser.add_argument("--rollouts", type=int, default=120)
    parser.add_argument("--lr", default="2e-5")
    parser.add_argument("--model", default=SMOLLM2, help="or an HF directory")
    options = parse_options(parser)
    options.data = options.data.resolve()
    if options.make_data:
        make_data(options.data)
        return
    options.benchmark = "-".join([options.benchmark, *options.only])
    runs = {name: learning_run(name, options) for name in options.only}
    for run in runs.values():
        timed_run(run, options)
    sys.exit(report(rows_of(runs, options), options))


def make_data(folder: Path) -> None:
    """Write the questions."""
    parts = [word for part in PARTS for word in ("--part", *part)]
    tool = [sys.executable, str(ROOT / "tools/prepare_reasoning_gym.py"), "--output", str(folder)]
    sizes = ["--num-train", "9000", "--num-eval", "150", "--instruction", ""]
    subprocess.run([*tool, *sizes, *parts], check=True)


def learning_run(name: str, options: Namespace) -> Run:
    """A run by the name of its reward."""
    title = f"learning-{name}-{options.lr}"
    folder = options.output / "runs" / title
    prompts, samples, response, rollouts, every = (128, 16, 48, options.rollouts, 20)
    rows, graphs = "", ["--sglang-cuda-graph-max-bs-decode", CONCURRENCY]
    if options.tiny:
        prompts, samples, response, rollouts, every, rows, graphs = 4, 4, 8, 4, 2, "@[0:4]", []
    flags = [
        "--prompt-data", f"{options.data}/train.jsonl", "--input-key", "prompt", "--label-key", "label",
        "--apply-chat-template", "--rollout-shuffle", "--advantage-estimator", "grpo",
        "--custom-rm-path", REWARDS[name], "--eval-config", write_evaluation(options, response, rows=rows),
        "--num-rollout", rollouts, "--rollout-batch-size", prompts, "--n-samples-per-prompt", samples,
        "--global-batch-size", prompts * samples // 2, "--rollout-max-response-len", response,
        "--sglang-server-concurrency", CONCURRENCY, "--use-dynamic-batch-size", "--rollout-temperature", 1,
        "--lr", options.lr, "--lr-decay-style", "constant", "--weight-decay", 0, "--clip-grad", 1.0,
        "--eps-clip", 0.2, "--eps-clip-high", 0.28,
        "--eval-interval", every // 2,
        "--save", folder / "save", "--load", folder / "save", "--save-interval", every, "--keep-checkpoints", 1,
        *colocated(options, tokens=65536), *graphs,
    ]  # fmt: skip
    return Run(title, "tiny" if options.tiny else options.model, tuple(map(str, flags)))


def write_evaluation(options: Namespace, response: int, *, rows: str) -> Path:
    """The file for --eval-config: answers are judged alike, whatever the training's reward is."""
    questions = f"{options.data}/eval.jsonl{rows}"
    dataset: dict[str, Any] = {"name": EVALUATION, "path": questions, "custom_rm_path": LAST_NUMBER}
    dataset |= {"input_key": "prompt", "label_key": "label", "apply_chat_template": True}
    defaults = {"temperature": 1.0, "n_samples_per_eval_prompt": 4, "max_response_len": response}
    path = options.output / "arithmetic.json"  # JSON is YAML
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"eval": {"defaults": defaults, "datasets": [dataset]}}))
    return Path(path)


def timed_run(run: Run, options: Namespace) -> None:
    """Do what is left of a run in this call's time, and add up the seconds."""
    if options.report or is_complete(run, options):
        return
    begin, folder = time.monotonic(), folder_of(run, options)
    run_train(run, options, resume=True)
    path = folder / "seconds.txt"
    spent = float(path.read_text()) if path.is_file() else 0.0
    path.write_text(f"{spent + time.monotonic() - begin:.1f}\n")


# ---- the report


def rows_of(runs: dict[str, Run], options: Namespace) -> list[Row]:
    """A row for each run, and the plot of all."""
    curves = {name: read_curve(folder_of(run, options), f"eval/{EVALUATION}") for name, run in runs.items()}
    rows = [judge(name, curves[name], minutes_of(run, options)) for name, run in runs.items()]
    shown = {name: [curve] for name, curve in curves.items() if len(curve) > 1}
    try:
        title = "SmolLM2-135M-Instruct on one-digit arithmetic: held-out accuracy at temperature 1"
        plot_curves(shown, options.output / "gpu_learning.png", title=title)
    except ImportError:
        print("no plot: matplotlib is not installed; --report draws it where it is", file=sys.stderr)
    return rows


def minutes_of(run: Run, options: Namespace) -> float:
    """GPU time of all calls of a run, starts included."""
    path = folder_of(run, options) / "seconds.txt"
    return float(path.read_text()) / 60 if path.is_file() else 0.0


def judge(name: str, curve: Curve, minutes: float) -> Row:
    """The row of a run: the mean of its last evaluations beside the first one."""
    learns = name == "grpo"
    target = f">= +{100 * GAIN:.0f} points in {MINUTES:.0f} min" if learns else f"<= +{100 * CONTROL_RISE:.0f} points"
    values = list(curve.values())
    if len(values) <= LAST:
        return not_measured(f"learning, {name}", SMOLLM2, target, f"{len(values)} evaluations so far")
    start, end = values[0], statistics.mean(values[-LAST:])
    gain = end - start
    return Row(
        what=f"learning, {name} rewards" if not learns else "learning, GRPO",
        shape=f"{SMOLLM2}, {list(curve)[-1]:.0f} rollouts",
        figure=f"{start:.1%} to {end:.1%}",
        limit="",
        ratio=None,
        target=target,
        holds=gain >= GAIN and minutes <= MINUTES if learns else gain <= CONTROL_RISE,
        note=f"{100 * gain:+.1f} points (mean of the last {LAST} evaluations), {minutes:.1f} min of GPU time",
    )


if __name__ == "__main__":
    main()
