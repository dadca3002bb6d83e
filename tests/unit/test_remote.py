"""Checkpoints and exports at URLs: file, memory and S3 (a local server), and a Hub that speaks the documented API."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pytest

from slime.checkpoints import remote
from slime.checkpoints.paths import TRACKER_FILE, iteration_dir, state_path
from slime.checkpoints.remote import Uploads, fetch, localize
from slime.config.args import Args
from slime.utils.errors import UsageError
from tests.unit.s3_server import s3 as s3

FLAGS: dict[str, Any] = dict.fromkeys(
    ("hf_checkpoint", "ref_load", "opd_teacher_load", "load", "resume", "save", "save_hf", "push_to_hub", "ckpt_step",
     "ref_ckpt_step", "opd_teacher_ckpt_step")
)  # fmt: skip


def flags(tmp_path: Path, **given: Any) -> Args:
    return Args(**FLAGS | {"output_dir": str(tmp_path / "out"), "megatron_role_values": {"critic": {}}} | given)


def localized(tmp_path: Path, **given: Any) -> Args:
    args = flags(tmp_path, **given)
    localize(args)
    return args


def problems_of(args: Args) -> list[str]:
    try:
        localize(args)
    except UsageError as error:
        return error.messages
    return []


def write(root: Path, iteration: int, text: str) -> None:
    """A checkpoint, as far as its files' names go."""
    directory = iteration_dir(root, iteration)
    for path in (directory / "weights.distcp", directory / "manifest.json", state_path(root, iteration)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text} {path.name}")
    (root / "metrics.jsonl").write_text("stays here")
    (root / TRACKER_FILE).write_text(str(iteration))


def sent(uploads: Uploads, iteration: int, **parts: bool) -> None:
    uploads.begin(iteration, **{"checkpoint": False, "export": False} | parts)
    assert uploads.wait() is None


@pytest.fixture(params=["file", "memory", "s3"])
def root_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "s3":
        request.getfixturevalue("s3")
    inside = {"file": str(tmp_path / "there"), "memory": f"/{tmp_path.name}", "s3": "bucket"}[request.param]
    return f"{request.param}://{inside}"


def test_a_run_goes_on_elsewhere_from_what_it_sent(root_url: str, tmp_path: Path) -> None:
    url = f"{root_url}/run"
    args = localized(tmp_path, save=url)
    uploads, root = Uploads(args), Path(str(args.save))
    uploads.open()
    for iteration in (0, 1):
        write(root, iteration, f"of {iteration}")
        sent(uploads, iteration, checkpoint=True)
    again = localized(tmp_path / "elsewhere", save=url, resume="auto")
    there = Path(str(again.save))
    assert there != root and (there / TRACKER_FILE).read_text() == "1"
    files = {path.relative_to(there).as_posix() for path in there.rglob("*") if path.is_file()}
    one = "iter_0000001/weights.distcp", "iter_0000001/manifest.json", "rollout/global_dataset_state_dict_1.pt"
    assert files == {*one, TRACKER_FILE, ".fetched"}, "the newest iteration alone, and nothing but checkpoints"
    assert (there / one[0]).read_text() == "of 1 weights.distcp"
    older = localized(tmp_path / "older", load=url, ckpt_step=0)
    assert (iteration_dir(str(older.load), 0) / "weights.distcp").read_text() == "of 0 weights.distcp"


