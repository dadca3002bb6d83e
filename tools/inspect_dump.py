"""Look at a dump of a rollout or of a trainer's inputs, or say where two dumps differ.

    python tools/inspect_dump.py outputs/details/train_data/3.pt                # one line a sample
    python tools/inspect_dump.py outputs/details/train_data/3.pt --sample 5     # its text, and every token
    python tools/inspect_dump.py a/train_data/3.pt b/train_data/3.pt            # status 1 where they differ

Files are those of --save-debug-rollout-data and --save-debug-train-data; --dump-details writes both, and the tokenizer
that is used for the text of tokens. Columns: engine, trainer, reference and teacher are log-probs of each response
token, value is the critic's. It knows nothing about what would be right: docs/debugging.md says which gaps are normal.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script from a clone that is not installed

import torch

from slime.checkpoints.rollout_files import load_dump
from slime.utils.errors import UsageError
from slime.utils.misc import reader_may_leave

TOKEN_COLUMNS = {
    "engine": "rollout_log_probs",
    "trainer": "log_probs",
    "reference": "ref_log_probs",
    "teacher": "teacher_log_probs",
    "value": "values",
    "advantage": "advantages",
}
NOT_COMPARED = ("trace", "session_id", "non_generation_time", "prefix_cache_info", "spec_info", "data_parallel_rank")
"""They differ between two runs that do the same."""


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("path", type=Path, help="a dump")
    parser.add_argument("other", type=Path, nargs="?", help="another one, to compare with")
    parser.add_argument("--sample", type=int, nargs="+", metavar="N", help="show these places of the rollout in full")
    parser.add_argument("--tokenizer", type=Path, help="HF directory (default: tokenizer/ of --dump-details)")
    parser.add_argument("--tolerance", type=float, default=1e-6, help="numbers may differ by so much (default: 1e-6)")
    parser.add_argument(
        "--trust", action="store_true", help="also read dumps that hold objects, which runs their code"
    )
    args = parser.parse_args(argv)
    try:
        samples = load(args.path, trusted=args.trust)
        if args.other is not None:
            differences = list(diff(samples, load(args.other, trusted=args.trust), tolerance=args.tolerance))
            with reader_may_leave():
                print("\n".join(differences) or f"{len(samples)} samples are equal")
            return 1 if differences else 0
        chosen = range(len(samples)) if args.sample is None else args.sample
        if unknown := [n for n in chosen if not 0 <= n < len(samples)]:
            raise UsageError(f"--sample {unknown[0]}: {args.path} has samples 0 to {len(samples) - 1}")
        decode = decoder(args.tokenizer or args.path.parent.parent / "tokenizer", needed=args.tokenizer is not None)
        with reader_may_leave():
            for n in chosen:
                print(summary(n, samples[n]))
                if args.sample is not None:
                    print("\n".join(details(samples[n], decode)))
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def load(path: Path, *, trusted: bool = False) -> list[dict[str, Any]]:
    """The samples of a dump of either kind, with `loss_mask` and `index` under these names.

    Raises:
        UsageError: it is no such file.
    """
    found = load_dump(path, trusted=trusted).get("samples")
    if not isinstance(found, list):
        raise UsageError(
            f"{path} has no samples: it is no dump of --save-debug-rollout-data or --save-debug-train-data"
        )
    names = {"loss_masks": "loss_mask", "response_lengths": "response_length", "sample_index": "index"}
    return [{names.get(name, name): value for name, value in sample.items()} for sample in found]


def decoder(directory: Path, *, needed: bool) -> Callable[[int], str] | None:
    """What turns a token into text; None without a tokenizer, unless it is needed.

    Raises:
        UsageError: there is none where it is needed.
    """
    if not needed and not directory.is_dir():
        return None
    from slime.utils.processing_utils import load_tokenizer

    tokenizer = load_tokenizer(str(directory))
    return lambda token: str(tokenizer.decode([token]))


def summary(n: int, sample: Mapping[str, Any]) -> str:
    """One line: lengths, reward, and how far the trainer is from the engine."""
    length = sample["response_length"]
    mask = _numbers(sample.get("loss_mask")) or [1] * length
    reward = sample.get("raw_reward", sample.get("reward"))
    parts = [f"sample {n}: index {sample['index']}, {len(sample['tokens']) - length} + {length} tokens"]
    parts += [f"{int(sum(mask))} trained", f"reward {reward}"]
    if (advantages := _numbers(sample.get("advantages"))) is not None and advantages:
        parts.append(f"advantage {sum(advantages) / len(advantages):.4g}")
    gap = _gap(sample.get("rollout_log_probs"), sample.get("log_probs"), mask)
    if gap is not None:
        parts.append(f"trainer - engine: mean {gap[0]:.2e}, largest {gap[1]:.2e} at token {gap[2]}")
    return ", ".join(parts)


def details(sample: Mapping[str, Any], decode: Callable[[int], str] | None) -> Iterator[str]:
    """Prompt, response, and a row for each response token."""
    tokens, length = [int(token) for token in sample["tokens"]], sample["response_length"]
    response = tokens[len(tokens) - length :]
    texts = {name: sample.get(name) for name in ("prompt", "response")}
    if decode is not None:
        texts = {
            "prompt": texts["prompt"] or "".join(map(decode, tokens[: len(tokens) - length])),
            "response": texts["response"] or "".join(map(decode, response)),
        }
    yield from (f"  {name}: {text!r}" for name, text in texts.items() if text is not None)
    columns = {title: _numbers(sample.get(name)) for title, name in TOKEN_COLUMNS.items()}
    shown = {title: values for title, values in columns.items() if values is not None and len(values) == length}
    mask = _numbers(sample.get("loss_mask")) or [1] * length
    yield "  " + "".join(f"{title:>11}" for title in ("token", "id", "mask", *shown)) + "  text"
    for i, token in enumerate(response):
        values = "".join(f"{column[i]:11.5f}" for column in shown.values())
        text = "" if decode is None else repr(decode(token))
        yield f"  {i:11d}{token:11d}{int(mask[i]):11d}{values}  {text}".rstrip()


def diff(ours: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]], *, tolerance: float) -> Iterator[str]:
    """One sentence for each column that differs; samples are compared by their place."""
    if len(ours) != len(others):
        yield f"{len(ours)} samples and {len(others)}; compared are the first {min(len(ours), len(others))}"
    names = dict.fromkeys(name for sample in (*ours, *others) for name in sample if name not in NOT_COMPARED)
    for name in names:
        found = []
        for n, (a, b) in enumerate(zip(ours, others, strict=False)):
            if (how := _difference(a.get(name), b.get(name), tolerance)) is not None:
                found.append((n, *how))
        if found:
            n, size, where = max(found, key=lambda entry: entry[1])
            yield f"{name}: {len(found)} samples differ, first sample {found[0][0]}, most sample {n}: {where}"


def _difference(a: Any, b: Any, tolerance: float) -> tuple[float, str] | None:
    """How large a difference is, and how to say it; infinite where it is not one of numbers."""
    x, y = _numbers(a), _numbers(b)
    if x is None or y is None:
        return None if _plain(a) == _plain(b) else (float("inf"), f"{_short(a)} and {_short(b)}")
    if len(x) != len(y):
        return float("inf"), f"{len(x)} and {len(y)} values"
    gaps = [0.0 if p == q or (p != p and q != q) else abs(p - q) for p, q in zip(x, y, strict=True)]
    at = max(range(len(gaps)), key=lambda i: float("inf") if gaps[i] != gaps[i] else gaps[i], default=None)
    if at is None or gaps[at] <= tolerance:
        return None
    return gaps[at], f"by {gaps[at]:.3g} at {at} ({x[at]:.6g} and {y[at]:.6g})"


def _gap(engine: Any, trainer: Any, mask: Sequence[float]) -> tuple[float, float, int] | None:
    """Mean and largest |trainer - engine| over the trained tokens, and where that is."""
    a, b = _numbers(engine), _numbers(trainer)
    if a is None or b is None:
        return None
    gaps = [(abs(y - x), i) for i, (x, y, trained) in enumerate(zip(a, b, mask, strict=True)) if trained]
    return None if not gaps else (sum(gap for gap, _ in gaps) / len(gaps), *max(gaps))


def _numbers(value: Any) -> list[float] | None:
    """A number, a list or a tensor of them, as a flat list; None for anything else."""
    if isinstance(value, torch.Tensor):
        return [float(entry) for entry in value.flatten()]
    values = value if isinstance(value, list) else [value]
    return [float(entry) for entry in values] if all(isinstance(entry, int | float) for entry in values) else None


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, list | tuple) else value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


if __name__ == "__main__":
    sys.exit(main())
