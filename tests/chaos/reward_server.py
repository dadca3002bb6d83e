"""A reward service in a process of its own, for `matrix`: the share of digits in a response."""

from __future__ import annotations

import sys

from aiohttp import web


async def score(request: web.Request) -> web.Response:
    """What --rm-type remote_rm asks for."""
    response = (await request.json())["response"]
    return web.json_response(sum(character.isdigit() for character in response) / max(1, len(response)))


def main() -> None:
    app = web.Application()
    app.router.add_post("/score", score)
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None)


if __name__ == "__main__":
    main()
