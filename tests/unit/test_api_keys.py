"""The key of a run goes to the run's own servers with every request of the helpers, and is shown nowhere."""

from __future__ import annotations

import asyncio
import json
import pickle
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from fastapi.testclient import TestClient

from slime.backends.megatron_utils.server.megatron_server import Handlers, create_app
from slime.backends.sglang_utils import server_control, sglang_engine
from slime.backends.sglang_utils.engine_client import DirectEngine, EngineContact
from slime.backends.sglang_utils.external import ExternalEngine, ExternalEngineInfo
from slime.backends.sglang_utils.launch_router import Forwarder
from slime.backends.sglang_utils.server_control import Worker
from slime.config.args import Args, with_run_keys
from slime.config.sglang.topology import EngineGroupPlan
from slime.observability.wandb_utils import public_config
from slime.ray.rollout.router import RouterAddress, router_values
from slime.rollout import on_policy_distillation
from slime.rollout.rm_hub.service import Service, ask
from slime.utils import http_utils
from slime.utils.errors import HttpError
from slime.utils.http import api_keys
from slime.utils.http.api_keys import (
    ENGINE_ENV,
    ROUTER_ENV,
    SERVICE_ENV,
    HiddenText,
    RunKeys,
    command_line_without_secrets,
    headers_for,
    is_secret,
    make_keys,
    protect,
    use_keys,
    without_secrets,
)
from slime.utils.http_utils import close_http_client, stream_events
from slime.utils.types import Sample
from tests.unit.rollout_fakes import serve

KEY = "k" * 32


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_keys, "PROTECTED", api_keys.Protected())
    for name in (ROUTER_ENV, ENGINE_ENV, SERVICE_ENV):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def server() -> Any:
    """(address, Authorization headers that it was given)."""
    seen: list[str | None] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(request.headers.get("Authorization"))
        if request.path == "/stream":
            return web.Response(text='data: {"ok": true}\n\ndata: [DONE]\n\n', content_type="text/event-stream")
        return web.json_response({"ok": True})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    with serve(app) as port:
        yield f"http://127.0.0.1:{port}", seen


async def every_helper(url: str) -> None:
    await http_utils.post(f"{url}/generate", {})
    await http_utils.get(f"{url}/workers")
    assert [event async for event in stream_events(f"{url}/stream", {})] == [{"ok": True}]
    await ask(Service("a model", f"{url}/classify"), {}, Sample(index=0))
    await http_utils.close_http_client()
    await close_http_client()


def test_every_helper_sends_the_key_to_a_server_of_the_run(server: Any) -> None:
    url, seen = server
    protect(url, KEY)
    asyncio.run(every_helper(url))
    http_utils.post_sync(f"{url}/flush_cache")
    http_utils.get_sync(f"{url}/server_info")
    assert seen == [f"Bearer {KEY}"] * 6


def test_no_other_server_hears_of_the_key(server: Any) -> None:
    url, seen = server
    protect("http://127.0.0.1:1", KEY)
    asyncio.run(every_helper(url))
    assert set(seen) == {None}


def test_a_header_of_the_caller_comes_first_and_the_transport_of_post_gets_it(server: Any) -> None:
    url, seen = server
    protect(url, KEY)

    async def one() -> None:
        await http_utils.post(url, {}, headers={"Authorization": "Bearer mine"})
        await http_utils.close_http_client()

    asyncio.run(one())
    assert seen == ["Bearer mine"]
    given: list[Any] = []

    async def transport(url: str, body: bytes, headers: Any, max_retries: int) -> None:
        given.append(headers)

    http_utils.set_post_transport(transport)
    try:
        asyncio.run(http_utils.post(url, {}))
    finally:
        http_utils.set_post_transport(None)
    assert given == [{"Authorization": f"Bearer {KEY}"}], "an actor on another node knows no keys"


def test_a_run_makes_one_key_unless_it_is_given_some(monkeypatch: pytest.MonkeyPatch) -> None:
    made, other = make_keys(is_wanted=True), make_keys(is_wanted=True)
    assert made.router == made.engine != other.engine and len(made.engine or "") >= 32
    assert make_keys(is_wanted=True, engine="e") == RunKeys("e", "e")
    assert make_keys(is_wanted=True, engine="e", router="r") == RunKeys("r", "e")
    given = make_keys(is_wanted=True, router="r")
    assert given.router == "r" and given.engine not in ("r", None)
    assert make_keys(is_wanted=False) == RunKeys(None, None)
    monkeypatch.setenv(ROUTER_ENV, "of the user")
    assert make_keys(is_wanted=True) == RunKeys("of the user", "of the user")


