"""Addresses of the run's models: each model (policy, reward model, teacher, ...) has a router of its own.

It reads what the rollout manager published (`args.sglang_model_routers`: name -> (ip, port)), and starts nothing.
"""

from __future__ import annotations

from slime.config.args import Args


def router_url(args: Args) -> str:
    """Address of the default router."""
    return f"http://{args.sglang_router_ip}:{args.sglang_router_port}"


def get_model_url(args: Args, model_name: str, endpoint: str = "/generate") -> str:
    """Address of a model's router by its name; the default router for a name that has none."""
    routers = args.sglang_model_routers or {}
    ip, port = routers.get(model_name) or (args.sglang_router_ip, args.sglang_router_port)
    return f"http://{ip}:{port}{endpoint}"


def required_model_url(args: Args, model_name: str, endpoint: str, *, remedy: str) -> str:
    """As `get_model_url`, but the model must run: the policy would answer in its place, and nobody would notice.

    Raises:
        ValueError: there is no model of this name; `remedy` says what starts one.
    """
    if model_name not in (args.sglang_model_routers or {}):
        running = ", ".join(args.sglang_model_routers or {}) or "none with a name"
        raise ValueError(f"no model {model_name!r} runs (running: {running}); {remedy}")
    return get_model_url(args, model_name, endpoint)
