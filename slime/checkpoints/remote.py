"""Checkpoints and HF exports at URLs: what a run reads is copied here first, what it has written is sent there.

A run works in local directories alone. `localize` gives flags with a URL such a directory, below --output-dir, and
fetches what is to be read. `Uploads` sends what is complete from a thread of the driver: a checkpoint's files first,
and the tracker file, which says that it is complete, last. URLs are fsspec's (`s3://bucket/run`); --push-to-hub sends
HF exports to a repository of the Hugging Face Hub, too.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.checkpoints.paths import MANIFEST_FILE, TRACKER_FILE, iteration_dir, latest_iteration
from slime.utils.errors import UsageError, refuse
from slime.utils.misc import attempt

if TYPE_CHECKING:
    from slime.config.args import Args

logger = logging.getLogger(__name__)

READ = ("hf_checkpoint", "ref_load", "opd_teacher_load", "load", "resume")
WRITTEN = ("save", "save_hf")
LOCAL = (
    *("output_dir", "dump_details", "save_debug_rollout_data", "save_debug_train_data", "load_debug_rollout_data"),
    *("load_forge_rollout_data", "update_weight_disk_dir", "update_weight_local_checkpoint_dir", "tb_project_name"),
    *("wandb_dir", "compile_cache_dir", "reward_model_path"),
)
UPLOAD_DEADLINE_S = 6 * 3600.0
_FETCHED = ".fetched"
_OF_ITERATION = re.compile(r"(?:^|/)(?:iter_|rollout/global_dataset_state_dict_)(\d+)[./]")
_OF_CHECKPOINT = re.compile(rf"(critic/)?(iter_\d+/|release/|rollout/global_|trackers\.json$|{TRACKER_FILE}$)")


def is_url(path: Any) -> bool:
    """Whether a path is an fsspec URL."""
    return isinstance(path, str) and re.match(r"[a-z][a-z0-9+.-]+://", path) is not None


def localize(args: Args) -> None:
    """Replace the URLs of checkpoints and exports by local directories, in place, and fetch what is read.

    `args.remote_urls` has them afterwards, by attribute.

    Raises:
        UsageError: one cannot be used, or --push-to-hub could not send anything.
    """
    refuse([*_localized(args), *_hub_problems(args)])


def _localized(args: Args) -> Iterator[str]:
    yield from _misplaced(args)
    base = Path(args.output_dir or "outputs") / "remote"
    urls = {name: vars(args)[name].rstrip("/") for name in (*READ, *WRITTEN) if is_url(vars(args)[name])}
    vars(args).update({name: str(base / url.replace("://", "/")) for name, url in urls.items()})
    args.remote_urls = urls
    steps = {"load": args.ckpt_step, "ref_load": args.ref_ckpt_step, "opd_teacher_load": args.opd_teacher_ckpt_step}
    for name in (name for name in READ if name in urls and urls[name] != urls.get("save")):
        _, error = attempt(fetch, urls[name], Path(vars(args)[name]), steps.get(name))
        if error is not None:
            yield _sentence(name, urls[name], error)
    if "save" in urls:
        goes_on = args.resume == "auto" or urls["save"] in (urls.get("load"), urls.get("resume"))
        problem, error = attempt(_open_save, urls["save"], Path(str(args.save)), goes_on=goes_on)
        if problem or error is not None:
            yield problem or _sentence("save", urls["save"], error)


def _misplaced(args: Args) -> Iterator[str]:
    """A sentence for each URL where only a path can be, which would become a local directory of that name."""
    given = [(f"--{name.replace('_', '-')}", vars(args).get(name)) for name in LOCAL]
    roles = args.megatron_role_values.items()
    given += [(f"the {role}'s {name}", value) for role, own in roles for name, value in own.items()]
    for where, value in given:
        if is_url(value):
            yield f"{where} {value} has to be a local path; docs/remote_files.md says which flags take a URL."
    if is_url(args.save) and (own_save := args.megatron_role_values["critic"].get("save")):
        yield f"the critic's save {own_save} would not be sent to --save {args.save}: leave it out of its entry."


def _sentence(name: str, url: str, error: Any) -> str:
    why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return f"--{name.replace('_', '-')} {url} cannot be used: {why}; see docs/remote_files.md."


def _open_save(url: str, place: Path, *, goes_on: bool) -> str | None:
    """Make a local --save as new as its URL; returns why it may not be written."""
    fs, inside = _place_of(url)
    tracker = f"{inside}/{TRACKER_FILE}"
    if not fs.exists(tracker):
        return None
    theirs = fs.cat_file(tracker).decode().strip()
    if not goes_on:
        return f"--save {url} holds a run (iteration {theirs}): give --resume auto to go on, or another URL."
    ours = latest_iteration(place)
    if ours is None or not theirs.isdigit() or ours < int(theirs) or not _is_same(fs, inside, place, ours):
        fetch(url, place, None)
    return None


def _is_same(fs: Any, inside: str, place: Path, iteration: int) -> bool:
    """Whether an iteration is the one at the URL, by its checksums; one that was not sent yet is newer."""
    name = f"{iteration_dir('', iteration)}/{MANIFEST_FILE}"
    theirs = f"{inside}/{name}"
    return not fs.exists(theirs) or fs.cat_file(theirs) == (place / name).read_bytes()


def _place_of(url: str) -> tuple[Any, str]:
    import fsspec

    makes_parents = {"auto_mkdir": True} if url.startswith(("file://", "local://")) else {}
    return fsspec.core.url_to_fs(url, **makes_parents)


def fetch(url: str, place: Path, step: int | None = None) -> None:
    """Copy a checkpoint root, of which one iteration, or an HF directory, to a local directory.

    Nothing is copied where the URL holds what was copied before.

    Args:
        url: of the directory.
        place: the local one.
        step: the iteration; None is the newest.

    Raises:
        FileNotFoundError: there is nothing at the URL.
    """
    fs, inside = _place_of(url)
    found = {path[len(inside) :].lstrip("/"): path for path in fs.find(inside)}
    if not found:
        raise FileNotFoundError("there is nothing")
    if TRACKER_FILE in found and step is None:
        text = fs.cat_file(found[TRACKER_FILE]).decode().strip()
        step = int(text) if text.isdigit() else None
    names = [name for name in found if step is None or _number(name) in (-1, step)]
    if TRACKER_FILE in found:
        names = [name for name in names if _OF_CHECKPOINT.match(name)]
    listing = json.dumps([(name, fs.ukey(found[name])) for name in sorted(names)])
    mark, digest = place / _FETCHED, hashlib.sha256(listing.encode()).hexdigest()
    if mark.is_file() and mark.read_text() == digest:
        return
    if mark.is_file() and TRACKER_FILE not in found:
        shutil.rmtree(place)  # another model: none of its files may stay
    logger.info("copying %d files from %s to %s", len(names), url, place)
    for last in (False, True):
        some = [name for name in names if name.endswith(TRACKER_FILE) == last]
        for name in some:
            (place / name).parent.mkdir(parents=True, exist_ok=True)
        fs.get([found[name] for name in some], [str(place / name) for name in some])
    mark.write_text(digest)


def _number(name: str) -> int:
    """The iteration to which a file belongs; -1 where it belongs to all."""
    number = _OF_ITERATION.search(name)
    return int(number[1]) if number else -1


def _hub_problems(args: Args) -> Iterator[str]:
    repo, flag = args.push_to_hub, f"--push-to-hub {args.push_to_hub}"
    if repo is None:
        return
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        yield f"{flag} is no repository of the Hub; give OWNER/NAME."
    elif os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        yield f"{flag} needs the Hub, and HF_HUB_OFFLINE forbids it; unset that, or leave the flag out."
    else:
        hub, missing = attempt(__import__, "huggingface_hub")
        if missing is not None:
            yield f"{flag} needs huggingface_hub ({missing}): pip install slime[hub]."
        elif hub is not None and not hub.get_token():
            yield f"{flag} needs a token that may write there: set HF_TOKEN, or log in by `hf auth login`."


class Uploads:
    """Sends what a run has written, from one thread at a time, while the run goes on.

    Args:
        args: reads `save`, `save_hf`, `remote_urls` and `push_to_hub`.
    """

    def __init__(self, args: Args) -> None:
        self._args = args
        urls = vars(args).get("remote_urls", {})  # args that were not parsed have none
        self._urls = {name: url for name, url in urls.items() if name in WRITTEN}
        self._repo: str | None = vars(args).get("push_to_hub")
        self._thread: threading.Thread | None = None
        self._error: Any = None
        self._sent: dict[str, tuple[int, int]] | None = None  # file of --save -> size and time when it was sent
        self._begun = latest_iteration(str(args.save)) if "save" in self._urls else None

    def open(self) -> None:
        """See whether everything can be written.

        Raises:
            UsageError: it cannot.
        """
        for name, url in self._urls.items():
            _, error = attempt(_try_to_write, url.partition("{")[0].rstrip("/"))
            if error is not None:
                raise UsageError(_sentence(name, url, error))
        if repo := self._repo:
            _, error = attempt(_make_repository, repo)
            if error is not None:
                raise UsageError(_sentence("push_to_hub", repo, error))

    @property
    def is_busy(self) -> bool:
        """Whether something is on its way."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self, rollout_id: int, *, checkpoint: bool, export: bool) -> None:
        """Send what is complete of a rollout, after what is on its way.

        Args:
            rollout_id: which.
            checkpoint: --save has one of it.
            export: --save-hf has one of it.
        """
        jobs: list[Callable[[], Any]] = []
        if checkpoint and "save" in self._urls:
            jobs.append(self._send_checkpoints)
        path = str(self._args.save_hf).format(rollout_id=rollout_id)
        if export and "save_hf" in self._urls:
            jobs.append(partial(send_directory, path, self._urls["save_hf"].format(rollout_id=rollout_id)))
        if export and self._repo:
            jobs.append(partial(push_to_hub, path, self._repo, rollout_id))
        if jobs:
            self._join()
            self._thread = threading.Thread(target=self._work, args=(jobs,), name="uploads", daemon=True)
            self._thread.start()

    def wait(self, deadline_s: float = UPLOAD_DEADLINE_S) -> str | None:
        """Wait until nothing is on its way; returns why something was not sent since the last call, if so."""
        self._join(deadline_s)
        error, self._error = self._error, None
        return None if error is None else f"{type(error).__name__}: {error}"

    def _join(self, deadline_s: float = UPLOAD_DEADLINE_S) -> None:
        if self._thread is not None:
            self._thread.join(deadline_s)
            if self._thread.is_alive():
                self._error = TimeoutError(f"not sent within {deadline_s:.0f} s")
            self._thread = None

    def _work(self, jobs: list[Callable[[], Any]]) -> None:
        for job in jobs:
            _, error = attempt(job)
            self._error = error or self._error

    def _send_checkpoints(self) -> None:
        root, (fs, inside) = Path(str(self._args.save)), _place_of(self._urls["save"])
        names = (path.relative_to(root).as_posix() for path in sorted(root.rglob("*")) if path.is_file())
        complete = latest_iteration(root)  # the data source may be writing a later state
        names = (name for name in names if _OF_CHECKPOINT.match(name) and _number(name) <= (complete or 0))
        files = {name: _stamp(root / name) for name in names}
        sent = self._there(fs, inside, files) if self._sent is None else self._sent
        trackers = sorted((name for name in files if name.endswith(TRACKER_FILE)), key=len, reverse=True)
        new = [name for name in files if sent.get(name) != files[name] and name not in trackers]
        for some in (new, *([name] for name in trackers)):  # a critic's before the actor's, which counts
            fs.put([str(root / name) for name in some], [f"{inside}/{name}" for name in some])
        if gone := [f"{inside}/{name}" for name in sent if name not in files]:
            fs.rm(gone)  # by --keep-checkpoints
        self._sent = files

    def _there(self, fs: Any, inside: str, files: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
        """Files of iterations that the run went on from; of its own nothing was sent yet."""
        begun = self._begun
        there = fs.find(inside, detail=True) if begun is not None else {}
        return {
            name: stamp
            for name, stamp in files.items()
            if begun is not None and 0 <= _number(name) <= begun
            if (found := there.get(f"{inside}/{name}")) and found["size"] == stamp[0]
        }


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _try_to_write(url: str) -> None:
    fs, inside = _place_of(url)
    fs.pipe_file(f"{inside}/.slime", b"")
    fs.rm(f"{inside}/.slime")


def _make_repository(repo: str) -> None:
    from huggingface_hub import HfApi

    hub = HfApi()
    hub.create_repo(repo, private=True, exist_ok=True)
    hub.auth_check(repo, write=True)  # one that exists is answered with, whoever asks


def send_directory(path: str, url: str) -> None:
    """Copy a local directory to a URL."""
    fs, inside = _place_of(url)
    files = [file for file in sorted(Path(path).rglob("*")) if file.is_file()]
    fs.put([str(file) for file in files], [f"{inside}/{file.relative_to(path).as_posix()}" for file in files])
    logger.info("sent %d files to %s", len(files), url)


def push_to_hub(path: str, repo: str, rollout_id: int) -> None:
    """Commit an HF export to a repository of the Hub."""
    from huggingface_hub import HfApi

    commit = HfApi().upload_folder(repo_id=repo, folder_path=path, commit_message=f"Rollout {rollout_id}")
    logger.info("pushed rollout %d: %s", rollout_id, commit.commit_url)
