"""Write docs/reference/compatibility.md: which feature works with which, asked of the checks of a command line.

    python tools/make_compatibility.py                 write the page
    python tools/make_compatibility.py --output FILE   write it somewhere else

Two features exclude each other if their flags together are refused with a sentence that neither gets alone. Nothing is
written by hand: a new rule changes the page, and a test compares the two.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from slime.config.parse import CommandLine  # noqa: E402

DEFAULT_OUTPUT = ROOT / "docs" / "reference" / "compatibility.md"
# Megatron's shape of the model; FSDP2 reads that of transformers.
SHAPE = """--num-layers 4 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128 --max-position-embeddings 4096
    --vocab-size 1024 --swiglu --disable-bias-linear --normalization RMSNorm"""
BASE = """
    --accelerator cuda --hf-checkpoint MODEL --prompt-data DATA --rm-type math --label-key label
    --num-rollout 8 --rollout-batch-size 32 --n-samples-per-prompt 8 --global-batch-size 256
    --rollout-max-response-len 512 --ref-load REF --save SAVE --save-interval 4"""
# Name -> (flags, anchor of the page that explains it).
FEATURES = {
    "colocated": ("--colocate", "colocated.md"),
    "async, in flight": ("--rollout-num-gpus 8 --update-weights-in-flight", "async.md"),
    "async, buffer 2": ("--rollout-num-gpus 8 --async-buffer-size 2", "async.md"),
    "fully async": (
        "--rollout-num-gpus 8 --rollout-function-path slime.rollout.fully_async_rollout.generate_rollout_fully_async",
        "async.md",
    ),
    "PPO": ("--advantage-estimator ppo", "ppo.md"),
    "GSPO": ("--advantage-estimator gspo", "algorithms.md"),
    "CISPO": ("--advantage-estimator cispo --eps-clip 1", "algorithms.md"),
    "ReMax": ("--advantage-estimator remax", "algorithms.md"),
    "KL in the loss": ("--use-kl-loss --kl-loss-coef 0.001", "algorithms.md"),
    "engine's log-probs": ("--use-rollout-logprobs", "off_policy.md"),
    "TIS": ("--use-tis", "off_policy.md"),
    "old actor": ("--keep-old-actor", "off_policy.md"),
    "top-p": ("--rollout-top-p 0.9", "off_policy.md"),
    "partial rollouts": ("--partial-rollout", "data.md"),
    "group rewards": ("--group-rm", "rewards.md"),
    "SFT": (
        "--loss-type sft_loss --debug-train-only --rollout-function-path slime.rollout.sft_rollout.generate_rollout",
        "sft.md",
    ),
    "LoRA": ("--lora-rank 8", "lora.md"),
    "routing replay": ("--use-rollout-routing-replay --num-experts 8", "moe.md"),
    "experts": ("--num-experts 8", "moe.md"),
    "tensor parallel": ("--tensor-model-parallel-size 2 --sequence-parallel", "parallelism.md"),
    "pipeline parallel": ("--pipeline-model-parallel-size 2", "parallelism.md"),
    "context parallel": ("--context-parallel-size 2", "parallelism.md"),
    "delta sync": (
        "--rollout-num-gpus 8 --update-weight-mode delta --update-weight-transport disk --update-weight-disk-dir SYNC",
        "weight_sync.md",
    ),
    "FSDP2": ("--train-backend fsdp", "backends.md"),
    "optimizer on the CPU": ("--optimizer-cpu-offload", "training_options.md"),
    "async save": ("--async-save", "checkpoints.md"),
    "copies in memory": ("--peer-checkpoint-interval 1", "fault_tolerance.md"),
    "released trainers": ("--release-train", "cut_memory.md"),
    "elastic": ("--max-restarts 1 --elastic-dp", "fault_tolerance.md"),
    "deterministic": ("--deterministic", "determinism.md"),
}
HEAD = """# Compatibility: which feature with which

Made by `python tools/make_compatibility.py` from the checks that refuse a command line; do not edit.

**In short:** of the features in the first table, every pair is accepted that the second one does not name. Those are
refused before anything starts, with the sentence in the last column. `--dry-run` says the same about your own command
line.

Rules that read the model's own files are not in these tables. One of them: adapters of experts need
`--lora-serve merged`.

| feature | flags |
|---|---|
"""


def refusals(command_line: CommandLine, *features: str) -> set[str]:
    """Return the sentences that refuse these features together."""
    words = [word for name in features for word in FEATURES[name][0].split()]
    shape = [] if "fsdp" in words else SHAPE.split()
    has_engines = {"--colocate", "--rollout-num-gpus", "--debug-train-only"} & set(words)
    engines = [] if has_engines else ["--rollout-num-gpus", "8"]
    problems = command_line.check([*BASE.split(), *shape, *engines, *words]).problems
    return {*problems.wrong, *problems.unsupported}


def pairs() -> dict[tuple[str, str], str]:
    """Return the pairs that exclude each other, each with a sentence that only both together get."""
    command_line = CommandLine()
    alone = {name: refusals(command_line, name) for name in FEATURES}
    found = {}
    for one, other in itertools.combinations(FEATURES, 2):
        words = [FEATURES[name][0].split() for name in (one, other)]
        values = [{flag: value for flag, value in itertools.pairwise(line) if flag[:2] == "--"} for line in words]
        if any(values[0][flag] != values[1][flag] for flag in values[0].keys() & values[1].keys()):
            continue  # two values of one flag: a choice, not a conflict
        if new := refusals(command_line, one, other) - alone[one] - alone[other]:
            flags = values[0].keys() | values[1].keys()
            found[one, other] = min(new, key=lambda why: (-sum(flag in why for flag in flags), why))  # noqa: B023
    return found


def render() -> str:
    """Return the page."""
    rows = [f"| [{name}](../{page}) | `{flags}` |" for name, (flags, page) in FEATURES.items()]
    refused = [f"| {one} | {other} | {why.replace('|', '/')} |" for (one, other), why in pairs().items()]
    table = ["", "## Pairs that are refused", "", "| feature | with | why |", "|---|---|---|", *refused]
    end = ["", "**Next:** [the command line](../command_line.md): `--dry-run`, `--explain`.", ""]
    return HEAD + "\n".join([*rows, *table, *end])


def main() -> None:
    """Command line of this tool."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, help="file to write")
    output = parser.parse_args().output
    output.write_text(render())
    print(f"wrote {output}")


if __name__ == "__main__":
    main()
