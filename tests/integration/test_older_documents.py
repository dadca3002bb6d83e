"""A run as older documents write it: a generate function that is a file and takes lists, epochs with a schedule."""

from __future__ import annotations

import json
from pathlib import Path

from slime.checkpoints.rollout_files import load_dump
from tests.integration.launch import grpo_flags, make_model, train

# It asks the engine itself, runs a tool, and writes only text and reward.
AGENT = """
import subprocess, sys
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post

async def custom_generate(args, samples, evaluation=False):
    state, url = GenerateState(args), f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    for sample in samples:
        conversation = sample.prompt
        for turn in range(args.max_turns):
            text = state.tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
            ids = state.tokenizer.encode(text, add_special_tokens=False)
            params = {"max_new_tokens": 8, "temperature": 1.0, "ignore_eos": True}
            answer = await post(url, {"input_ids": ids, "sampling_params": params})
            sample.response = answer["text"] or "0"
            if turn + 1 < args.max_turns:
                done = subprocess.run([sys.executable, "-c", "print(6 * 7)"], capture_output=True, text=True)
                conversation.append({"role": "assistant", "content": sample.response})
                conversation.append({"role": "tool", "content": done.stdout.strip()})
        sample.reward = float(len(set(sample.response)))
    return samples
"""


def test_an_agent_of_an_older_document_trains_with_a_cosine_over_its_epochs(tmp_path: Path) -> None:
    model, prompts = make_model(tmp_path / "model"), tmp_path / "prompts.jsonl"
    rows = [{"input": [{"role": "user", "content": f"{number}+1="}], "label": "1"} for number in range(8)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "custom_generate.py").write_text(AGENT)
    flags = grpo_flags(model, prompts)
    at = flags.index("--custom-rm-path")
    run = train(
        tmp_path / "out", *flags[:at], *flags[at + 2 :], "--colocate", "--rm-type", "math", "--max-turns", 2,
        "--custom-generate-function-path", tmp_path / "custom_generate.py",
        # the data source has to count the prompts, before the trainers make their schedule
        "--num-epoch", 1, "--lr-decay-style", "cosine", "--rollout-max-prompt-len", 99,
        "--save-debug-rollout-data", tmp_path / "dump.pt", "--tis-clip", 3,
    )  # fmt: skip
    assert "1 flag has no effect here (--strict-flags refuses them): --tis-clip without --use-tis." in run.printed
    assert run.printed.count("is taken as its only public coroutine") == 1
    records = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    # 8 prompts in rollouts of 4 are 2 train steps of a cosine from 1e-3: the second has half of it
    assert [record["train/lr-pg_0"] for record in records if "train/lr-pg_0" in record] == [1e-3, 5e-4]
    dump = load_dump(tmp_path / "dump.pt")
    assert dump["rollout_id"] == "1" and len(dump["samples"]) == 16
    for sample in dump["samples"]:
        assert [message["role"] for message in sample["prompt"]] == ["user", "assistant", "tool"]
        assert sample["prompt"][-1]["content"] == "42" and sample["response_length"] > 0
