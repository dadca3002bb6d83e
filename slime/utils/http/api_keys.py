"""The API keys of a run's routers and engines, to which addresses of this process's requests they are added, and which
flags hold secrets.

A run makes its key when it starts (`RunKeys`), and hands it from process to process: in Ray calls, and to servers in
their environment; never on a command line, in a file, or to an address that is not the run's. The HTTP helpers of
`http_utils` ask `headers_for`, so code that uses them need not know that there are keys. Other clients send
`Authorization: Bearer $SLIME_API_KEY`.

Everything that shows flags shows them without secrets. That errs on the side of hiding, by the flags' names: a secret
under another name is shown.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

ROUTER_ENV = "SLIME_API_KEY"
"""Of the routers, to which user code sends its requests; set in every process of a run that runs user code."""
ENGINE_ENV = "SLIME_ENGINE_API_KEY"
SERVICE_ENV = "SLIME_SERVICE_KEY"
"""Of servers that a user starts for a run (Megatron teacher, rollout buffer), which ask for it where it is set."""
HIDDEN = "***"


@dataclass(frozen=True)
class RunKeys:
    """What the routers and the engines of a run ask for; None asks for nothing. Its text shows neither."""

    router: str | None = field(default=None, repr=False)
    engine: str | None = field(default=None, repr=False)


class HiddenText(str):
    """Text that `repr` does not show: SGLang logs its arguments."""

    def __repr__(self) -> str:
        return repr(HIDDEN)


class Protected:
    """host:port of each server -> its key, in this process."""

    def __init__(self) -> None:
        self.key_of: dict[str, str] = {}


PROTECTED = Protected()


def make_keys(*, is_wanted: bool, router: str | None = None, engine: str | None = None) -> RunKeys:
    """The keys of a new run: those that were given, else $SLIME_API_KEY, else one that nobody else knows.

    Args:
        is_wanted: servers without a given key get one.
        router: of --router-api-key.
        engine: of --sglang-api-key.
    """
    made = (os.environ.get(ROUTER_ENV) or secrets.token_urlsafe(32)) if is_wanted else None
    engine = engine or made
    return RunKeys(router or engine, engine)


def use_keys(keys: RunKeys | None, environment: MutableMapping[str, str] = os.environ) -> None:
    """Have this process, and what it starts, know the keys of its run; None changes nothing.

    Args:
        keys: of the run.
        environment: of another process, to have that one know them.
    """
    if keys is None:
        return
    for name, key in ((ROUTER_ENV, keys.router), (ENGINE_ENV, keys.engine)):
        if key:
            environment[name] = key
        else:
            environment.pop(name, None)


def protect(url: str, key: str | None) -> None:
    """Add a key to this process's requests to a server from now on; None adds none."""
    if key:
        PROTECTED.key_of[_server(url)] = key
    else:
        PROTECTED.key_of.pop(_server(url), None)


def protect_router(url: str) -> None:
    """As `protect`, with the key of the run's routers."""
    protect(url, os.environ.get(ROUTER_ENV))


def protect_engine(url: str, key: str | None = None) -> None:
    """As `protect`, with the key of the run's engines, or one that this engine has of its own."""
    protect(url, key or os.environ.get(ENGINE_ENV))


def protect_service(url: str) -> None:
    """As `protect`, with the key of servers that a user starts for a run, where it is set."""
    if key := os.environ.get(SERVICE_ENV):
        protect(url, key)


def is_refused(authorization: str | None) -> bool:
    """Whether a server that a user starts for a run refuses a request with this header."""
    key = os.environ.get(SERVICE_ENV)
    return bool(key) and not secrets.compare_digest((authorization or "").encode(), f"Bearer {key}".encode())


def key_of(url: str) -> str | None:
    """The key that requests to this address get."""
    return PROTECTED.key_of.get(_server(url))


def headers_for(url: str) -> dict[str, str]:
    """The header that a request to this address needs; none where the server is not the run's."""
    key = key_of(url) if PROTECTED.key_of else None
    return {"Authorization": f"Bearer {key}"} if key else {}