def test_what_the_run_deletes_is_deleted_there_and_nothing_else(root_url: str, tmp_path: Path) -> None:
    url = f"{root_url}/run"
    fs, inside = fsspec.core.url_to_fs(url)
    args = localized(tmp_path, save=url)
    root, uploads = Path(str(args.save)), Uploads(args)
    fs.pipe_file(f"{inside}/notes.txt", b"mine") if "file" not in root_url else None
    write(root, 0, "x")
    sent(uploads, 0, checkpoint=True)
    for path in (iteration_dir(root, 0) / "weights.distcp", iteration_dir(root, 0) / "manifest.json"):
        path.unlink()
    write(root, 1, "y")
    write_later = state_path(root, 2)
    write_later.write_text("is being written")
    sent(uploads, 1, checkpoint=True)
    names = {path[len(inside) :].lstrip("/") for path in fs.find(inside)} - {"notes.txt"}
    assert names == {
        "iter_0000001/weights.distcp", "iter_0000001/manifest.json", TRACKER_FILE,
        *(f"rollout/global_dataset_state_dict_{number}.pt" for number in (0, 1)),
    }  # fmt: skip
    assert fs.exists(f"{inside}/notes.txt") or "file" in root_url


def test_a_run_that_went_on_sends_its_new_files_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"memory://{tmp_path.name}/run"
    args = localized(tmp_path, save=url)
    write(Path(str(args.save)), 0, "x")
    sent(Uploads(args), 0, checkpoint=True)
    again = localized(tmp_path / "b", save=url, resume="auto")
    uploads, put = Uploads(again), []
    write(Path(str(again.save)), 1, "y")
    monkeypatch.setattr(
        fsspec.get_filesystem_class("memory"), "put", lambda self, here, there: put.extend(there)
    )  # what a user would pay for
    sent(uploads, 1, checkpoint=True)
    assert put[-1].endswith(TRACKER_FILE) and not [name for name in put if "_0000000/" in name or "_0.pt" in name]
    assert len(put) == 4


def test_a_checkpoint_that_was_never_sent_is_newer_than_the_urls(tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}/run"
    args = localized(tmp_path, save=url)
    root = Path(str(args.save))
    write(root, 0, "x")
    sent(Uploads(args), 0, checkpoint=True)
    write(root, 1, "lost its machine before it was sent")
    localized(tmp_path, save=url, resume="auto")
    assert (root / TRACKER_FILE).read_text() == "1"
    write(root, 0, "another run's of the same number")
    localized(tmp_path, save=url, resume="auto")
    assert (iteration_dir(root, 0) / "weights.distcp").read_text() == "x weights.distcp"


def test_an_hf_directory_is_copied_once_until_it_changes(root_url: str, tmp_path: Path) -> None:
    fs, inside = fsspec.core.url_to_fs(f"{root_url}/model")
    fs.makedirs(inside, exist_ok=True) if root_url.startswith("file") else None
    for name in ("config.json", "old.safetensors"):
        fs.pipe_file(f"{inside}/{name}", b"1")
    args = localized(tmp_path, hf_checkpoint=f"{root_url}/model/")
    place = Path(args.hf_checkpoint)
    assert sorted(path.name for path in place.iterdir()) == [".fetched", "config.json", "old.safetensors"]
    (place / "config.json").write_text("untouched")
    fetch(f"{root_url}/model", place)
    assert (place / "config.json").read_text() == "untouched"
    fs.rm(f"{inside}/old.safetensors")
    fs.pipe_file(f"{inside}/new.safetensors", b"2")
    fetch(f"{root_url}/model", place)
    assert sorted(path.name for path in place.iterdir()) == [".fetched", "config.json", "new.safetensors"]


