"""A real SGLang server on CPU: its numbers are those of transformers, before and after weights are sent to it."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from slime.backends.megatron_utils.update_weight.buckets import BucketBuffers
from slime.backends.sglang_utils import server_control, weight_transfer
from slime.backends.sglang_utils.sglang_engine import EngineStartError, SGLangEngine
from slime.utils import http_utils
from tests.integration.conftest import make_engine

T = TypeVar("T")
PROMPTS = [[5], [9, 30, 31, 77], [random.Random(0).randrange(8, 100) for _ in range(60)]]


@pytest.fixture(scope="module")
def models(tiny_models: tuple[Path, Path]) -> list[Any]:
    """The two models in transformers."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

    return [Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in tiny_models]


def run(request: Coroutine[Any, Any, T]) -> T:
    """A request on an event loop of its own."""

    async def and_close() -> T:
        try:
            return await request
        finally:
            await http_utils.close_http_client()

    return asyncio.run(and_close())


def generate(engine: SGLangEngine, input_ids: list[int], **sampling: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": 16, "ignore_eos": True, "temperature": 0.0} | sampling
    payload = {"input_ids": input_ids, "sampling_params": sampling, "return_logprob": True}
    return http_utils.post_sync(f"{engine.url}/generate", payload)


def largest_gap(engine: SGLangEngine, model: Any, **sampling: Any) -> float:
    """Between the log-probs of what the engine answers and transformers' for the same tokens, at temperature 1."""
    gap = 0.0
    for prompt in PROMPTS:
        answer = generate(engine, prompt, **sampling)
        pairs = [(entry[0], entry[1]) for entry in answer["meta_info"]["output_token_logprobs"]]
        response = [token for _, token in pairs]
        assert response == answer["output_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + response])).logits[0]
        expected = logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(1, torch.tensor(response)[:, None])[:, 0]
        gap = max(gap, (expected - torch.tensor([log_prob for log_prob, _ in pairs])).abs().max().item())
    return gap


def weights(model: Any) -> list[tuple[str, torch.Tensor]]:
    """HF name and tensor of each parameter; a tied output embedding is left out, as the weight sync does."""
    return [(name, tensor.detach().clone()) for name, tensor in model.named_parameters()]


def num_running(url: str) -> int:
    loads = server_control.loads_sync(url)
    return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)


def send_as_tensor(engine: SGLangEngine, model: Any, version: str) -> None:
    handle = weight_transfer.serialize_bucket(weights(model))
    engine.update_weights_from_tensor([handle], load_format="flattened_bucket", weight_version=version)
    engine.flush_cache()


def test_weights_sent_as_a_bucket_are_the_ones_it_answers_with(engine: SGLangEngine, models: list[Any]) -> None:
    send_as_tensor(engine, models[0], "6")  # other tests may have sent it others
    assert largest_gap(engine, models[0]) < 1e-4
    assert largest_gap(engine, models[1]) > 1e-2, "the two models must differ for this test to mean anything"
    send_as_tensor(engine, models[1], "7")
    assert largest_gap(engine, models[1]) < 1e-4
    assert largest_gap(engine, models[1], temperature=1.0, sampling_seed=3) < 1e-4
    assert engine.get_weight_version() == "7"


def test_a_bucket_has_a_handle_for_each_receiver(engine: SGLangEngine, models: list[Any]) -> None:
    # The engine stands for every receiver in turn: what one opens and closes must still be there for the next.
    flat = BucketBuffers(1, 1, torch.device("cpu")).fill(0, weights(models[0]))
    handles, _ = weight_transfer.serialize_flat(flat.data, flat.places, 3)
    for version, handle in enumerate(handles):
        engine.update_weights_from_tensor([handle], load_format="flattened_bucket", weight_version=f"r{version}")
    assert engine.get_weight_version() == "r2"


def test_a_seed_gives_the_same_tokens_in_another_order_and_batch(engine: SGLangEngine) -> None:
    def all_at_once(order: list[int]) -> dict[int, list[int]]:
        async def one(seed: int) -> tuple[int, list[int]]:
            sampling = {"max_new_tokens": 12, "temperature": 1.0, "sampling_seed": seed, "ignore_eos": True}
            payload = {"input_ids": PROMPTS[seed % 3], "sampling_params": sampling}
            return seed, (await http_utils.post(f"{engine.url}/generate", payload))["output_ids"]

        async def together() -> dict[int, list[int]]:
            return dict(await asyncio.gather(*(one(seed) for seed in order)))

        return run(together())

    seeds = list(range(24))
    engine.flush_cache()  # what is cached may come from other weights
    first = all_at_once(seeds)
    engine.flush_cache()
    shuffled = random.Random(1).sample(seeds, len(seeds))
    assert all_at_once(shuffled) == first
    assert all_at_once(shuffled[:5]) == {seed: first[seed] for seed in shuffled[:5]}
    assert len({tuple(tokens) for tokens in first.values()}) == len(seeds), "each seed its own response"


def test_pausing_ends_requests_and_a_flush_waits_for_them(engine: SGLangEngine) -> None:
    answers: list[dict[str, Any]] = []
    request = threading.Thread(
        target=lambda: answers.append(generate(engine, [5, 6], max_new_tokens=2000, temperature=1.0))
    )
    request.start()
    wait_until(lambda: num_running(engine.url) == 1)
    with pytest.raises(TimeoutError, match="to flush its prefix cache"):
        engine.flush_cache(deadline_s=0)
    engine.pause("abort")
    request.join(60)
    assert answers[0]["meta_info"]["finish_reason"]["type"] == "abort"
    engine.flush_cache()
    engine.continue_generation()
    assert len(generate(engine, [5, 6], max_new_tokens=3)["output_ids"]) == 3


def wait_until(condition: Any, deadline_s: float = 60.0) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_failed_start_quotes_the_log_and_is_noticed_at_once(tmp_path: Path) -> None:
    broken = tmp_path / "model"
    broken.mkdir()
    (broken / "config.json").write_text('{"architectures": ["NoSuchModel"], "model_type": "qwen3"}')
    engine = make_engine(broken, tmp_path / "engine_3.log")
    with pytest.raises(EngineStartError) as raised:
        engine.start(deadline_s=10_000)  # the test's own limit ends it when it waits for that
    message = str(raised.value)
    assert "engine_3.log" in message
    assert "ValueError" in message and "NoSuchModel" in message, message
    assert engine.pid is None and not raised.value.port_taken


def test_a_taken_port_is_recognised(tiny_models: tuple[Path, Path], tmp_path: Path) -> None:
    engine = make_engine(tiny_models[0], tmp_path / "engine_0.log")
    thief = socket.create_server(("127.0.0.1", int(engine.url.rpartition(":")[2])))
    with thief, pytest.raises(EngineStartError) as raised:
        engine.start(deadline_s=120)
    assert raised.value.port_taken
