"""Drafts (speculative decoding): where they pay, whether sampling stays exact, and whether a head keeps up with RL.

    python benchmarks/gpu_speculative.py --part table --shape 1.7B [--shape 4B]
    python benchmarks/gpu_speculative.py --part exact
    python benchmarks/gpu_speculative.py --part head
    python benchmarks/gpu_speculative.py --part off
    python benchmarks/gpu_speculative.py --part train [--way memory|disk|nccl]
    python benchmarks/gpu_speculative.py --part stop
    python benchmarks/gpu_speculative.py --tiny --part exact

table: tokens/s of one engine with drafts over that of one without, both on this GPU, by requests at once and by tokens
that a verification gives. How many drafts are accepted is set (SGLang's SGLANG_SIMULATE_ACC_LEN), so the weights are
random: target Qwen3, draft an EAGLE-3 head of one layer with an output layer of 32,000 tokens. It says what a given
acceptance would bring, and nothing about a model that learns. Break-even is interpolated between lengths.

off: an engine of the 1.7B shape none of whose drafts is accepted, before and after it is told to stop them
(--spec-auto-off), against one without drafts.

exact: SmolLM2 drafts for itself (STANDALONE), so that about half of its drafts are accepted. Two questions. (1) Are
the log-probs of answers with drafts as close to the plain engine's prefill as those without? (2) Are the tokens at
places that verifications sample distributed as without drafts? Chi-square of two samples, and as a control the same
test on two temperatures, which has to see the difference.

head: an EAGLE head of SmolLM2, trained here on the model's own answers (benchmarks/eagle_head.py), then served:
acceptance on other questions, and tokens/s against no drafts.

train: train.py, colocated, on a small MiMo whose own layer drafts. The reward asks for one letter, so that the policy
moves far from the checkpoint; once with --enable-mtp-training and once without. Acceptance at the start and at the
end. Each sync compares draft weights of engine and trainer, and the first one has to restore every bit of them
(--check-weight-update-equal): a run that ends well has passed that. nccl takes two GPUs.

stop: such a run with --spec-auto-off and a break-even that its drafts do not reach: they stop after three rollouts.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import threading
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.draft_runs import stop, train  # noqa: E402
from benchmarks.gpu_models import SMOLLM2, prepare_draft, prepare_model  # noqa: E402
from benchmarks.gpu_runs import Row, line_of, make_parser, not_measured, parse_options, report  # noqa: E402
from slime.backends.sglang_utils import launch_server  # noqa: E402
from slime.backends.sglang_utils.engine_patches import DRAFTS_OFF  # noqa: E402
from slime.backends.sglang_utils.server_args import device_defaults, server_environment  # noqa: E402
from slime.processes.registry import registry  # noqa: E402
from slime.ray.rollout.router import reserve_block  # noqa: E402

HOST = "127.0.0.1"
BATCHES, LENGTHS, STEPS = (1, 8, 32, 128), (1.0, 1.5, 2.0, 3.0, 4.0), (1, 3)
PROMPT, START_S = 64, 400.0
QUESTIONS = (
    "Why is the sky blue?", "Write a sentence about a dog.", "What is 17 + 25?", "Name three colours.",
    "Tell me a short story about a ship.", "How do I boil an egg?", "What is the capital of France?",
    "Explain what a computer does.",
)  # fmt: skip
PLACES = 4
"""Tokens of an answer that the distribution test looks at; the first is the prompt's and no verification's."""
NOISE, P_VALUE, CONTROL = 1.5, 1e-3, 1e-6


def main() -> None:
    if "--serve" in sys.argv:
        launch_server.main(Path(sys.argv[2]))
        return
    parser = make_parser(__doc__, "gpu_speculative")
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--shape", action="append", help="of the table: 1.7B, 4B (default: 1.7B)")
    parser.add_argument("--samples", type=int, default=8192, help="of each distribution")
    parser.add_argument("--rollouts", type=int, default=40, help="of a run of the part train")
    parser.add_argument("--way", choices=("memory", "disk", "nccl"), default="memory", help="of weights, in train")
    options = parse_options(parser)
    options.benchmark = f"gpu_speculative_{options.part}"
    with tempfile.TemporaryDirectory() as work:
        options.work = Path(work)
        sys.exit(report(PARTS[options.part](options), options))


# ---- engines


def prepare_scheduler(launch: dict[str, Any]) -> None:
    """In a process of a server: as `launch_server` does, and let a file say how many tokens a verification gives."""
    launch_server.prepare(launch)
    if (path := launch["accept_length_file"]) is not None:
        threading.Thread(target=follow, args=(Path(path),), daemon=True).start()


def follow(path: Path) -> None:
    """Have SGLang simulate the length that the file holds; it reads the constant anew in each verification."""
    while True:
        if module := sys.modules.get("sglang.srt.speculative.spec_utils"):
            vars(module)["SIMULATE_ACC_LEN"] = float(path.read_text() or -1)
        time.sleep(0.05)


@contextmanager
def engines(options: Namespace, servers: Mapping[str, Mapping[str, Any]]) -> Iterator[dict[str, str]]:
    """Start servers at once, each from ServerArgs fields; yields their addresses by name."""
    urls, logs = {}, options.output / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with ExitStack() as running:
        processes, blocks = {}, []
        for name, given in servers.items():
            block = reserve_block(HOST)
            blocks.append(block)  # held: nothing else takes the port meanwhile
            fields = device_defaults(options.accelerator, Path(given["model_path"])) | dict(given)
            file = fields.pop("accept_length_file", None)
            fields |= {"host": HOST, "port": block[0], "nccl_port": block[1], "skip_server_warmup": True}
            if options.accelerator == "cuda":
                fields |= {"attention_backend": "triton", "sampling_backend": "pytorch"}
            path = options.work / f"{name}.json"
            path.write_text(
                json.dumps({"accelerator": options.accelerator, "server_args": fields, "accept_length_file": file})
            )
            command = [sys.executable, str(Path(__file__).resolve()), "--serve", str(path)]
            process = registry().start(
                command, name=name, log_path=logs / f"{name}.log", env=server_environment(options.accelerator)
            )
            running.callback(registry().end, process, grace_s=0.0)
            processes[name], urls[name] = process, f"http://{HOST}:{block[0]}"
        asyncio.run(wait_until_healthy(urls, processes, logs))
        yield urls


async def wait_until_healthy(urls: Mapping[str, str], processes: Mapping[str, Any], logs: Path) -> None:
    """Wait until every server answers; raises where one ends before."""
    begin, waiting = time.monotonic(), set(urls)
    async with aiohttp.ClientSession() as session:
        while waiting:
            for name in sorted(waiting):
                if processes[name].poll() is not None or time.monotonic() - begin > START_S:
                    tail = (logs / f"{name}.log").read_text(errors="replace")[-3000:]
                    raise SystemExit(f"the server {name} did not start:\n{tail}")
                try:
                    async with session.get(urls[name] + "/health") as answer:
                        waiting -= {name} if answer.status == 200 else set()
                except aiohttp.ClientError:
                    pass
            await asyncio.sleep(0.5)
    print(f"{', '.join(urls)}: healthy after {time.monotonic() - begin:.0f} s", flush=True)


async def ask(url: str, payloads: Sequence[dict[str, Any]]) -> list[Any]:
    """Send all requests at once; the answers in order."""
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(payload: dict[str, Any]) -> Any:
            async with session.post(url + "/generate", json=payload) as answer:
                answer.raise_for_status()
                return await answer.json()

        return list(await asyncio.gather(*map(one, payloads)))


def request(input_ids: Sequence[int], tokens: int, **sampling: Any) -> dict[str, Any]:
    """A request as a rollout sends it."""
    params = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 1.0} | sampling
    return {"input_ids": list(input_ids), "sampling_params": params, "return_logprob": True}


def speed(url: str, *, batch: int, tokens: int) -> tuple[float, float]:
    """(tokens/s, tokens that a verification gave) of so many requests at once."""
    payloads = [request([7 + (i * 31 + j * 7) % 90 for j in range(PROMPT)], tokens) for i in range(batch)]
    rates, answers = [], []
    for _ in range(2):
        begin = time.monotonic()
        answers = asyncio.run(ask(url, payloads))
        rates.append(batch * tokens / (time.monotonic() - begin))
    return max(rates), length_of(answers)


def length_of(answers: Sequence[Any]) -> float:
    """Tokens that a verification gave; 1 without drafts."""
    metas = [answer["meta_info"] for answer in answers]
    verified = sum(meta.get("spec_verify_ct", 0) for meta in metas)
    return 1 + sum(meta.get("spec_num_correct_drafts", 0) for meta in metas) / max(verified, 1)


# ---- part table


def table(options: Namespace) -> list[Row]:
    """A row for each shape, number of steps and batch: break-even, with the speed-ups in the note."""
    if options.tiny:
        raise SystemExit("--part table needs CUDA: SGLang has no EAGLE-3 attention on CPU; --tiny does the part exact")
    return [row for shape in options.shape or ["1.7B"] for row in table_of(options, shape)]


def table_of(options: Namespace, shape: str) -> list[Row]:
    models = options.output / "models"
    target = prepare_model(shape, models, device="cuda")
    draft = prepare_draft(target, models / f"{shape}-eagle3", device="cuda")
    common = engine_fields(target)
    servers, files = {f"{shape}-plain": common}, {}
    for steps in STEPS:
        files[steps] = options.work / f"length-{steps}"
        files[steps].write_text("1")
        own = draft_fields(draft, steps) | {"accept_length_file": str(files[steps])}
        servers[f"{shape}-drafts-{steps}"] = {**common, **own}
    rows, tokens = [], 128
    with engines(options, servers) as urls:
        for url in urls.values():
            asyncio.run(ask(url, [request(range(7, 7 + PROMPT), 32)] * 8))
        for batch in BATCHES:
            plain, _ = speed(urls[f"{shape}-plain"], batch=batch, tokens=tokens)
            for steps in STEPS:
                gains: dict[float, float] = {}
                for length in (length for length in LENGTHS if length <= steps + 1):
                    files[steps].write_text(str(length))
                    time.sleep(0.2)
                    rate, given = speed(urls[f"{shape}-drafts-{steps}"], batch=batch, tokens=tokens)
                    gains[round(given, 2)] = rate / plain
                rows.append(break_even_row(shape, batch, steps, plain, gains))
                print(rows[-1].what, rows[-1].shape, rows[-1].figure, rows[-1].note, flush=True)
    return rows


def engine_fields(model: Path) -> dict[str, Any]:
    """ServerArgs of an engine that shares its GPU with two others, and takes the largest batch at once."""
    return {
        "model_path": str(model), "max_total_tokens": 65536, "max_running_requests": 2 * max(BATCHES),
        "cuda_graph_max_bs_decode": max(BATCHES), "mem_fraction_static": 0.85, "disable_radix_cache": True,
    }  # fmt: skip


def draft_fields(draft: Path, steps: int, algorithm: str = "EAGLE3") -> dict[str, Any]:
    """ServerArgs of an engine with a draft model that proposes so many tokens, one at a place."""
    return {
        "speculative_algorithm": algorithm, "speculative_draft_model_path": str(draft),
        "speculative_num_steps": steps, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": steps + 1,
    }  # fmt: skip


def off(options: Namespace) -> list[Row]:
    """Rows of drafts that are all refused, and of the same engine after it has stopped them."""
    if options.tiny:
        raise SystemExit("--part off needs CUDA; --tiny does the part exact")
    models, rows = options.output / "models", []
    target = prepare_model("1.7B", models, device="cuda")
    draft = prepare_draft(target, models / "1.7B-eagle3", device="cuda")
    common = engine_fields(target)
    may_stop = {"speculative_adaptive": True, "speculative_adaptive_config": DRAFTS_OFF}
    with engines(
        options, {"off-plain": common, "off-drafts": {**common, **draft_fields(draft, 3), **may_stop}}
    ) as urls:
        plain, drafting = urls["off-plain"], urls["off-drafts"]
        rates = {(batch, "plain"): speed(plain, batch=batch, tokens=128)[0] for batch in BATCHES}
        rates |= {(batch, "drafting"): speed(drafting, batch=batch, tokens=128)[0] for batch in BATCHES}
        asyncio.run(stop_drafts(drafting))
        for batch in BATCHES:
            rate, length = speed(drafting, batch=batch, tokens=128)
            before, without = rates[batch, "drafting"] / rates[batch, "plain"], rates[batch, "plain"]
            rows.append(
                Row("drafts stopped at run time / never there", f"1.7B, {batch} at once", f"{rate:,.0f} tok/s",
                    f"{without:,.0f} tok/s", rate / without, ">= 0.9", rate / without >= 0.9 and length == 1.0,
                    f"{before:.2f} x before")
            )  # fmt: skip
    return rows


async def stop_drafts(url: str) -> None:
    """Send the request with which the rollout manager stops drafts."""
    async with (
        aiohttp.ClientSession() as session,
        session.post(url + "/weights_checker", json={"action": DRAFTS_OFF}) as answer,
    ):
        print("drafts off:", await answer.json(), flush=True)
        answer.raise_for_status()


def break_even_row(shape: str, batch: int, steps: int, plain: float, gains: Mapping[float, float]) -> Row:
    """The row of one batch and one number of steps; it holds where the longest acceptance gains anything."""
    found = break_even(gains)
    figure = "never" if found is None else f"{found:.2f} tokens"
    note = ", ".join(f"{length:.2f}: {gain:.2f} x" for length, gain in gains.items())
    return Row(
        what=f"break-even of {steps} drafted token{'s' * (steps > 1)}",
        shape=f"{shape}, {batch} at once",
        figure=figure,
        limit=f"{plain:,.0f} tok/s without drafts",
        ratio=max(gains.values()),
        target="> 1 at full acceptance",
        holds=max(gains.values()) > 1,
        note=note,
    )


def break_even(gains: Mapping[float, float]) -> float | None:
    """The length from which drafts gain, between the lengths that were measured; None where none of them does.

    Args:
        gains: tokens that a verification gives -> tokens/s over those without drafts.
    """
    points = sorted(gains.items())
    for (length, gain), (longer, more) in zip(points, points[1:], strict=False):
        if gain < 1 <= more:
            return length + (1 - gain) / (more - gain) * (longer - length)
    return points[0][0] if points[0][1] >= 1 else None


# ---- part exact


def exact(options: Namespace) -> list[Row]:
    """Rows of log-probs and of distributions."""
    model = prepare_model("tiny" if options.tiny else SMOLLM2, options.output / "models",
                          device=options.accelerator, gguf=options.gguf)  # fmt: skip
    common = engine_fields(model) | {"max_total_tokens": 2**18, "disable_radix_cache": False}
    common |= {"max_running_requests": 512, "cuda_graph_max_bs_decode": 256}
    if options.tiny:
        common, options.samples = {"model_path": str(model), "max_running_requests": 64}, min(options.samples, 1024)
    drafts = {} if options.tiny else draft_fields(model, 3, "STANDALONE")  # a CPU engine cannot draft
    with engines(options, {"exact-plain": common, "exact-drafts": {**common, **drafts}}) as urls:
        plain, drafting = urls["exact-plain"], urls["exact-drafts"]
        prompts = prompts_of(model)
        rows = [log_prob_row(plain, drafting, prompts, tokens=16 if options.tiny else 256)]
        print(line_of(rows[0]), flush=True)  # thousands of samples follow, and the call may be cut off
        return rows + distribution_rows(plain, drafting, prompts[4 % len(prompts)], options.samples)


def prompts_of(model: Path, questions: Sequence[str] = QUESTIONS) -> list[list[int]]:
    """Questions as the model's chat template writes them."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = list(questions)
    if tokenizer.chat_template:
        asked = [[{"role": "user", "content": question}] for question in questions]
        texts = [tokenizer.apply_chat_template(one, tokenize=False, add_generation_prompt=True) for one in asked]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def log_prob_row(plain: str, drafting: str, prompts: Sequence[Sequence[int]], *, tokens: int) -> Row:
    """Mean distance of answers' log-probs from the plain engine's prefill: with drafts, beside without."""
    gaps, biases, length = {}, {}, 1.0
    for name, url in (("plain", plain), ("drafts", drafting)):
        answers = asyncio.run(ask(url, [request(prompt, tokens) for prompt in prompts for _ in range(8)]))
        asked = [prompt for prompt in prompts for _ in range(8)]
        told = [[entry[0] for entry in answer["meta_info"]["output_token_logprobs"]] for answer in answers]
        whole = [
            request([*prompt, *answer["output_ids"]], 1) | {"logprob_start_len": 0}
            for prompt, answer in zip(asked, answers, strict=True)
        ]
        scored = asyncio.run(ask(plain, whole))
        theirs = [
            [entry[0] for entry in answer["meta_info"]["input_token_logprobs"]][-len(own) :]
            for answer, own in zip(scored, told, strict=True)
        ]
        difference = torch.tensor(told) - torch.tensor(theirs)
        gaps[name], biases[name] = difference.abs().mean().item(), difference.mean().item()
        length = length_of(answers)
    ratio = gaps["drafts"] / max(gaps["plain"], 1e-9)
    return Row(
        what="log-probs of answers with drafts / without, distance from prefill",
        shape=f"{len(prompts) * 8} x {tokens} tokens",
        figure=f"{gaps['drafts']:.5f}",
        limit=f"{gaps['plain']:.5f}",
        ratio=ratio,
        target=f"<= {NOISE}",
        holds=ratio <= NOISE or gaps["drafts"] < 1e-5,
        note=f"bias {biases['drafts']:+.5f} and {biases['plain']:+.5f}; {length:.2f} tokens a verification",
    )


