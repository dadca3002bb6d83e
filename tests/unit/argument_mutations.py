"""Random mutations of valid command lines, for the fuzz tests.

It knows words, not flags: which flags exist it is told.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random

HF_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "attention_bias": False,
}
NUMBERS = "0 1 -1 2 3 7 8 16 1e9 -0.5 0.5 1e-400 nan inf -inf 99999999999999999999"
PATHS = (
    "data.jsonl data.jsonl@[0:1] data.jsonl@[9:] data.jsonl@[a:b] hf absent absent/deeper . / .. eval.yaml roles.yaml "
    "engines.yaml hooks.py hooks.py:reward hooks.py:absent hooks:reward json.dumps no.such.module {rollout_id} "
    "{rollout_id}/{x} %s"
)
VALUES = "auto cuda cpu grpo ppo math 1,2 model,optimizer 127.0.0.1:1 ([0]*2+[1]*2) __import__('os') None True x a=b"
ODD = ["", " ", "-", "--", "---", "=", "\0", "é", "\u202e", "😀", "'", '"', "a" * 300]
JSON = ["{}", "[]", "{", '{"a": 1}', '{"a": [1, {"b": null}]}', "[1, 2", "null"]
WORDS = [*NUMBERS.split(), *PATHS.split(), *VALUES.split(), *ODD, *JSON]


def write_files(directory: Path) -> None:
    """Make the files that the base lines and some of the words point at."""
    hf = directory / "hf"
    hf.mkdir()
    (hf / "config.json").write_text(json.dumps(HF_CONFIG))
    (hf / "tokenizer.json").write_text("{}")
    (hf / "model.safetensors").write_bytes(b"")
    (directory / "data.jsonl").write_text('{"input": "1+1=", "label": "2"}\n{"input": "2+2=", "label": "4"}\n')
    (directory / "hooks.py").write_text(
        "NUMBER, NOTHING = 3, None\n"
        "async def reward(args, sample, **kwargs):\n    return 1.0\ndef one(args):\n    return None\n"
    )
    (directory / "two.py").write_text("async def a(args, sample):\n    pass\nasync def b(args, sample):\n    pass\n")
    (directory / "eval.yaml").write_text("eval:\n  datasets:\n    - {name: add, path: data.jsonl, label_key: label}\n")
    (directory / "roles.yaml").write_text("megatron:\n  - {name: a, role: actor, overrides: {lr: 1e-5}}\n")
    (directory / "engines.yaml").write_text(
        "sglang:\n  - name: actor\n    server_groups: [{worker_type: regular, num_gpus: 1}]\n"
    )


def base_lines() -> list[list[str]]:
    """Command lines that work in the directory of `write_files`."""
    common = "--accelerator cpu --hf-checkpoint hf --model-args-from-hf --rollout-batch-size 4 --num-rollout 3 "
    rl = "--prompt-data data.jsonl --label-key label --rm-type math --n-samples-per-prompt 2 --colocate "
    sft = (
        "--prompt-data data.jsonl --debug-train-only --loss-type sft_loss --disable-compute-advantages-and-returns "
        "--rollout-function-path slime.rollout.sft_rollout.generate_rollout"
    )
    more = "--eval-interval 2 --eval-config eval.yaml --save out --save-interval 1 --use-kl-loss --ref-load hf"
    return [line.split() for line in (common + rl, common + sft, common + rl + more)]


def mutate(line: Sequence[str], random: Random, flags: Sequence[str]) -> list[str]:
    """The line with one to four random changes: words dropped, repeated, swapped, bent, or flags put in."""
    words = list(line)
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(words)) if words else 0
        change = random.randrange(7)
        if change == 0:
            words[at : at + 1] = []
        elif change == 1:
            words[at:at] = words[at : at + random.randint(1, 3)]
        elif change == 2 and words:
            other = random.randrange(len(words))
            words[at], words[other] = words[other], words[at]
        elif change == 3 and words:
            words[at] = random.choice(WORDS)
        elif change == 4 and words and words[at]:
            letter = random.randrange(len(words[at]))
            words[at] = words[at][:letter] + random.choice("-_=x0 é") + words[at][letter + random.randint(0, 1) :]
        else:
            values = [random.choice(WORDS) for _ in range(random.choice((0, 1, 1, 1, 2)))]
            words[at:at] = [random.choice(flags), *values]
    return words
