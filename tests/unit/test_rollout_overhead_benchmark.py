"""benchmarks/rollout_overhead.py: what its bare client sends is what the loop that it is compared with sends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import rollout_overhead
from slime.rollout import data_source
from slime.rollout.sampling import generation
from tests.unit.rollout_fakes import LetterTokenizer, rollout_args


def test_the_bare_client_sends_a_body_for_each_prompt_as_our_loop_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The tokenizer is made up: bodies need its ids alone."""
    for module in (generation, data_source):
        monkeypatch.setattr(module, "load_tokenizer", lambda *_, **__: LetterTokenizer())
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ("ab", "c")))
    args = rollout_args(prompt_data=str(tmp_path / "rows.jsonl"), input_key="text", rollout_shuffle=False)
    generation.GenerateState.clear_instances()
    try:
        bodies = rollout_overhead.same_requests(args)
    finally:
        generation.GenerateState.clear_instances()
    ids = [[ord("a"), ord("b")]] * 2 + [[ord("c")]] * 2
    assert [body["input_ids"] for body in bodies] == ids, "two prompts, two samples of each"
    assert {body["sampling_params"]["max_new_tokens"] for body in bodies} == {args.rollout_max_response_len}
