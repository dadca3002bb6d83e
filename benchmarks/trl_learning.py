"""TRL's GRPOTrainer on the quick start's task, from the same SFT model: the line that learning.py shows beside ours.

It runs with what learning.py's grpo runs have: 64 prompts x 8 samples a rollout, trained in 4 batches, rewards
divided by the group's deviation, the same clip range, learning rate, prompts and evaluation (held-out problems, 4
samples each, at temperature 1). `metrics.jsonl` in --output-dir gets one record an evaluation, as train.py writes
them. TRL has to be installed (requirements-bench.txt); nothing of slime is used.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

PROMPTS, SAMPLES, BATCHES = 64, 8, 4
RESPONSE_TOKENS = 5
EVAL_INTERVAL, EVAL_SAMPLES = 5, 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", type=Path, required=True, help="folder with sft/hf and data/")
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--accelerator", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--steps", type=int, default=70, help="rollouts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lr", type=float, default=2e-4)
    train(parser.parse_args())


def train(options: argparse.Namespace) -> None:
    """Train, evaluating before, after every few rollouts, and at the end."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(options.start / "sft/hf", padding_side="left")
    config = GRPOConfig(
        output_dir=str(options.output_dir / "trl"), use_cpu=options.accelerator == "cpu", bf16=False, report_to=[],
        save_strategy="no", disable_tqdm=True, logging_steps=BATCHES, seed=options.seed,
        max_steps=options.steps * BATCHES, steps_per_generation=BATCHES, gradient_accumulation_steps=1,
        per_device_train_batch_size=PROMPTS * SAMPLES // BATCHES, num_generations=SAMPLES, num_iterations=1,
        max_completion_length=RESPONSE_TOKENS, temperature=1.0, top_k=0, top_p=1.0,
        loss_type="grpo", beta=0.0, epsilon=0.2, epsilon_high=0.2, scale_rewards="group",
        learning_rate=options.lr, lr_scheduler_type="constant", weight_decay=0.0, max_grad_norm=1.0,
        gradient_checkpointing=False,
    )  # fmt: skip
    held_out = rows(options.start / "data/eval.jsonl")
    record = Recorder(options.output_dir / "metrics.jsonl")

    class Evaluation(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            record(0, accuracy(kwargs["model"], tokenizer, held_out))

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            step = state.global_step / BATCHES
            if step % EVAL_INTERVAL == 0 or step == options.steps:
                record(step, accuracy(kwargs["model"], tokenizer, held_out))

    trainer = GRPOTrainer(
        model=str(options.start / "sft/hf"),
        reward_funcs=exact_match,
        args=config,
        train_dataset=Dataset.from_list(rows(options.start / "data/train.jsonl")),
        processing_class=tokenizer,
        callbacks=[Evaluation()],
    )
    trainer.train()


def rows(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file: `prompt` (messages) and `label`."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def exact_match(
    completions: list[Any], completion_ids: list[list[int]], label: list[str], **kwargs: Any
) -> list[float]:
    """1 where the response ended before its limit and is the label, as the quick start's reward.

    An answer has at most three digits and the end of the turn: one that fills the limit did not end.
    """
    return [
        float(len(ids) < RESPONSE_TOKENS and completion[0]["content"].strip() == answer)
        for completion, ids, answer in zip(completions, completion_ids, label, strict=True)
    ]


def accuracy(model: Any, tokenizer: Any, problems: list[dict[str, Any]]) -> float:
    """Share of right answers at temperature 1, over 4 samples a problem."""
    import torch

    texts = [
        tokenizer.apply_chat_template(problem["prompt"], add_generation_prompt=True, tokenize=False)
        for problem in problems for _ in range(EVAL_SAMPLES)
    ]  # fmt: skip
    inputs = tokenizer(texts, return_tensors="pt", add_special_tokens=False, padding=True).to(model.device)
    was_training = model.training
    model.eval()
    with torch.no_grad():
        tokens = model.generate(
            **inputs, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=RESPONSE_TOKENS,
            eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
    model.train(was_training)
    answers = tokens[:, inputs["input_ids"].shape[1] :]
    right = 0
    labels = [problem["label"] for problem in problems for _ in range(EVAL_SAMPLES)]
    for answer, label in zip(answers, labels, strict=True):
        ids = answer.tolist()
        ended = tokenizer.eos_token_id in ids[: RESPONSE_TOKENS - 1]
        right += ended and tokenizer.decode(ids, skip_special_tokens=True).strip() == label
    return right / len(texts)


class Recorder:
    """Appends evaluations to a metrics.jsonl."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path

    def __call__(self, step: float, value: float) -> None:
        line = {"eval/addition": value, "eval/step": step, "step_key": "eval/step", "time": time.time()}
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(f"rollout {step:4.0f}  accuracy {value:.3f}", flush=True)


if __name__ == "__main__":
    main()