def run_args(**changes: Any) -> Args:
    values = {"debug_train_only": False, "api_key_per_run": True, "sglang_overrides": {}, "router_overrides": {}}
    return Args(**(values | changes)).freeze()


def test_flags_of_sglang_win_and_a_run_may_go_without_a_key() -> None:
    made = with_run_keys(run_args())
    assert made.run_keys.engine and pickle.loads(pickle.dumps(made)).run_keys == made.run_keys
    flags = {"sglang_overrides": {"api_key": "e"}, "router_overrides": {"api_key": "r"}}
    assert with_run_keys(run_args(**flags)).run_keys == RunKeys("r", "e")
    assert with_run_keys(run_args(api_key_per_run=False)).run_keys == RunKeys(None, None)
    assert not hasattr(with_run_keys(run_args(debug_train_only=True)), "run_keys")


def test_nothing_that_shows_flags_shows_a_secret() -> None:
    args = Namespace(
        run_keys=RunKeys(KEY, KEY), sglang_api_key=KEY, wandb_key=KEY, wandb_project="p", code_sandbox_api_key=None,
        sglang_overrides={"api_key": KEY, "tp_size": 2}, api_key_per_run=True, key="value",
        engine_models=[EngineGroupPlan("regular", 1, 1, 0, {"api_key": KEY})],
    )  # fmt: skip
    assert KEY not in str(public_config(args)) and KEY not in repr(args.run_keys) and KEY not in str(args.run_keys)
    shown = without_secrets(vars(args))
    assert KEY not in str(shown) and shown["engine_models"][0]["settings"] == {"api_key": "***"}
    assert shown["sglang_overrides"] == {"api_key": "***", "tp_size": 2}
    assert shown["code_sandbox_api_key"] is None and shown["api_key_per_run"] is True and shown["key"] == "value"
    assert KEY not in f"{HiddenText(KEY)!r}" and f"{HiddenText(KEY)}" == KEY == HiddenText(KEY)


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("--sglang-api-key", True), ("sglang_admin_api_key", True), ("--router-control-plane-api-keys", True),
        ("--wandb-key", True), ("--sglang-ssl-keyfile-password", True), ("db_password", True), ("--input-key", False),
        ("--label-key", False), ("--reward-key", False), ("--sglang-ssl-keyfile", False),
        ("--max-tokens-per-gpu", False), ("--api-key-per-run", False), ("password_file", False),
        ("tokenizer_path", False),
    ],
)  # fmt: skip
def test_secrets_are_known_by_their_names(name: str, secret: bool) -> None:
    assert is_secret(name) is secret


def test_a_process_that_knows_the_keys_protects_routers_and_engines() -> None:
    use_keys(RunKeys("r", "e"))
    DirectEngine(EngineContact(0, "http://10.0.0.1:15000"))
    external = ExternalEngine(ExternalEngineInfo("http://10.0.0.2:15000", 1), rank=1)
    api_keys.PROTECTED.key_of.pop("10.0.0.2:15000")
    pickle.loads(pickle.dumps(external))  # in the process of a trainer
    api_keys.protect_router("http://10.0.0.3:30000")
    assert headers_for("http://10.0.0.1:15000/generate") == {"Authorization": "Bearer e"}
    assert headers_for("http://10.0.0.2:15000/pause_generation") == {"Authorization": "Bearer e"}
    assert headers_for("http://10.0.0.3:30000/workers?x=1") == {"Authorization": "Bearer r"}
    assert headers_for("http://10.0.0.1:15001") == headers_for("https://example.org") == {}
    assert Worker("http://10.0.0.1:15000").request["api_key"] == "e", "the router needs it to ask the engine"
    assert "api_key" not in Worker("http://10.0.0.9:15000").request
    use_keys(RunKeys(None, None))
    api_keys.protect_engine("http://10.0.0.1:15000")
    assert headers_for("http://10.0.0.1:15000") == {}