def test_exports_are_sent_under_the_number_of_their_rollout(root_url: str, tmp_path: Path) -> None:
    args = localized(tmp_path, save_hf=f"{root_url}/hf/{{rollout_id}}")
    uploads = Uploads(args)
    uploads.open()
    export = Path(str(args.save_hf).format(rollout_id=7))
    export.mkdir(parents=True)
    (export / "config.json").write_text("{}")
    sent(uploads, 7, export=True)
    fs, inside = fsspec.core.url_to_fs(f"{root_url}/hf/7/config.json")
    assert fs.cat_file(inside) == b"{}"


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"load": "memory://nowhere/run"}, "--load memory://nowhere/run cannot be used: FileNotFoundError: there is"),
        ({"save": "nosuch://bucket/run"}, "--save nosuch://bucket/run cannot be used: ValueError: Protocol not known"),
        ({"hf_checkpoint": "s3://none/x"}, "--hf-checkpoint s3://none/x cannot be used: "),
    ],
)
def test_a_url_that_cannot_be_used_is_named(s3: Any, tmp_path: Path, given: dict[str, str], sentence: str) -> None:
    (problem,) = problems_of(flags(tmp_path, **given))
    assert problem.startswith(sentence) and problem.endswith("see docs/remote_files.md.")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"dump_details": "s3://b/d"}, "--dump-details s3://b/d has to be a local path"),
        ({"output_dir": "s3://b/o"}, "--output-dir s3://b/o has to be a local path"),
        ({"megatron_role_values": {"critic": {"load": "s3://b/c"}}}, "the critic's load s3://b/c has to be a local"),
        ({"save": "memory://x/y", "megatron_role_values": {"critic": {"save": "own"}}}, "the critic's save own would"),
    ],
)
def test_a_url_where_a_path_belongs_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (problem,) = problems_of(flags(tmp_path, **given))
    assert problem.startswith(sentence) and not list(tmp_path.iterdir())


def test_a_run_at_a_url_is_not_written_over(tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}/run"
    args = localized(tmp_path, save=url)
    write(Path(str(args.save)), 3, "x")
    sent(Uploads(args), 3, checkpoint=True)
    (problem,) = problems_of(flags(tmp_path / "b", save=url))
    assert problem == f"--save {url} holds a run (iteration 3): give --resume auto to go on, or another URL."
    localize(flags(tmp_path / "b", save=url, load=url))


def test_a_url_that_may_not_be_written_ends_the_run_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError("Access Denied")

    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "pipe_file", refuse)
    with pytest.raises(UsageError, match="--save memory://x/run cannot be used: PermissionError: Access Denied"):
        Uploads(localized(tmp_path, save="memory://x/run")).open()


def test_an_upload_that_fails_is_reported_once_and_made_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = localized(tmp_path, save=f"memory://{tmp_path.name}/run")
    uploads, place_of = Uploads(args), remote._place_of
    write(Path(str(args.save)), 0, "x")

    def lost(url: str) -> Any:
        raise OSError("connection reset")

    monkeypatch.setattr(remote, "_place_of", lost)
    uploads.begin(0, checkpoint=True, export=False)
    assert uploads.wait() == "OSError: connection reset" and uploads.wait() is None
    monkeypatch.setattr(remote, "_place_of", place_of)
    sent(uploads, 0, checkpoint=True)
    assert fsspec.filesystem("memory").exists(f"/{tmp_path.name}/run/{TRACKER_FILE}")


# ---- the Hub