def distribution_rows(plain: str, drafting: str, prompt: Sequence[int], count: int) -> list[Row]:
    """Chi-square of the tokens with and without drafts, by place of the answer; and the control."""
    rows, of_plain = [], {}
    for sampling in ({"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}):
        of_plain[sampling["temperature"]] = sampled(plain, prompt, count, sampling)[0]
        of_drafts, length = sampled(drafting, prompt, count, sampling)
        values = p_values(of_plain[sampling["temperature"]], of_drafts)
        rows.append(p_row(f"tokens with drafts as without, {settings_text(sampling)}", count, values, length))
    values = p_values(of_plain[1.0], of_plain[0.7])
    control = p_row("control: temperatures 1 and 0.7 differ", count, values, 1.0)
    is_seen = min(values) < CONTROL
    return [*rows, Row(**(vars(control) | {"target": f"< {CONTROL:g}", "holds": is_seen}))]


def settings_text(sampling: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in sampling.items())


def p_row(what: str, count: int, values: Sequence[float], length: float) -> Row:
    return Row(
        what=what,
        shape=f"{count} answers, places 2 to {PLACES}",
        figure=f"p = {min(values):.2g}",
        limit="",
        ratio=min(values),
        target=f">= {P_VALUE:g}",
        holds=min(values) >= P_VALUE,
        note=f"p by place: {', '.join(f'{value:.2g}' for value in values)}; {length:.2f} tokens a verification",
    )


def sampled(url: str, prompt: Sequence[int], count: int, sampling: Mapping[str, Any]) -> tuple[torch.Tensor, float]:
    """(the first tokens [count, PLACES] of so many answers to one prompt, tokens that a verification gave)."""
    tokens, lengths = [], []
    for _ in range(0, count, 512):
        answers = asyncio.run(ask(url, [request(prompt, PLACES, **sampling)] * min(512, count)))
        tokens += [answer["output_ids"][:PLACES] for answer in answers]
        lengths.append(length_of(answers))
    return torch.tensor(tokens), statistics.mean(lengths)


def p_values(first: torch.Tensor, second: torch.Tensor) -> list[float]:
    """`chi_square` of two samples [n, PLACES] at each place behind the first."""
    return [chi_square(first[:, place].tolist(), second[:, place].tolist()) for place in range(1, PLACES)]


def chi_square(first: Sequence[int], second: Sequence[int], *, at_least: int = 10) -> float:
    """The probability of a difference as large as this between two samples of one distribution.

    Values that are expected fewer than `at_least` times in a sample are one bin.
    """
    counts = [Counter(first), Counter(second)]
    both = counts[0] + counts[1]
    share = [len(first) / (len(first) + len(second)), len(second) / (len(first) + len(second))]
    common = [value for value, count in both.items() if count * min(share) >= at_least]
    bins = [[count[value] for value in common] for count in counts]
    rest = [len(sample) - sum(found) for sample, found in zip((first, second), bins, strict=True)]
    if sum(rest):
        bins = [[*found, left] for found, left in zip(bins, rest, strict=True)]
    observed = torch.tensor(bins, dtype=torch.float64)
    expected = torch.tensor(share, dtype=torch.float64)[:, None] * observed.sum(0)
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = observed.shape[1] - 1
    if freedom == 0:
        return 1.0
    return float(torch.special.gammaincc(torch.tensor(freedom / 2, dtype=torch.float64), statistic / 2))


# ---- part head


def head(options: Namespace) -> list[Row]:
    """Train an EAGLE head on the model's own answers, and serve it."""
    from benchmarks.eagle_head import train_head

    models = options.output / "models"
    model = prepare_model("tiny" if options.tiny else SMOLLM2, models, device=options.accelerator, gguf=options.gguf)
    draft = models / f"{model.name}-eagle"
    prompts, tokens, copies = prompts_of(model), 32 if options.tiny else 256, 4 if options.tiny else 128
    common = engine_fields(model) | {"max_total_tokens": 2**19, "max_running_requests": 1024}
    if options.tiny:
        common = {"model_path": str(model), "max_running_requests": 64}
    held_out = prompts[-2:]
    rows: list[Row] = []
    if not (draft / "config.json").is_file():
        with engines(options, {"head-teacher": common}) as urls:
            asked = [prompt for prompt in prompts[:-2] for _ in range(copies)]
            answers = asyncio.run(ask(urls["head-teacher"], [request(prompt, tokens) for prompt in asked]))
        texts = [[*prompt, *answer["output_ids"]] for prompt, answer in zip(asked, answers, strict=True)]
        losses = train_head(model, texts, draft, device=options.accelerator, seconds=10.0 if options.tiny else 90.0)
        print(f"head: loss {losses[0]:.3f} to {losses[-1]:.3f} over {len(losses)} steps", flush=True)
    if options.tiny:
        return [not_measured("a trained EAGLE head", model.name, "> 1.5 tokens", "served on CUDA only")]
    drafts = draft_fields(draft, 3, "EAGLE")
    with engines(options, {"head-plain": common, "head-drafts": {**common, **drafts}}) as urls:
        for batch in (1, 8, 32, 128):
            asked = [held_out[i % 2] for i in range(batch)]
            rate: dict[str, float] = {}
            length = 1.0
            for name, url in urls.items():
                for _ in range(2):
                    begin = time.monotonic()
                    answers = asyncio.run(ask(url, [request(prompt, tokens) for prompt in asked]))
                    rate[name] = batch * tokens / (time.monotonic() - begin)
                length = length_of(answers)
            gain = rate["head-drafts"] / rate["head-plain"]
            rows.append(
                Row("a trained EAGLE head on questions that it has not seen", f"{model.name}, {batch} at once",
                    f"{length:.2f} tokens a verification", f"{rate['head-plain']:,.0f} tok/s without drafts", gain,
                    "> 1.3 tokens", length > 1.3, "ratio: tokens/s with / without")
            )  # fmt: skip
    return rows


PARTS = {"table": table, "off": off, "exact": exact, "head": head, "train": train, "stop": stop}

if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__" and "--serve" in sys.argv:
    prepare_scheduler(json.loads(Path(sys.argv[2]).read_text()))
