"""A weight sync with a request in flight, on a real engine without prefix cache: nothing of the old weights stays."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slime.backends.megatron_utils.update_weight import base
from slime.backends.megatron_utils.update_weight.from_tensor import TensorWeightUpdater
from slime.backends.sglang_utils.sglang_engine import SGLangEngine
from slime.utils import http_utils
from slime.utils.http_utils import stream_events
from tests.integration.conftest import make_engine

PROMPT = [random.Random(0).randrange(8, 100) for _ in range(200)]
LENGTH = 1000
SAMPLING = {"max_new_tokens": LENGTH, "ignore_eos": True, "temperature": 1.0, "sampling_seed": 5}
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def engine(tiny_models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangEngine]:
    """As a run with --update-weights-in-flight starts it."""
    log = tmp_path_factory.mktemp("in_flight") / "engine_0.log"
    running = make_engine(tiny_models[0], log, disable_radix_cache=True)
    running.start(deadline_s=170)
    yield running
    running.shutdown()


@pytest.fixture(scope="module")
def models(tiny_models: tuple[Path, Path]) -> list[Any]:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

    return [Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in tiny_models]


@pytest.fixture
def updater(
    engine: SGLangEngine, tiny_models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> TensorWeightUpdater:
    """Sends the second model in three buckets."""
    weights = list(load_file(tiny_models[1] / "model.safetensors").items())
    buckets = [weights[i::3] for i in range(3)]
    monkeypatch.setattr(base, "iter_hf_buckets", lambda args, model, *, buffer_size: iter(buckets))
    args = SimpleNamespace(
        update_weight_buffer_size=1,
        update_weights_in_flight=True,
        distributed_timeout_minutes=1.0,
        hf_checkpoint=str(tiny_models[1]),
        mtp_num_layers=None,
        check_weight_update_equal=False,
        train_backend="megatron",
        multimodal_keys=None,
        offload_train=False,
    )
    made = TensorWeightUpdater(args, model=[])
    made.connect([engine], engine_sizes=[1])
    return made


def log_probs(model: Any, tokens: list[int]) -> torch.Tensor:
    """[len(tokens) - len(PROMPT)] of the response's tokens."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0]
    every = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    return every[len(PROMPT) - 1 :]


async def generate_across_a_sync(url: str, sync: Any) -> tuple[dict[str, Any], int, dict[str, Any]]:
    """Stream one response and sync in its middle.

    Returns:
        the last event, tokens that there were before the sync began, the answer to a request sent when it was done.
    """
    body = {"input_ids": PROMPT, "sampling_params": SAMPLING, "return_logprob": True}

    async def sync_and_ask_again() -> dict[str, Any]:
        await asyncio.to_thread(sync)
        return await http_utils.post(
            f"{url}/generate", {**body, "sampling_params": {**SAMPLING, "max_new_tokens": 20}}
        )

    event, begun, syncing = {}, 0, None
    async for event in stream_events(f"{url}/generate", {**body, "stream": True}):
        count = len(event["meta_info"]["output_token_logprobs"])
        if syncing is None and count >= 20:
            begun, syncing = count, asyncio.create_task(sync_and_ask_again())
    assert syncing is not None
    again = await syncing
    await http_utils.close_http_client()
    return event, begun, again


def test_a_request_in_flight_goes_on_with_the_new_weights_and_no_prefix_of_the_old_ones_is_used(
    engine: SGLangEngine, updater: TensorWeightUpdater, models: list[Any]
) -> None:
    event, begun, again = asyncio.run(generate_across_a_sync(engine.url, updater.update))
    meta = event["meta_info"]
    pairs = [(pair[0], pair[1]) for pair in meta["output_token_logprobs"]]
    assert len(pairs) == LENGTH and meta["finish_reason"]["type"] == "length", "the request was not lost"
    tokens = PROMPT + [token for _, token in pairs]
    found = torch.tensor([log_prob for log_prob, _ in pairs])
    gaps = [(log_probs(model, tokens) - found).abs() for model in models]
    # Where the weights changed: the first token that the old model does not explain.
    switch = int((gaps[0] > TOLERANCE).nonzero()[0])
    assert begun <= switch < LENGTH - 20, "the sync was in the middle"
    assert gaps[0][:switch].max() < TOLERANCE, "the old weights wrote what was there before"
    assert gaps[1][switch:].max() < TOLERANCE, "the new weights wrote the rest, over a context computed anew"
    assert gaps[1][:switch].max() > 1e-2 and gaps[0][switch:].max() > 1e-2, "the two models differ"
    assert meta["weight_version"] == "1", "the engine names only the version at the end"

    assert again["meta_info"]["cached_tokens"] == 0
    pairs = [(pair[0], pair[1]) for pair in again["meta_info"]["output_token_logprobs"]]
    expected = log_probs(models[1], PROMPT + [token for _, token in pairs])
    assert (expected - torch.tensor([log_prob for log_prob, _ in pairs])).abs().max() < TOLERANCE
