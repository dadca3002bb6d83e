"""Several models on real CPU engines from one command line, a server that runs already, and a router for prefill.

One Ray and one start of everything for the whole file; the external server starts at the same time.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch
from aiohttp import web

from slime.backends.sglang_utils import server_control, weight_transfer
from slime.backends.sglang_utils.server_args import EngineSpec
from slime.backends.sglang_utils.server_control import Worker
from slime.backends.sglang_utils.sglang_engine import SGLangEngine
from slime.config.parse import parse_args
from slime.ray.placement import Placement, create_placement
from slime.ray.rollout.engine_control import use_distributed_post
from slime.ray.rollout.replacements import Replacements
from slime.ray.rollout.router import Router
from slime.ray.rollout.server_group import SHUTDOWN_DEADLINE_S, ServerGroup
from slime.ray.rollout.servers import RolloutServers, start_rollout_servers
from slime.rollout.sampling.engine_request import get_model_url
from slime.utils import http_utils
from slime.utils.errors import HttpError
from tests.integration.conftest import make_engine
from tests.own_ray import own_ray
from tests.unit.rollout_fakes import serve
from tests.unit.test_server_control import Script
from tools.make_tiny_model import build_parser, make_tiny_model

pytestmark = pytest.mark.timeout(900)
PROMPTS = [[5, 9, 30, 31, 77], [12, 13]]
Models = dict[str, Path]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Three models of one shape with different weights; the reward model has a head with one score."""
    from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3ForSequenceClassification

    root = tmp_path_factory.mktemp("models")
    made = {name: root / name for name in ("actor", "teacher", "reward")}
    for seed, path in enumerate(made.values()):
        flags = ["--output", path, "--layers", 2, "--init-std", 0.1, "--seed", seed]
        make_tiny_model(build_parser().parse_args([str(flag) for flag in flags]))
    config = Qwen3Config.from_pretrained(made["reward"], num_labels=1, pad_token_id=0)
    torch.manual_seed(3)
    Qwen3ForSequenceClassification(config).save_pretrained(made["reward"])
    return made


