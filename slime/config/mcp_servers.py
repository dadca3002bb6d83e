"""`mcp: [...]` in the file of --custom-config-path: servers whose tools multi-turn runs offer the model, and agents.

They are checked before anything starts; what tools a server has, only a connection says (slime.rollout.mcp_tools).
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, model_validator

from slime.config.args import Args
from slime.config.custom_config import FLAG
from slime.utils.errors import UsageError, sentences
from slime.utils.files.yaml_config import LocatedYaml, load_yaml, validate

_USERS = ("slime.rollout.multi_turn", "slime.agent")


class McpServer(BaseModel):
    """One server, and the bounds of its tools.

    A value of `env` or `headers` that begins with `$` is read from this process's environment, so that no secret
    stands in the file, which is kept with the run.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = ""
    command: Annotated[list[str], Field(min_length=1)] | None = None
    """Program and arguments of a server that speaks over stdin and stdout."""
    cwd: str | None = None
    env: dict[str, str] = {}
    url: str | None = None
    """Address of a server that speaks streamable HTTP."""
    headers: dict[str, str] = {}
    tools: Annotated[list[str], Field(min_length=1)] | None = None
    """Tools that the model may call; None = all that the server has."""
    timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """Longest time of a call, and of the server's start."""
    max_result_chars: Annotated[int, Field(ge=1)] = 20_000
    """Longer answers are cut."""
    max_calls: Annotated[int, Field(ge=1)] = 100
    """Calls of this server that a sample may make."""

    @model_validator(mode="after")
    def _has_one_address(self) -> Self:
        address = urlsplit(self.url or "")
        strange = [key for key in ("cwd", "env") if self.url and vars(self)[key]]
        strange += ["headers"] if self.command and self.headers else []
        problems = sentences(
            (
                (self.command is None) == (self.url is None),
                "give either command (a program that speaks over stdin and stdout) or url",
            ),
            (
                self.url is not None and not (address.scheme in ("http", "https") and address.netloc),
                f"url {self.url} is no http:// or https:// address",
            ),
            (
                strange,
                f"{''.join(strange[:1])} has no effect with {'url' if self.url else 'command'}; leave it out",
            ),
        )
        if problem := next(problems, None):
            raise ValueError(problem)
        return self

    @property
    def label(self) -> str:
        """What errors, logs and the model call it: without what may be secret in an address."""
        parts = urlsplit(self.url or "")
        address = parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()
        return self.name or address or " ".join(self.command or ())[:60]

    def problems(self) -> Iterator[str]:
        """Yield what this machine lacks for it, one end of a sentence each."""
        program = self.command[0] if self.command else ""
        named = [value[1:] for value in (*self.env.values(), *self.headers.values()) if value.startswith("$")]
        return sentences(
            (
                program and shutil.which(program, path=self.env.get("PATH")) is None,
                f"command: there is no program {program} (on PATH); install it, or give its path.",
            ),
            (self.cwd and not os.path.isdir(self.cwd), f"cwd: there is no directory {self.cwd}."),
            *((name not in os.environ, f"the environment variable {name} is not set.") for name in named),
        )


def resolved(values: Mapping[str, str]) -> dict[str, str]:
    """Return values of `env` or `headers` with those that begin with `$` read from the environment."""
    return {key: os.environ[value[1:]] if value.startswith("$") else value for key, value in values.items()}


def mcp_servers(args: Args, located: LocatedYaml | None = None) -> list[McpServer]:
    """Read `args.mcp`.

    Args:
        args: with what the file of --custom-config-path sets.
        located: that file, for sentences with lines.

    Raises:
        UsageError: it is no list of servers, or two have one name.
    """
    given = vars(args).get("mcp")
    if given is None:
        return []
    located = located or LocatedYaml("", FLAG, {"mcp": given})
    if not isinstance(given, list) or not given:
        raise UsageError(located.sentence(("mcp",), "must be a list of servers, each with command or url."))
    servers = [validate(McpServer, located, ("mcp", number)) for number in range(len(given))]
    for number, server in enumerate(servers):
        if server.label in [earlier.label for earlier in servers[:number]]:
            raise UsageError(located.sentence(("mcp", number), f"{server.label} is there twice; name one otherwise."))
    return servers


def check_mcp(args: Args, generate_paths: Iterable[str | None]) -> Iterator[str]:
    """The servers that a run is to connect to can be used on this machine, as far as can be told.

    Args:
        args: with what the file of --custom-config-path sets.
        generate_paths: the run's custom generate functions.
    """
    if vars(args).get("mcp") is None or not any(path and path.startswith(_USERS) for path in generate_paths):
        return
    located = load_yaml(args.custom_config_path, FLAG) if args.custom_config_path else None
    try:
        servers = mcp_servers(args, located)
    except UsageError as error:
        yield from error.messages
        return
    if importlib.util.find_spec("mcp") is None:
        yield f"{FLAG}: mcp needs the package mcp; `pip install slime[mcp]` brings it."
    for number, server in enumerate(servers):
        for problem in server.problems():
            yield (located or LocatedYaml("", FLAG, None)).sentence(("mcp", number), problem)