def _server(url: str) -> str:
    """`host:port` of an address."""
    return url.partition("://")[2].partition("/")[0]


_SECRET = re.compile(
    r"(^|_)(api_?keys?|access_?keys?|wandb_key|passwords?|passwd|secrets?|credentials?|auth_token)($|_)"
)
_OF_ENVIRONMENT = re.compile(r"(^|_)(token|key|pat|pass|password|secret)$")
_IN_URL = re.compile(r"(?<=://)([^\s/@:\"']*):[^\s/@\"']+@")
_PATHS = ("_path", "_file", "_dir")


def is_secret(name: str) -> bool:
    """Whether a flag (`--sglang-api-key`, `sglang_api_key`) holds a secret; paths and switches do not."""
    plain = name.lstrip("-").replace("-", "_").lower()
    return bool(_SECRET.search(plain)) and not plain.endswith((*_PATHS, "_per_run"))


def _is_secret_variable(name: str) -> bool:
    """Whether an environment variable (`HF_TOKEN`, `GITHUB_PAT`) holds a secret by its name."""
    return is_secret(name) or bool(_OF_ENVIRONMENT.search(name.lower()))


def _naming(name: str) -> Callable[[str], bool]:
    """What says which names inside a flag's mapping are secret: variables (`--train-env-vars`) have shorter ones."""
    return _is_secret_variable if name.lower().endswith("env_vars") else is_secret


def without_secrets(values: Mapping[str, Any]) -> dict[str, Any]:
    """A copy in which secrets are `***`, also inside dictionaries, lists and plans of engines.

    These are the values of secret flags and of secret variables in `*_env_vars`, and passwords in URLs.
    """
    return _without(values, is_secret)


def _without(values: Mapping[str, Any], is_hidden: Callable[[str], bool]) -> dict[str, Any]:
    return {name: _shown(name, value, is_hidden) for name, value in values.items()}


def command_line_without_secrets(words: Sequence[str], values: Mapping[str, Any]) -> list[str]:
    """A copy of a command line in which what follows secret flags, and the values that `without_secrets` hides,
    are `***`.

    Args:
        words: of the command line.
        values: what was parsed: a flag may be written short, or stand in JSON.

    Example:
        >>> command_line_without_secrets(["--lr", "1", "--wandb-k=x", "--api-key", "y"], {"wandb_key": "x"})
        ['--lr', '1', '--wandb-k=***', '--api-key', '***']
    """
    secrets = sorted(_secrets(values), key=len, reverse=True)
    shown, hides_next = [], False
    for word in words:
        if not word.startswith("--"):
            shown.append(HIDDEN if hides_next else _masked(word, secrets))  # some flags take several
            continue
        name, equals, value = word.partition("=")
        hides_next = is_secret(name) and not equals
        value = HIDDEN if is_secret(name) else _masked(value, secrets)
        shown.append(f"{name}={value}" if equals else name)
    return shown


def _masked(text: str, secrets: Sequence[str]) -> str:
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return _IN_URL.sub(rf"\1:{HIDDEN}@", text)


def _secrets(values: Mapping[str, Any], is_hidden: Callable[[str], bool] = is_secret) -> set[str]:
    found: set[str] = set()
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= _secrets({str(key): inner for key, inner in value.items()}, _naming(name))
        elif is_hidden(name):
            found |= {str(one) for one in (value if isinstance(value, list | tuple) else [value]) if one}
    return found


def _shown(name: str, value: Any, is_hidden: Callable[[str], bool]) -> Any:
    if is_hidden(name) and value not in (None, "", False, [], ()):
        return HIDDEN
    if isinstance(value, Mapping):
        return _without({str(key): inner for key, inner in value.items()}, _naming(name))
    if is_dataclass(value) and not isinstance(value, type):
        return without_secrets({one.name: getattr(value, one.name) for one in fields(value) if one.repr})
    if isinstance(value, list | tuple):
        return [_shown(name, inner, is_hidden) for inner in value]
    return _IN_URL.sub(rf"\1:{HIDDEN}@", value) if isinstance(value, str) else value