class Hub(BaseHTTPRequestHandler):
    """The part of the Hub's API that commits use, with large files by Git LFS; it keeps what it gets."""

    url = ""
    asked: list[str] = []
    repos: dict[str, bool] = {}
    objects: dict[str, bytes] = {}
    commits: list[tuple[str, dict[str, bytes]]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.asked.append(self.path)
        if self.headers.get("Authorization") != "Bearer hf_good":
            return self._answer(401, {"error": "Invalid username or password."})
        if self.path == "/api/repos/create":
            wanted = json.loads(body)
            name = f"{wanted['organization']}/{wanted['name']}"
            self.repos[name] = wanted.get("private") or wanted.get("visibility") == "private"
            return self._answer(200, {"url": f"{self.url}/{name}"})
        if self.path == "/api/models/me/tiny/preupload/main":
            modes = {True: "lfs", False: "regular"}
            return self._answer(200, {"files": [
                {**file, "uploadMode": modes[file["path"].endswith(".safetensors")], "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]})  # fmt: skip
        if self.path == "/me/tiny.git/info/lfs/objects/batch":
            return self._answer(200, {"transfer": "basic", "objects": [
                {**wanted, "actions": {"upload": {"href": f"{self.url}/lfs/{wanted['oid']}"}}}
                for wanted in json.loads(body)["objects"]
            ]})  # fmt: skip
        if self.path == "/api/models/me/tiny/commit/main":
            return self._commit([json.loads(line) for line in body.splitlines()])
        return self._answer(404, {"error": self.path})

    def do_PUT(self) -> None:
        self.objects[self.path.removeprefix("/lfs/")] = self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(200, {})

    def do_GET(self) -> None:
        """The repository may be read by all, and written with the good token."""
        self.asked.append(self.path)
        is_refused = self.path.endswith("/auth-check/write") and self.headers["Authorization"] != "Bearer hf_good"
        self._answer(403 if is_refused else 200, {"id": "me/tiny", "sha": "0" * 40, "siblings": []})

    def _commit(self, lines: list[dict[str, Any]]) -> None:
        files: dict[str, bytes] = {}
        for line in lines[1:]:
            value = line["value"]
            is_large = line["key"] == "lfsFile"
            files[value["path"]] = self.objects[value["oid"]] if is_large else base64.b64decode(value["content"])
        self.commits.append((lines[0]["value"]["summary"], dict(sorted(files.items()))))
        self._answer(200, {"commitUrl": f"{self.url}/me/tiny/commit/1", "commitOid": "1", "success": True})

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        pass


PUSH = """
import sys
from slime.checkpoints.remote import Uploads
from slime.config.args import Args
from slime.utils.errors import UsageError
uploads = Uploads(Args(save=None, save_hf=sys.argv[1], push_to_hub="me/tiny", remote_urls={}))
try:
    uploads.open()
except UsageError as error:
    sys.exit(str(error))
uploads.begin(4, checkpoint=False, export=True)
sys.exit(uploads.wait())
"""


def push(export: Path, token: str) -> tuple[str, list[str]]:
    """What a process that pushes an export says at its end, and the paths that the Hub was asked for."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Hub.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    env = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    env |= {"HF_ENDPOINT": Hub.url, "HF_TOKEN": token, "HF_HUB_DISABLE_XET": "1"}
    process = subprocess.run(
        [sys.executable, "-c", PUSH, str(export)], env=env, capture_output=True, text=True, timeout=60
    )
    server.shutdown()
    server.server_close()
    return process.stderr, Hub.asked


def test_an_export_is_pushed_to_the_hub_as_a_commit(tmp_path: Path) -> None:
    export = tmp_path / "hf"
    export.mkdir()
    weights = b"\0" * 1000
    (export / "config.json").write_text("{}")
    (export / "model.safetensors").write_bytes(weights)
    said, _ = push(export, "hf_good")
    assert Hub.repos == {"me/tiny": True}, (said, "it is private")
    assert Hub.commits == [("Rollout 4", {"config.json": b"{}", "model.safetensors": weights})], said
    refused, asked = push(export, "hf_bad")
    assert refused.startswith("--push-to-hub me/tiny cannot be used: ") and "403" in refused
    assert len(Hub.commits) == 1 and asked[-1] == "/api/models/me/tiny/auth-check/write", "nothing was begun"


@pytest.mark.parametrize(
    ("repo", "env", "sentence"),
    [
        ("me", {}, "--push-to-hub me is no repository of the Hub; give OWNER/NAME."),
        ("me/x", {"HF_HUB_OFFLINE": "1"}, "--push-to-hub me/x needs the Hub, and HF_HUB_OFFLINE forbids it"),
        ("me/x", {"HF_TOKEN": ""}, "--push-to-hub me/x needs a token that may write there: set HF_TOKEN"),
        ("me/x", {"HF_TOKEN": "hf_x"}, None),
        (None, {}, None),
    ],
)
def test_a_push_that_cannot_work_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repo: str | None, env: dict[str, str], sentence: str | None
) -> None:
    for name, value in {"HF_HUB_OFFLINE": "0", **env}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    problems = problems_of(flags(tmp_path, push_to_hub=repo))
    assert not problems if sentence is None else problems[0].startswith(sentence)