def test_a_given_key_is_in_no_launch_file_and_on_no_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[list[str], dict[str, str]]] = []

    class Registry:
        def start(self, command: list[str], *, name: str, log_path: Path, env: dict[str, str]) -> None:
            started.append((command, env))

    monkeypatch.setattr(sglang_engine, "registry", Registry)
    kwargs = {"host": "127.0.0.1", "port": 15000, "model_path": "m", "api_key": KEY}
    engine = sglang_engine.SGLangEngine(kwargs, rank=0, log_path=tmp_path / "engine.log", accelerator="cpu")
    engine._begin()
    ((command, env),) = started
    assert KEY not in " ".join(command) and KEY not in (tmp_path / "engine.json").read_text()
    assert env[ENGINE_ENV] == KEY and headers_for(engine.url) == {"Authorization": f"Bearer {KEY}"}
    flags = Namespace(sglang_router_request_timeout_secs=1, router_overrides={"api_key": KEY, "policy": "random"})
    values = router_values(flags, RouterAddress("127.0.0.1", 30000), prometheus_port=30001)
    assert KEY not in json.dumps(values) and values["policy"] == "random"
    assert values["prometheus_host"] == "127.0.0.1", "metrics are for this node, too"


def test_the_forwarder_asks_for_its_key_and_gives_each_engine_the_engines(server: Any) -> None:
    engine, seen = server
    with serve(Forwarder(timeout_s=5.0, api_key="r").app) as port:
        router = f"http://127.0.0.1:{port}"
        with pytest.raises(HttpError, match=r"401.*API key.*docs/security\.md"):
            server_control.list_workers_sync(router)
        protect(router, "wrong")
        with pytest.raises(HttpError, match="401"):
            server_control.list_workers_sync(router)
        protect(router, "r")
        protect(engine, "e")
        server_control.register_worker_sync(router, Worker(engine))
        assert http_utils.post_sync(f"{router}/classify", {}) == {"ok": True}
    assert seen == ["Bearer e"]


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("--lr 1 --wandb-key k1 --x 2", "--lr 1 --wandb-key *** --x 2"),
        ("--sglang-api-key=k1 k2", "--sglang-api-key=*** k2"),
        ("--api-keys k1 k2 --x k1", "--api-keys *** *** --x k1"),
        ("--wandb-k parsed --x=parsed", "--wandb-k *** --x=***"),
        ('--config {"token":"inner"}', '--config {"token":"***"}'),
        ('--train-env-vars {"HF_TOKEN":"hf-1","X":"plain"}', '--train-env-vars {"HF_TOKEN":"***","X":"plain"}'),
        (
            "--rm-url http://me:pw@host:1/x --y http://host:1/a@b",
            "--rm-url http://me:***@host:1/x --y http://host:1/a@b",
        ),
        ("--disable-api-key-per-run a --api-key-file path", "--disable-api-key-per-run a --api-key-file path"),
    ],
)
def test_a_command_line_is_shown_without_secrets(line: str, shown: str) -> None:
    parsed: dict[str, object] = {
        "wandb_key": "parsed",
        "config": {"deep": {"auth_token": ["inner"]}},
        "router_api_key": None,
    }
    parsed["train_env_vars"] = {"HF_TOKEN": "hf-1", "X": "plain"}
    assert command_line_without_secrets(line.split(" "), parsed) == shown.split(" ")


@pytest.mark.parametrize("name", ["HF_TOKEN", "OPENAI_KEY", "GH_PAT", "DB_PASS", "DB_PASSWORD", "MY_SECRET", "my_key"])
def test_secret_variables_and_passwords_in_urls_are_not_shown(name: str) -> None:
    values = {"train_env_vars": {name: "s", "PATH": "p", "KEYS": "k"}, "other": {"tool_key": "t"}}
    values |= {"urls": ["https://me:pw@host/a", "http://host:1/b"]}
    assert without_secrets(values) == {
        "train_env_vars": {name: "***", "PATH": "p", "KEYS": "k"},
        "other": {"tool_key": "t"},
        "urls": ["https://me:***@host/a", "http://host:1/b"],
    }


def test_a_teacher_with_a_key_answers_only_who_sends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """/update_weights_from_disk would load what any user of the machine names."""
    handlers = Handlers.__new__(Handlers)
    handlers.is_ready = True
    client = TestClient(create_app(handlers))
    assert client.get("/healthz").status_code == 200, "there is no key"
    monkeypatch.setenv(SERVICE_ENV, KEY)
    assert client.get("/healthz").status_code == 401
    assert client.post("/update_weights_from_disk", json={"model_path": "/tmp"}).status_code == 401
    on_policy_distillation._teacher(Namespace(rm_url="http://teacher:1/generate", http_proxy=None))
    assert headers_for("http://elsewhere:1/generate") == {}
    assert client.get("/healthz", headers=headers_for("http://teacher:1/generate")).status_code == 200
