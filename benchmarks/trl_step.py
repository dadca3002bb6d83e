"""One round of TRL's GRPOTrainer on the model and prompts of cpu_step.py; prints its seconds per step as JSON.

TRL is optional: requirements-bench.txt lists what to install beside the environment with `pip install --no-deps`.
It knows nothing about slime; cpu_step.py starts it as a process and reads the line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", required=True, help="JSONL with a field `prompt`")
    parser.add_argument("--prompts-per-step", type=int, default=8)
    parser.add_argument("--samples-per-prompt", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-4)
    options = parser.parse_args()
    print(json.dumps(measure(options)))


def measure(options: argparse.Namespace) -> dict[str, list[float] | float]:
    """Train `options.steps` steps; return the seconds of each, without the first (warm-up) step, and their median."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    rows = [json.loads(line) for line in Path(options.prompts).read_text().splitlines()]
    batch = options.prompts_per_step * options.samples_per_prompt
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False, report_to=[], max_steps=options.steps,
        save_strategy="no",
        per_device_train_batch_size=batch, num_generations=options.samples_per_prompt, gradient_accumulation_steps=1,
        max_completion_length=options.tokens, temperature=1.0, beta=0.0, learning_rate=options.lr, logging_steps=1000,
        lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=1.0, disable_tqdm=True,
        generation_kwargs={"min_new_tokens": options.tokens}, gradient_checkpointing=False,
    )  # fmt: skip
    seconds: dict[str, list[float]] = {"step_s": [], "generate_s": []}

    class StepClock(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            self.start = time.perf_counter()

        def on_step_end(self, args, state, control, **kwargs):
            seconds["step_s"].append(time.perf_counter() - self.start)

    trainer = GRPOTrainer(
        model=options.model,
        reward_funcs=lambda completions, **_: [float(len(set(text))) for text in completions],
        args=config,
        train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in rows]),
        processing_class=AutoTokenizer.from_pretrained(options.model, padding_side="left"),
        callbacks=[StepClock()],
    )
    generate = trainer._generate_single_turn

    def timed_generate(*args, **kwargs):
        start = time.perf_counter()
        out = generate(*args, **kwargs)
        seconds["generate_s"].append(time.perf_counter() - start)
        lengths = {len(ids) for ids in out[0]}
        if lengths != {options.tokens}:
            sys.exit(f"TRL generated responses of {sorted(lengths)} tokens, {options.tokens} were asked for")
        return out

    trainer._generate_single_turn = timed_generate
    trainer.train()
    per_step = {name: values[1:] for name, values in seconds.items()}
    return {**per_step, "median_step_s": statistics.median(per_step["step_s"])}


if __name__ == "__main__":
    main()
