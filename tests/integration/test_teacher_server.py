"""The Megatron teacher server as its users see it: processes over HTTP, compared with transformers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from slime.processes.wait import wait
from slime.ray.rollout.router import reserve_block
from slime.rollout.on_policy_distillation import reward_func
from slime.utils.http_utils import close_http_client
from slime.utils.types import Sample
from tests.unit.megatron_fakes import make_hf_model
from tests.unit.rollout_fakes import rollout_args

MODULE = "slime.backends.megatron_utils.server.megatron_server"
TOKENS = [3, 14, 15, 92, 65, 35, 89, 79, 32]


class Server:
    """A server process and how to ask it."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process, self.port = process, port

    def ask(self, path: str, body: Any = None) -> tuple[int, Any]:
        """(status, JSON) of a POST with a body, else of a GET."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def log_probs(self, tokens: list[int], **more: Any) -> list[float]:
        status, answer = self.ask("/generate", {"input_ids": tokens, **more})
        assert status == 200, answer
        pairs = answer["meta_info"]["input_token_logprobs"]
        assert pairs[0][0] is None and [pair[1] for pair in pairs] == tokens[-len(pairs) :]
        return [pair[0] for pair in pairs[1:]]


@contextmanager
def served(model: Path, *flags: str, processes: int = 1) -> Iterator[Server]:
    ports = reserve_block("127.0.0.1")  # the server takes seconds until it binds its own
    run = [sys.executable, "-m"]
    if processes > 1:
        run += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m"]
    command = [
        *run,
        MODULE,
        "--hf-checkpoint",
        str(model),
        "--accelerator",
        "cpu",
        "--teacher-port",
        str(ports[0]),
        *flags,
    ]
    process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True)
    server = Server(process, ports[0])

    def is_ready() -> bool:
        assert process.poll() is None, "the server ended"
        try:
            return server.ask("/healthz")[0] == 200
        except OSError:
            return False

    try:
        wait("the teacher server to be ready", 120, is_ready)
        yield server
    finally:
        if process.poll() is None:  # torchrun would call a signal of its own a failure
            os.kill(server.ask("/info")[1]["pid"], signal.SIGTERM)
        try:
            status = process.wait(40)
        finally:
            process.kill()
            ports.release()
    assert status == 0


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """path and transformers model of two teachers of one shape, and the path of another shape."""
    first, second, other = (tmp_path_factory.mktemp(name) for name in ("first", "second", "other"))
    model = make_hf_model(first, vocab=101)  # with two ranks the vocabulary is padded
    changed = make_hf_model(second, vocab=101)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.mul_(1.3)
    changed.save_pretrained(second)
    make_hf_model(other, num_hidden_layers=3)
    return {"first": first, "second": second, "other": other, "model": model, "changed": changed}


@pytest.fixture(scope="module")
def server(models: dict[str, Any]) -> Iterator[Server]:
    limits = ("--megatron-server-max-length", "64", "--teacher-sample-reduction-chunk-size", "3")
    with served(models["first"], *limits, "--teacher-label-reduction-chunk-size", "3") as running:
        yield running


@torch.no_grad()
def expected(model: Any, tokens: list[int]) -> torch.Tensor:
    """[len - 1, V] log-probs of what follows each token."""
    return model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)


def of_tokens(table: torch.Tensor, tokens: list[int]) -> list[float]:
    return table[range(len(tokens) - 1), tokens[1:]].tolist()


def test_log_probs_are_those_of_transformers(server: Server, models: dict[str, Any]) -> None:
    wanted = of_tokens(expected(models["model"], TOKENS), TOKENS)
    assert server.log_probs(TOKENS) == pytest.approx(wanted, abs=1e-4)
    assert server.log_probs(TOKENS, response_length=3) == pytest.approx(wanted[-3:], abs=1e-4)
    assert server.log_probs(TOKENS, logprob_start_len=2) == pytest.approx(wanted[2:], abs=1e-4)


def test_requests_that_wait_together_do_not_see_each_other(server: Server, models: dict[str, Any]) -> None:
    sequences = [[(7 * i + 3 * j) % 101 for j in range(2 + i % 13)] for i in range(40)]
    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(server.log_probs, sequences))
    for tokens, found in zip(sequences, answers, strict=True):
        assert found == pytest.approx(of_tokens(expected(models["model"], tokens), tokens), abs=1e-4)


def test_other_tokens_than_the_given_ones(server: Server, models: dict[str, Any]) -> None:
    table = expected(models["model"], TOKENS)[-4:]
    body = {"input_ids": TOKENS, "response_length": 4}
    _, answer = server.ask("/generate", body | {"top_logprobs_num": 5, "token_ids_logprob": [0, 100], "sample_n": 200})
    top, labels, drawn = (answer["meta_info"][f"input_{name}_logprobs"] for name in ("top", "token_ids", "sampled"))
    assert top[0] is labels[0] is drawn[0] is None and len(top) == len(labels) == len(drawn) == 5
    best = table.topk(5)
    for i in range(4):
        assert [entry[1] for entry in top[i + 1]] == best.indices[i].tolist()
        assert [entry[0] for entry in top[i + 1]] == pytest.approx(best.values[i].tolist(), abs=1e-4)
        assert [entry[1] for entry in labels[i + 1]] == [0, 100]
        assert [entry[0] for entry in labels[i + 1]] == pytest.approx(table[i, [0, 100]].tolist(), abs=1e-4)
        ids = [entry[1] for entry in drawn[i + 1]]
        assert [entry[0] for entry in drawn[i + 1]] == pytest.approx(table[i, ids].tolist(), abs=1e-4)
        # the share of the likelier half of the vocabulary: 200 draws, 4 standard deviations
        likely = set(table[i].topk(50).indices.tolist())
        mass = table[i, sorted(likely)].exp().sum().item()
        assert abs(sum(token in likely for token in ids) / 200 - mass) < 4 * (mass * (1 - mass) / 200) ** 0.5
    own = [[1], [2, 3], [], [4]]
    _, answer = server.ask("/generate", body | {"label_token_ids": own})
    found = answer["meta_info"]["input_token_ids_logprobs"][1:]
    assert [[entry[1] for entry in place] for place in found] == own
    assert found[1][1][0] == pytest.approx(table[1, 3].item(), abs=1e-4)


WRONG = {
    '{"input_ids": [1]}': "input_ids: List should have at least 2 items",
    '{"input_ids": [1, -2]}': "input_ids.1: Input should be greater than or equal to 0",
    '{"input_ids": [[1, 2], [3, 4]]}': "input_ids.0: Input should be a valid integer",
    '{"input_ids": [1, 101]}': "token id 101 is not in the teacher's vocabulary of 101",
    '{"input_ids": [1, 2], "response_length": 2}': "of 2 input_ids, 1 to 1 can be scored",
    '{"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 3}}': "max_new_tokens: Input should be less",
    '{"input_ids": [1, 2], "sampling_params": {"temperature": 0.5}}': "temperature: Input should be greater",
    '{"input_ids": [1, 2], "label_token_ids": [[1], [2]]}': "label_token_ids has 2 lists for 1 scored tokens",
    '{"input_ids": [1, 2], "top_logprobs_num": 102}': "top_logprobs_num 102 exceeds the vocabulary of 101",
    '{"input_ids": [1, 2], "respons_length": 1}': "respons_length: Extra inputs are not permitted",
    json.dumps({"input_ids": [1] * 65}): "input_ids has 65 tokens; --megatron-server-max-length is 64",
    '{"text": "one"}': "input_ids: Field required",
    "[1, 2]": "body: ",
}


@pytest.mark.parametrize(("body", "message"), WRONG.items())
def test_a_wrong_body_is_refused_with_what_is_wrong(server: Server, body: str, message: str) -> None:
    status, answer = server.ask("/generate", json.loads(body))
    assert status == 400 and message in answer["detail"]


def test_what_it_says_about_itself(server: Server, models: dict[str, Any]) -> None:
    assert server.ask("/detect")[1]["server"] == "megatron_teacher"
    info = server.ask("/info")[1]
    assert (info["model_path"], info["vocab_size"], info["max_length"]) == (str(models["first"]), 101, 64)
    loads = server.ask("/get_loads")[1]["loads"]
    assert loads == [{"dp_rank": 0, "num_running_reqs": 0, "num_waiting_reqs": 0, "num_waiting_tokens": 0}]


def test_it_answers_the_distillation_reward(server: Server, models: dict[str, Any]) -> None:
    sample = Sample(index=0, tokens=TOKENS, response_length=5)

    async def score() -> float:
        try:
            return await reward_func(rollout_args(rm_url=f"http://127.0.0.1:{server.port}/generate"), sample)
        finally:
            await close_http_client()

    assert asyncio.run(score()) == 0.0
    wanted = of_tokens(expected(models["model"], TOKENS), TOKENS)[-5:]
    assert sample.teacher_log_probs == pytest.approx(wanted, abs=1e-4)


def test_weights_are_replaced_or_kept(server: Server, models: dict[str, Any], tmp_path: Path) -> None:
    def update(path: Path, **more: Any) -> tuple[int, Any]:
        return server.ask("/update_weights_from_disk", {"model_path": str(path), **more})

    def scores_as(name: str) -> bool:
        return server.log_probs(TOKENS) == pytest.approx(of_tokens(expected(models[name], TOKENS), TOKENS), abs=1e-4)

    status, answer = update(models["other"])
    assert status == 400 and "is a model with --num-layers 3, the flags say 2" in answer["detail"]
    status, answer = update(tmp_path)
    assert status == 400 and "is no checkpoint" in answer["detail"]
    (tmp_path / "config.json").write_text((models["second"] / "config.json").read_text())
    status, answer = update(tmp_path)  # a config without weights
    assert status == 400 and "The weights are as they were." in answer["detail"]
    assert scores_as("model")
    assert update(models["second"], weight_version="new")[0] == 200
    assert scores_as("changed")
    assert server.ask("/info")[1]["weight_version"] == "new"
    assert update(models["first"])[0] == 200 and scores_as("model")


def test_two_ranks_are_one_teacher(models: dict[str, Any]) -> None:
    with served(models["first"], processes=2) as both:
        table = expected(models["model"], TOKENS)
        assert both.log_probs(TOKENS) == pytest.approx(of_tokens(table, TOKENS), abs=1e-4)
        _, answer = both.ask("/generate", {"input_ids": TOKENS, "top_logprobs_num": 2, "response_length": 1})
        (place,) = answer["meta_info"]["input_top_logprobs"][1:]
        assert [entry[1] for entry in place] == table[-1].topk(2).indices.tolist()
        body = {"model_path": str(models["second"])}
        assert both.ask("/update_weights_from_disk", body)[0] == 200
        wanted = of_tokens(expected(models["changed"], TOKENS), TOKENS)
        assert both.log_probs(TOKENS) == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize(
    ("flags", "message"),
    {
        "--hf-checkpoint gone": "--hf-checkpoint gone is no HF checkpoint",
        "--hf-checkpoint {first} --load gone": "--load gone is no checkpoint",
        "--hf-checkpoint {first} --load {other}": "is a model with --num-layers 3, the flags say 2",
        "--hf-checkpoint {first} --tensor-model-parallel-size 2": "--tensor-model-parallel-size 2 with 1 processes",
    }.items(),
)
def test_a_wrong_command_line_ends_with_a_sentence(
    models: dict[str, Any], flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from slime.backends.megatron_utils.server.megatron_server import main

    assert main([*flags.format(**models).split(), "--accelerator", "cpu"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and message in said


def test_a_port_in_use_is_named_before_the_model_is_loaded(
    models: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    from slime.backends.megatron_utils.server.megatron_server import main

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["--hf-checkpoint", str(models["first"]), "--accelerator", "cpu", "--teacher-port", port]) == 2
    assert f"--teacher-port {port} cannot be used: Address already in use." in capsys.readouterr().err