@pytest.fixture(scope="module")
def external(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A future of a server with the actor's weights that somebody else has started."""
    server = make_engine(models["actor"], tmp_path_factory.mktemp("external") / "engine.log")
    with ThreadPoolExecutor(1) as thread:
        starting = thread.submit(server.start, 600)
        yield Namespace(server=server, started=starting)
        starting.exception()
        server.shutdown()


def arguments(models: Models, output_dir: Path, *more: Any) -> Any:
    prompts = output_dir / "prompts.jsonl"
    prompts.write_text(json.dumps({"input": "1+1=", "label": "2"}) + "\n")
    line = [
        "--accelerator", "cpu", "--actor-num-gpus-per-node", 1, "--hf-checkpoint", models["actor"],
        "--model-args-from-hf", "--prompt-data", prompts, "--input-key", "input", "--label-key", "label",
        "--rm-type", "math", "--rollout-batch-size", 1, "--n-samples-per-prompt", 2, "--global-batch-size", 2,
        "--num-rollout", 1, "--rollout-max-response-len", 8, "--output-dir", output_dir, *more,
    ]  # fmt: skip
    return parse_args(argv=[str(part) for part in line])


@pytest.fixture(scope="module")
def args(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A teacher beside the actor, a slot between them that stays empty, and a managed reward model."""
    output_dir = tmp_path_factory.mktemp("run")
    (output_dir / "engines.yaml").write_text(
        "sglang:\n"
        "- name: actor\n"
        "  server_groups: [{worker_type: regular, num_gpus: 1}, {worker_type: placeholder, num_gpus: 1}]\n"
        f"- {{name: teacher, model_path: {models['teacher']}, server_groups: [{{worker_type: regular, num_gpus: 1, "
        "overrides: {max_total_tokens: 4096}}]}\n"
    )
    flags = ["--sglang-config", output_dir / "engines.yaml", "--rollout-num-gpus", 3]
    flags += ["--reward-model-path", models["reward"], "--reward-model-num-gpus", 1]
    return arguments(models, output_dir, *flags)


@pytest.fixture(scope="module")
def placement(args: Any) -> Iterator[Placement]:
    with own_ray(args):
        placed = create_placement(args)
        yield placed
        ray.util.remove_placement_group(placed.group)


@pytest.fixture(scope="module")
def servers(args: Any, placement: Placement, external: Any) -> Iterator[RolloutServers]:
    running = start_rollout_servers(args, slots=placement.engine_slots)
    running.publish()
    yield running
    running.shutdown()


def greedy(url: str, prompt: Sequence[int]) -> list[int]:
    sampling = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
    return http_utils.post_sync(url, {"input_ids": list(prompt), "sampling_params": sampling})["output_ids"]


def expected(model: Path, prompt: Sequence[int]) -> list[int]:
    """The same by transformers."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

    hf, ids = Qwen3ForCausalLM.from_pretrained(model, dtype=torch.float32).eval(), list(prompt)
    with torch.no_grad():
        for _ in range(6):
            ids.append(int(hf(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_each_model_answers_at_its_own_address_with_its_own_weights(
    servers: RolloutServers, args: Any, models: Models
) -> None:
    assert list(args.sglang_model_routers) == ["actor", "teacher", "reward"]
    assert get_model_url(args, "nobody") == get_model_url(args, "actor"), "the first model's router is the default"
    for name in ("actor", "teacher"):
        answers = [greedy(get_model_url(args, name), prompt) for prompt in PROMPTS]
        assert answers == [expected(models[name], prompt) for prompt in PROMPTS], name


def test_only_the_actors_engine_is_in_the_list_of_the_weight_sync(servers: RolloutServers) -> None:
    actor, teacher, reward = ([seat.engine for seat in model.there] for model in servers.models)
    assert [len(engines) for engines in (actor, teacher, reward)] == [1, 1, 1]
    assert servers.updatable == [(actor[0], 1)]


def test_each_engine_sits_in_the_slot_of_its_group(servers: RolloutServers, placement: Placement, args: Any) -> None:
    slots = [slot for model in args.engine_models for group in model.groups for slot in group.engine_slots]
    assert slots == [0, 2, 3], "1 is the placeholder's"
    assert len(placement.engine_slots) == 4
    urls = [model.router.address.url for model in servers.models]
    infos = [server_control.server_info_sync(server_control.list_workers_sync(url)[0]) for url in urls]
    assert [info["random_seed"] - args.seed for info in infos] == slots  # seeds follow from slots
    assert infos[1]["max_total_tokens"] == 4096 != infos[0]["max_total_tokens"]


def test_the_reward_model_scores_as_transformers_does(servers: RolloutServers, args: Any, models: Models) -> None:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3ForSequenceClassification

    hf = Qwen3ForSequenceClassification.from_pretrained(models["reward"], dtype=torch.float32).eval()
    for prompt in PROMPTS:
        answer = http_utils.post_sync(get_model_url(args, "reward", "/classify"), {"input_ids": prompt})
        with torch.no_grad():
            score = hf(torch.tensor([prompt])).logits[0, 0].item()
        # A bias that SGLang invents for its head would be off by far more.
        assert answer["embedding"] == [pytest.approx(score, abs=1e-4)]


def test_a_server_that_runs_already_is_found_out_about_used_and_left_running(
    servers: RolloutServers, external: Any, models: Models, tmp_path: Path
) -> None:
    url = external.started.result()
    args = arguments(models, tmp_path, "--rollout-external-engine-addrs", url.removeprefix("http://"))
    (info,) = args.rollout_external_engine_infos
    assert (info.url, info.model_path, info.num_gpus) == (url, str(models["actor"]), 1)
    theirs = start_rollout_servers(args, slots=[])
    ((engine, size),) = theirs.updatable
    default = f"{theirs.routers['default'].url}/generate"
    assert (engine.url, size, greedy(default, PROMPTS[0])) == (url, 1, expected(models["actor"], PROMPTS[0]))
    send_weights(engine, models["teacher"])
    assert greedy(default, PROMPTS[0]) == expected(models["teacher"], PROMPTS[0])
    assert engine.get_weight_version() == "7"
    theirs.shutdown()
    assert external.server.health() and greedy(f"{url}/generate", PROMPTS[1])


def send_weights(engine: SGLangEngine, model: Path) -> None:
    from safetensors.torch import load_file

    bucket = weight_transfer.serialize_bucket(list(load_file(model / "model.safetensors").items()))
    engine.pause("abort")
    engine.update_weights_from_tensor([bucket], load_format="flattened_bucket", weight_version="7")
    engine.flush_cache()
    engine.continue_generation()


def test_a_router_that_runs_already_is_used_and_keeps_running_without_our_engines(
    servers: RolloutServers, external: Any, models: Models, tmp_path: Path
) -> None:
    url = external.started.result()
    theirs = servers.models[1].router.address  # the teacher's stands for a router of somebody else
    others = server_control.list_workers_sync(theirs.url)
    flags = ["--sglang-router-ip", theirs.ip, "--sglang-router-port", theirs.port]
    args = arguments(models, tmp_path, "--rollout-external-engine-addrs", url, *flags)
    ours = start_rollout_servers(args, slots=[])
    assert ours.routers["default"].url == theirs.url
    # The router lists its workers in no particular order.
    assert sorted(server_control.list_workers_sync(theirs.url)) == sorted([*others, url])
    ours.shutdown()
    wait_until(lambda: sorted(server_control.list_workers_sync(theirs.url)) == sorted(others))


def test_an_external_engine_that_is_lost_gets_no_requests_until_it_is_taken_back(
    placement: Placement, external: Any, models: Models, tmp_path: Path
) -> None:
    url = external.started.result()
    flags = ["--rollout-external-engine-addrs", url, "--use-fault-tolerance"]
    args = arguments(models, tmp_path, *flags)
    ours = start_rollout_servers(args, slots=[])
    router, one = ours.routers["default"].url, Replacements(ours, args)
    assert one.urls() == {0: url} and server_control.list_workers_sync(router) == [url]
    one.lose(0, one.urls()[0], "a test says so")
    assert ours.engines == ours.updatable == []
    wait_until(lambda: server_control.list_workers_sync(router) == [])
    assert one.replace() == 1 and [engine.url for engine, _ in ours.updatable] == [url], "it answers"
    assert server_control.list_workers_sync(router) == [], "without the trainer's weights it is asked for nothing"
    one.register()
    assert server_control.list_workers_sync(router) == [url]
    ours.shutdown()
    assert external.server.health(), "it was not ours to end"


def wait_until(condition: Any) -> None:
    from slime.processes.wait import wait

    wait("a condition of the test", 120.0, condition)


def test_an_engine_that_is_starting_is_ended_at_once(
    servers: RolloutServers, placement: Placement, args: Any, tmp_path: Path
) -> None:
    """A start that fails elsewhere would wait for it otherwise: minutes, with a large model."""
    spec = EngineSpec(rank=9, model_path=args.hf_checkpoint, num_gpus=1, first_slot=1)
    slot = placement.engine_slots[1]  # the one that stays empty
    group = ServerGroup(args, [spec], [[slot]], host="127.0.0.1", log_dir=tmp_path, num_threads=1)
    (starting,) = group.launch()
    wait_until(lambda: processes_with(tmp_path / "engine_9.json"))
    begin = time.monotonic()
    group.shutdown()
    assert time.monotonic() - begin < SHUTDOWN_DEADLINE_S - 10, "it was waited for, and killed"
    with pytest.raises(ray.exceptions.RayActorError):  # else it was waited for until it had started
        ray.get(starting, timeout=60)
    wait_until(lambda: not processes_with(tmp_path / "engine_9.json"))


def processes_with(word: Path) -> list[psutil.Process]:
    return [one for one in psutil.process_iter(["cmdline"]) if str(word) in (one.info["cmdline"] or [])]


class Witness:
    """A server that notes from which process a request came, and whether its client waited for the answer."""

    def __init__(self) -> None:
        self.from_here: list[bool] = []
        self.was_given_up = threading.Event()
        self.app = web.Application()
        self.app.router.add_post("/generate", self.answer)
        self.app.router.add_post("/never", self.never)
        self.app.router.add_post("/deadly", self.deadly)
        self.killed: list[int] = []

    async def answer(self, request: web.Request) -> web.Response:
        assert request.transport is not None
        client_port = request.transport.get_extra_info("peername")[1]
        self.from_here.append(client_port in {c.laddr.port for c in psutil.Process().net_connections()})
        return web.json_response({"asked": await request.json(), "key": request.headers.get("X-SMG-Routing-Key")})

    async def deadly(self, request: web.Request) -> web.Response:
        """Kill the first client that asks, as a machine without memory does; answer the second."""
        if self.killed:
            return web.json_response("answered")
        assert request.transport is not None
        client_port = request.transport.get_extra_info("peername")[1]
        self.killed += [c.pid for c in psutil.net_connections("tcp") if c.pid and c.laddr.port == client_port]
        psutil.Process(self.killed[0]).kill()
        return await self.never(request)

    async def never(self, request: web.Request) -> web.Response:
        while request.transport is not None and not request.transport.is_closing():
            await asyncio.sleep(0.02)
        self.was_given_up.set()
        return web.Response()


def test_distributed_posts_leave_from_an_actor_with_the_same_answers_and_errors(
    placement: Placement, args: Any
) -> None:
    witness = Witness()
    with serve(witness.app) as port:
        url = f"http://127.0.0.1:{port}"
        here = asyncio.run(ask(url))
        try:
            actors = use_distributed_post(args)
            there = asyncio.run(ask(url))
            asyncio.run(give_up(url))
            assert witness.was_given_up.wait(20), "a request that is cancelled here goes on in the actor"
            asyncio.run(lose_the_actor(url))
        finally:
            http_utils.set_post_transport(None)
    assert len(actors) == 1, "one node, one actor"
    assert witness.from_here == [True, False]
    assert here == there == [{"asked": {"input_ids": [1, 2]}, "key": "s"}, 404]


async def ask(url: str) -> list[Any]:
    """The answer to a request, and the status of the error of one that is refused."""
    try:
        answer = await http_utils.post(f"{url}/generate", {"input_ids": [1, 2]}, headers={"X-SMG-Routing-Key": "s"})
        with pytest.raises(HttpError, match=f"POST {url}/nowhere was refused") as raised:
            await http_utils.post(f"{url}/nowhere", {})
        return [answer, raised.value.status]
    finally:
        await http_utils.close_http_client()


async def lose_the_actor(url: str) -> None:
    """A request in the middle of which its actor is killed is answered all the same."""
    try:
        assert await http_utils.post(f"{url}/deadly", {}) == "answered"
    finally:
        await http_utils.close_http_client()


async def give_up(url: str) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(http_utils.post(f"{url}/never", {}), 1.0)


def test_a_router_hands_requests_to_a_pair_of_prefill_and_decode_servers(tmp_path: Path) -> None:
    args = Namespace(
        sglang_router_ip=None, sglang_router_port=None, sglang_router_request_timeout_secs=60, router_overrides={}
    )
    router = Router(args, host="127.0.0.1", log_path=tmp_path / "router.log", kind="pd")
    router.launch()
    router.wait_ready()
    prefill, decode = Script(), Script()
    for script, worker_type, port in ((prefill, "prefill", 8998), (decode, "decode", None)):
        script.answers = dict.fromkeys(["/health", "/generate", "/server_info", "/get_server_info"], [(200, {})])
        script.answers |= dict.fromkeys(["/model_info", "/get_model_info"], [(200, {})])
        server_control.register_worker_sync(router.address.url, Worker(script.url, worker_type, port))
    http_utils.post_sync(f"{router.address.url}/generate", {"input_ids": [1, 2]})
    sent = [next(body for path, body in s.requests if path == "/generate") for s in (prefill, decode)]
    assert sent[0] == sent[1] and sent[0]["bootstrap_port"] == 8998  # where decode fetches the KV cache
    router.shutdown()
    for script in (prefill, decode):
        script.server.shutdown()
        script.server.server_close()
