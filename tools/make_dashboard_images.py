"""Take the pictures of docs/dashboard.md: every page over a made-up run, light and dark, wide and narrow.

    python tools/make_dashboard_images.py [--output docs/images/dashboard] [--chromium /usr/bin/chromium]

It needs playwright (requirements-dev.txt), a Chromium, and Pillow, which reduces colours so that pictures stay small.
A message of the browser's console, or a page that is wider than its window, is an error.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from slime.checkpoints.rollout_files import samples_path, trainer_path, write_tables
from slime.observability.rollout_records.schema import (
    PLAIN,
    PLAIN_TRAINER,
    SAMPLES,
    TRAINER,
    preview,
    thumbnail,
)

ROLLOUTS, PROMPTS, PER_PROMPT, SECONDS, EVAL_EVERY = 40, 16, 8, 62.0, 10
SIZES = {"wide": (1600, 1000), "narrow": (390, 844)}
LARGEST = 100_000
PIECES = "First , the tens : we add the carry to them and get a number that is larger than ten".split()  # noqa: SIM905


def write_demo(root: Path) -> None:
    """Two runs that differ in the learning rate; the second one failed."""
    begin = time.time() - ROLLOUTS * SECONDS - 20
    write_tokenizer(root / "model")
    write_demo_run(root / "lr-1e-6", begin, rate=16.0, flags={"lr": 1e-6, "entropy_coef": 0.0}, seed=0)
    failed = root / "lr-5e-6"
    write_demo_run(failed, begin - 9000, rate=9.0, flags={"lr": 5e-6, "entropy_coef": 0.001}, seed=1)
    error = "trainer rank 3 was lost: CUDA out of memory (its log: logs/trainer_3.log)"
    append(
        failed / "run_events.jsonl", [{"event": "finish", "time": begin - 5000, "status": "failed", "error": error}]
    )


def append(path: Path, records: list[dict[str, Any]]) -> None:
    """Append JSON lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def write_tokenizer(directory: Path) -> None:
    """A tokenizer whose tokens are the words of the demonstration."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    directory.mkdir(parents=True)
    words = {f" {word}": number for number, word in enumerate(dict.fromkeys(PIECES))}
    Tokenizer(WordLevel(words, unk_token=" a")).save(str(directory / "tokenizer.json"))


def write_demo_run(directory: Path, begin: float, *, rate: float, flags: dict[str, Any], seed: int) -> None:
    """Everything that one run writes."""
    rng = random.Random(seed)
    save = {"save": str(directory), "hf_checkpoint": str(directory.parent / "model")}
    gpus = {"actor_num_nodes": 1, "actor_num_gpus_per_node": 4, "rollout_num_gpus": 4}
    shown = {
        **flags,
        **save,
        **gpus,
        "num_rollout": 60,
        "rollout_batch_size": PROMPTS,
        "n_samples_per_prompt": PER_PROMPT,
    }
    command = f"python train.py --hf-checkpoint Qwen/Qwen3-4B --prompt-data dapo.jsonl --lr {flags['lr']} --save out"
    start = {"host": socket.gethostname(), "pid": 1, "command": command, "resume": f"{command} --resume auto"}
    append(directory / "run_events.jsonl", [{"event": "start", "time": time.time(), "flags": shown, **start}])
    append(directory / "run_events.jsonl", list(phase_events(begin, rng)))
    for rollout in range(ROLLOUTS):
        append(directory / "metrics.jsonl", metrics_of(rollout, begin + rollout * SECONDS, rate, rng))
    for rollout in range(ROLLOUTS - 4, ROLLOUTS):
        write_samples(directory, rollout, begin + rollout * SECONDS, accuracy(rollout, rate), rng)
    for step in range(0, ROLLOUTS + 1, EVAL_EVERY):
        write_evaluation(directory, step, begin + step * SECONDS, accuracy(step, rate), seed)
    for iteration in (19, 39):
        folder = directory / f"iter_{iteration:07}"
        folder.mkdir()
        (folder / "manifest.json").write_text(json.dumps({"files": {"a.distcp": {"size": 24_600_000_000}}}))
    (directory / "logs").mkdir()
    warning = "[14:03:11] WARNING slime.rollout.http: engine 2 answered 503; the request is tried again\n"
    (directory / "logs" / "rollout_manager.log").write_text(warning)


def accuracy(rollout: int, rate: float) -> float:
    """Share of right answers, which grows."""
    return 0.18 + 0.6 * (1 - math.exp(-rollout / rate))


def phase_events(begin: float, rng: random.Random) -> Iterator[dict[str, Any]]:
    """Phases of the driver; the last one goes on."""
    yield {"event": "plan", "time": begin, "first": 0, "num_rollout": 60}
    for rollout in range(ROLLOUTS):
        at = begin + rollout * SECONDS
        for name, share in (("generate", 0.55), ("train", 0.33), ("sync", 0.07)):
            yield {"event": "begin", "time": at, "phase": name, "rollout": rollout}
            at += share * SECONDS * rng.uniform(0.95, 1.02)
            yield {"event": "end", "time": at, "phase": name, "rollout": rollout}
    yield {"event": "begin", "time": begin + ROLLOUTS * SECONDS, "phase": "generate", "rollout": ROLLOUTS}


def metrics_of(rollout: int, at: float, rate: float, rng: random.Random) -> list[dict[str, Any]]:
    """Records of one rollout."""
    length = 620 + 9 * rollout + rng.gauss(0, 14)
    generated = {
        "rollout/response_len/mean": length,
        "rollout/response_len/min": 90.0 + rng.uniform(0, 40),
        "rollout/response_len/max": min(2048.0, 1500 + 16 * rollout),
        "rollout/truncated_ratio": max(0.0, 0.004 * rollout + rng.gauss(0, 0.006)),
        "rollout/prefix_cache_hit_rate": 0.86 + rng.gauss(0, 0.01),
        "rollout/engine_loads/running": 118 + rng.gauss(0, 4),
        "rollout/engine_loads/queued": abs(rng.gauss(0, 3)),
        "rollout/engine_loads/kv_use": 0.48 + 0.006 * rollout + rng.gauss(0, 0.01),
        "rollout/engine_loads/tokens_per_s": 9200 + rng.gauss(0, 240),
        "rollout/engine_loads/cache_hits": 0.86 + rng.gauss(0, 0.01),
        "perf/rollout_time": 0.55 * SECONDS,
        "perf/tokens_per_gpu_per_sec": 2300 + rng.gauss(0, 60),
    }
    trained = {
        "rollout/raw_reward": accuracy(rollout, rate) + rng.gauss(0, 0.015),
        "perf/log_probs_time": 0.06 * SECONDS,
        "perf/actor_train_time": 0.27 * SECONDS + rng.gauss(0, 0.3),
        "perf/step_time": SECONDS,
        "perf/other_time": 0.05 * SECONDS,
        "perf/update_weights_time": 0.07 * SECONDS,
        "perf/wait_time_ratio": 0.6,
    }
    step = {
        "train/pg_loss": rng.gauss(0, 0.004),
        "train/entropy_loss": 0.9 * math.exp(-rollout / (3 * rate)) + rng.gauss(0, 0.01),
        "train/kl_loss": 0.0004 * rollout + abs(rng.gauss(0, 0.0004)),
        "train/grad_norm": 0.4 + abs(rng.gauss(0, 0.06)),
        "train/pg_clipfrac": 0.01 + abs(rng.gauss(0, 0.002)),
        "train/train_rollout_logprob_abs_diff": 0.011 + abs(rng.gauss(0, 0.001)),
    }
    records = [("rollout", at + 0.55 * SECONDS, generated), ("rollout", at + 0.93 * SECONDS, trained)]
    records.append(("train", at + 0.94 * SECONDS, step))
    found = [
        {"step_key": f"{of}/step", "time": time_, f"{of}/step": rollout, **values} for of, time_, values in records
    ]
    if rollout == ROLLOUTS - 2:
        text = "14% of the responses were truncated, and 6% ten rollouts ago"
        alarm = {"name": "truncated responses", "since": rollout - 3, "evidence": text, "docs": "docs/alarms.md"}
        alarm |= {"flags": ["--rollout-max-response-len", "--overlong-buffer-len"]}
        found.append({"step_key": "rollout/step", "time": at, "rollout/step": rollout, "alarm": alarm})
    return found


def write_samples(directory: Path, rollout: int, at: float, share: float, rng: random.Random) -> None:
    """Samples of a rollout, with what the trainer computed of them."""
    rows = []
    for number in range(PROMPTS * PER_PROMPT):
        group = number // PER_PROMPT
        hardness = (group * 7 % PROMPTS) / PROMPTS
        is_right = rng.random() < min(1.0, max(0.0, share + 0.75 - 1.5 * hardness))
        rows.append(sample_row(number, group, at, rng, is_right=is_right))
    folder = directory / "rollouts"
    write_tables(samples_path(folder, rollout), SAMPLES, [pa.Table.from_pylist(rows, schema=SAMPLES)], plain=PLAIN)
    table = pa.Table.from_pylist(trainer_rows(rows, rng), schema=TRAINER)
    write_tables(trainer_path(folder, rollout, 0), TRAINER, [table], plain=PLAIN_TRAINER)


def picture_of(text: str) -> Any:
    """A note with a text on it."""
    from PIL import Image, ImageDraw

    note = Image.new("RGB", (320, 180), "#f7f1dc")
    ImageDraw.Draw(note).text((36, 56), text, fill="#27405e", font_size=64)
    return note


def sample_row(number: int, group: int, at: float, rng: random.Random, *, is_right: bool) -> dict[str, Any]:
    """One sample: a question, thoughts, a tool's answer and an answer."""
    a, b = 37 + 13 * group, 58 + 7 * group
    length = rng.randint(90, 260)
    thoughts = " ".join(rng.choices(PIECES, k=length // 2))
    answer = f"So {a} + {b} is {a + b if is_right else a + b - 10}."
    prompt = f"What is the sum {a} + {b} on this note? Think first, and use the calculator if you like."
    calls = [{"type": "function", "function": {"name": "calculator", "arguments": {"expression": f"{a} + {b}"}}}]
    messages = [
        {"role": "system", "content": "You are a careful assistant."},
        {"role": "user", "content": prompt},
        {"role": "assistant", "content": f"<think>{thoughts}</think>\nLet me check it.", "tool_calls": calls},
        {"role": "tool", "name": "calculator", "content": str(a + b)},
        {"role": "assistant", "content": answer},
    ]
    mask = np.ones(length, np.int8)
    mask[length // 2 : length // 2 + 8] = 0
    begin = at + rng.uniform(0, 3)
    end = begin + length / 260 * 0.5 * SECONDS
    middle = (begin + end) / 2
    times = {"begin": begin, "end": end, "tool_s": 2.0, "reward_s": 0.3, "spans": [["tool", middle, middle + 2]]}
    row: dict[str, Any] = dict.fromkeys(SAMPLES.names)
    return row | {
        "sample_id": number,
        "group_index": group,
        "index": number,
        "dataset": "sums",
        "prompt": prompt,
        "response": f"<think>{thoughts}</think> {answer}",
        "messages": json.dumps({"messages": messages, "tools": None}),
        "tokens": np.array([rng.randrange(22) for _ in range(24 + length)], np.int32),
        "response_length": length,
        "loss_mask": mask,
        "rollout_log_probs": (-np.array([rng.expovariate(1.8) for _ in range(length)], np.float32)) * mask,
        "reward": float(is_right),
        "reward_parts": json.dumps({"correct": float(is_right), "format": 1.0}),
        "status": "truncated" if length > 252 else "completed",
        "weight_versions": ["12"],
        "num_turns": 2,
        "times": json.dumps(times),
        "label": str(a + b),
        "metadata": json.dumps({"source": "made up"}),
        "removed": False,
        "end_reason": "length" if length > 252 else "done",
        "reward_is_trusted": True,
        "images": 1,
        "prompt_chars": len(prompt),
        "response_chars": len(thoughts),
        "prompt_preview": preview(prompt),
        "response_preview": preview(f"{thoughts} {answer}"),
        "prompt_length": 24,
        "thumbnails": [thumbnail(picture_of(f"{a} + {b}"))],
    }


def trainer_rows(rows: list[dict[str, Any]], rng: random.Random) -> list[dict[str, Any]]:
    """What a trainer computed: log-probs near the engine's, entropies, advantages."""
    found = []
    for row in rows:
        engine, mask = row["rollout_log_probs"], row["loss_mask"]
        noise = np.array([rng.gauss(0, 0.02) for _ in engine], np.float32)
        values: dict[str, Any] = dict.fromkeys(TRAINER.names)
        values |= {"sample_id": row["sample_id"], "index": row["index"], "rank": 0}
        values |= {"log_probs": (engine + noise) * mask, "ref_log_probs": (engine + 5 * noise) * mask}
        advantages = np.full(len(engine), row["reward"] - 0.5, np.float32)
        found.append(values | {"entropy": -0.6 * engine, "advantages": advantages})
    return found


def write_evaluation(directory: Path, step: int, at: float, share: float, seed: int) -> None:
    """An evaluation of 24 problems, of which more are right each time, and its record."""
    rng = random.Random(1000 * seed + step)
    rows = [sample_row(n, n, at, rng, is_right=rng.random() < share + 0.5 - n / 24) for n in range(24)]
    rows = [row | {"dataset": "hard_sums"} for row in rows]
    path = samples_path(directory / "rollouts", step, evaluation=True)
    write_tables(path, SAMPLES, [pa.Table.from_pylist(rows, schema=SAMPLES)], plain=PLAIN)
    mean = sum(row["reward"] for row in rows) / len(rows)
    record = {"step_key": "eval/step", "time": at, "eval/step": step, "eval/hard_sums": mean}
    append(directory / "metrics.jsonl", [record])


def pages_of(run: str, other: str) -> dict[str, str]:
    """Page -> its address."""
    newest = f"{ROLLOUTS - 1:05}"
    return {
        "run": f"#/run/{run}",
        "curves": f"#/curves/{run}?with={other}&smooth=0.6",
        "rollouts": f"#/rollouts/{run}",
        "sample": f"#/sample/{run}/{newest}/5?colour=gap",
        "time": f"#/time/{run}?last=5",
        "compare": f"#/compare/{run}?with={other}",
        "evaluation": f"#/evaluation/{run}",
    }


def take(url: str, output: Path, chromium: str) -> list[str]:
    """Take every picture; returns what was wrong."""
    from playwright.sync_api import sync_playwright

    wrong: list[str] = []
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-dev-shm-usage"]
        browser = playwright.chromium.launch(executable_path=chromium, args=arguments)
        for size, (width, height) in SIZES.items():
            for scheme in ("light", "dark"):
                page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
                page.on("console", lambda message: wrong.append(f"console: {message.text}"))
                page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
                page.goto(url)
                ids = page.evaluate("fetch('api/runs').then((a) => a.json()).then((a) => a.runs.map((r) => r.id))")
                for name, address in pages_of(*ids).items():
                    page.goto(url.partition("?")[0] + address)
                    page.wait_for_selector("main:not([aria-busy]) h1")
                    page.wait_for_timeout(900)  # charts are drawn when they are seen
                    if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
                        wrong.append(f"{name} is wider than {width} px")
                    save(page.screenshot(), output / f"{name}-{size}-{scheme}.png")
                page.close()
        browser.close()
    return wrong


def save(picture: bytes, path: Path) -> None:
    """Write a picture in as many colours as keep it small."""
    from PIL import Image

    image = Image.open(io.BytesIO(picture)).convert("RGB")
    for colors in (128, 64, 32, 16):
        # Small things in colours of their own (a red dot, a swatch) must keep them.
        image.quantize(colors, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(path, optimize=True)
        if path.stat().st_size <= LARGEST:
            return


def main() -> int:
    """Make the run, serve it, take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("docs/images/dashboard"), help="directory of the pictures")
    parser.add_argument("--chromium", default="/usr/bin/chromium", help="the browser that takes them")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        write_demo(Path(temporary) / "runs")
        command = [sys.executable, "-m", "slime.dashboard", str(Path(temporary) / "runs")]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        try:
            found = re.search(r"http\S+", server.stdout.readline())
            assert found is not None
            wrong = take(found[0], options.output, options.chromium)
        finally:
            server.terminate()
            server.wait()
    for sentence in wrong:
        print(sentence)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
