"""A real MCP server with good and bad manners, for tests: python mcp_server.py [stdio | http PORT]."""

from __future__ import annotations

import io
import os
import sys
import time
from typing import Any

import PIL.Image
from mcp.server.fastmcp import FastMCP, Image
from mcp.server.fastmcp.exceptions import ToolError

server: Any = FastMCP("bad manners", port=int(sys.argv[2]) if len(sys.argv) > 2 else 8000, log_level="ERROR")
CALLS: list[int] = []


@server.tool()
def add(a: int, b: int) -> str:
    """Add two numbers."""
    CALLS.append(a)
    return f"{a + b} after {len(CALLS)} calls"


@server.tool()
def refuse() -> str:
    """Say no."""
    raise ToolError("not today")


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(3)


@server.tool()
def big(megabytes: int) -> str:
    """Answer much."""
    return "x" * (megabytes << 20)


@server.tool()
def garbage() -> str:
    """Print what is no message, then answer."""
    os.write(1, b"this is no JSON\n{}\n")
    return "good"


@server.tool(structured_output=False)
def camera(letter: str) -> list[Any]:
    """Show a red picture of 48 x 32 pixels, and say a letter."""
    data = io.BytesIO()
    PIL.Image.new("RGB", (48, 32), "red").save(data, "PNG")
    return [letter, Image(data=data.getvalue(), format="png")]


@server.tool()
def environment(name: str) -> str:
    """Read a variable."""
    return os.environ.get(name, "none")


@server.tool()
async def sleep(seconds: float) -> str:
    """Answer late; the server goes on meanwhile."""
    import anyio

    await anyio.sleep(seconds)
    return "late"


@server.tool()
def hang(seconds: float) -> str:
    """Stop the whole server for a while."""
    time.sleep(seconds)
    return "late"


if __name__ == "__main__":
    server.run("streamable-http" if sys.argv[1] == "http" else "stdio")
