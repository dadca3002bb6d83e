"""A program: every option of the installed SGLang and router, given on slime's command line, reaches its own field.

What is right is asked of the packages' own parsers: the same option without our prefix changes some fields of
`ServerArgs` or `RouterArgs`, and ours must change the same ones to the same values. It imports the real SGLang with
the stand-ins it needs on a CPU, so `test_sglang_arguments.py` runs it as a process of its own.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any

from slime.backends.sglang_utils import cpu_standins
from slime.backends.sglang_utils.server_args import EnginePlace, EngineSpec, build_server_args, graph_defaults
from slime.config.parser import Parser, add_flags, defaults_of, explicit_flags
from slime.config.sglang import options
from slime.config.sglang.engine_flags import SglangFlags, derive_sglang, explain_unknown
from slime.ray.rollout.router import RouterAddress, router_values
from slime.utils.http.api_keys import make_keys

# Type -> values of which one is not the default.
VALUES = {
    None: ("text", "other"),
    "str": ("text", "other"),
    "int": ("3", "5"),
    "float": ("0.25", "0.75"),
    "human_readable_int": ("4k", "8Ki"),
    "nullable_str": ("text", "other"),
    "json_list_type": ("[1, 2]", "[3]"),
    "loads": ('{"a": 1}', '{"b": 2}'),
}
SPECIAL = {
    "--cuda-graph-config": ['{"decode": {"max_bs": 4}}'],  # checks the keys of its JSON
    "--router-selector": ["a=b"],  # key=value pairs, as the next ones
    "--router-prefill-selector": ["a=b"],
    "--router-decode-selector": ["a=b"],
    "--router-jwt-role-mapping": ["Gateway.Admin=admin"],
    "--router-control-plane-api-keys": ["key1:Service:admin:secret"],  # id:name:role:key
}
GPUS_PER_ENGINE = 12
# What slime sets because of an option, besides it: stages share the GPUs; data-parallel attention needs ports; an
# engine that drafts takes what the run sends.
FOLLOWS = {
    "pp_size": {"tp_size": GPUS_PER_ENGINE // 3},
    "enable_dp_attention": {"dist_init_addr": "127.0.0.1:3"},
    "speculative_algorithm": {"max_running_requests": 512},
}
TYPICAL = {
    "--sglang-mem-fraction-static": 0.7,
    "--sglang-context-length": 128,
    "--sglang-max-running-requests": 8,
    "--sglang-chunked-prefill-size": 512,
    "--sglang-log-level": "error",
    "--sglang-dtype": "bfloat16",
    "--sglang-schedule-policy": "lpm",
    "--sglang-decode-log-interval": 7,
    "--sglang-watchdog-timeout": 3000.0,
    "--sglang-disable-radix-cache": True,
}
HF_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "torch_dtype": "bfloat16",
}


class Ours:
    """slime's parser, built once, as far as engines and router are concerned."""

    def __init__(self, *, gpus_per_engine: int) -> None:
        self.gpus_per_engine = gpus_per_engine
        self._parser = Parser()
        add_flags(self._parser, SglangFlags)
        options.add_sglang_arguments(self._parser, options.sglang_tables())

    def parse(self, tokens: list[str]) -> argparse.Namespace:
        """The parsed and derived flags, with what `build_server_args` and `router_values` read besides."""
        args = argparse.Namespace(
            rollout_num_gpus_per_engine=self.gpus_per_engine,
            prometheus_port=None,
            seed=0,
            trust_remote_code=False,
            update_weights_in_flight=False,
            use_rollout_routing_replay=False,
            accelerator="cuda",
            params_dtype="bfloat16",
        )
        problems = self._parser.parse_all(tokens, args, explain_unknown=explain_unknown)
        assert problems == [], problems
        own = list(defaults_of(SglangFlags))
        vars(args).update(derive_sglang(args, explicit_flags(self._parser, tokens), own))
        return args

    def server_args(self, tokens: list[str], *, accelerator: str = "cuda", model: str = "m") -> dict[str, Any]:
        """The keyword arguments of ServerArgs."""
        args = self.parse(tokens)
        args.accelerator = accelerator
        place = EnginePlace("127.0.0.1", port=1, nccl_port=2, bootstrap_port=4, dist_init_port=3)
        spec = EngineSpec(0, model, self.gpus_per_engine, settings=args.sglang_overrides)
        return build_server_args(args, spec, place)


def values_of(action: argparse.Action, name: str) -> list[str]:
    """Values for an option that are valid and, where there is a choice, not its default."""
    if action.nargs == 0:
        return []
    if name in SPECIAL:
        return SPECIAL[name]
    known = [str(choice) for choice in sorted(action.choices or [])]
    known = known or list(VALUES.get(getattr(action.type, "__name__", None), ()))
    assert known, f"say in VALUES or SPECIAL which value {name} takes"
    value = next((text for text in known if text != str(action.default)), known[0])
    return [value, value] if action.nargs in ("+", "*") else [value]


def options_of(parser: argparse.ArgumentParser, owned: object) -> list[tuple[str, argparse.Action]]:
    """(option string, action) for every option string that is not slime's."""
    actions = [action for action in parser._actions if action.dest != "help" and action.dest not in owned]  # type: ignore[operator]
    return [(name, action) for action in actions for name in action.option_strings]


def check_server(ours: Ours) -> int:
    """Every option of ServerArgs; returns their number."""
    from sglang.srt.server_args import ServerArgs

    theirs, names = argparse.ArgumentParser(), {field.name for field in fields(ServerArgs)}
    ServerArgs.add_cli_args(theirs)
    plain = vars(theirs.parse_args(["--model-path", "m"]))
    assert set(options.OWNED) <= set(plain), "an owned option no longer exists in SGLang"
    assert {name: plain[name] for name in options.READ_BY_SLIME} == options.READ_BY_SLIME
    without = ours.server_args([])
    del without["cuda_graph_bs_decode"]  # it follows from other options: `graph_defaults`
    for name, action in (found := options_of(theirs, options.OWNED)):
        values = values_of(action, name)
        parsed = vars(theirs.parse_args(["--model-path", "m", name, *values]))
        prefix = (
            "--no-sglang-" if isinstance(action, argparse.BooleanOptionalAction) and "--no-" in name else "--sglang-"
        )
        tokens = [prefix + name.removeprefix("--no-" if "no" in prefix else "--"), *values]
        given, args = ours.server_args(tokens), ours.parse(tokens)
        expected = graph_defaults(args, args.sglang_overrides, "regular")
        expected |= {action.dest: parsed[action.dest]} if action.dest in names else {}
        expected |= FOLLOWS.get(action.dest, {})
        assert given == without | expected, (name, given)
        assert set(given) <= names, (name, set(given) - names)
    return len(found)


def check_server_starts_with_typical_values(ours: Ours) -> None:
    """A real ServerArgs, which derives values of its own, keeps what the user set."""
    from sglang.srt.server_args import ServerArgs

    tokens = [t for name, value in TYPICAL.items() for t in ([name] if value is True else [name, str(value)])]
    with tempfile.TemporaryDirectory() as model:
        Path(model, "config.json").write_text(json.dumps(HF_CONFIG))
        server = ServerArgs(**ours.server_args(tokens, accelerator="cpu", model=model))
    for name, value in TYPICAL.items():
        field = name.removeprefix("--sglang-").replace("-", "_")
        assert getattr(server, field) == value, (field, getattr(server, field))
    assert (server.device, server.tp_size, server.attention_backend) == ("cpu", 1, "torch_native")


def check_router(ours: Ours) -> int:
    """Every option of RouterArgs; returns their number."""
    from sglang_router.router_args import RouterArgs

    theirs = argparse.ArgumentParser()
    RouterArgs.add_cli_args(theirs, use_router_prefix=True, exclude_host_port=True)

    def as_parsed_by_the_router(tokens: list[str]) -> dict[str, Any]:
        return vars(RouterArgs.from_cli_args(theirs.parse_args(tokens), use_router_prefix=True))

    def as_launched_by_slime(tokens: list[str]) -> dict[str, Any]:
        args = ours.parse(tokens)
        values = router_values(args, RouterAddress("127.0.0.1", 1), prometheus_port=2)
        assert "api_key" not in values, "it would be in the launch file"
        values["api_key"] = make_keys(
            is_wanted=False, router=args.router_overrides.get("api_key")
        ).router  # in the environment
        return vars(RouterArgs.from_cli_args(argparse.Namespace(**json.loads(json.dumps(values)))))

    plain, without = as_parsed_by_the_router([]), as_launched_by_slime([])
    for name, value in options.ROUTER_DEFAULTS.items():
        assert without[name] == value and ours.parse([]).__dict__["router_" + name] == value, name
    for name, action in (found := options_of(theirs, options.ROUTER_OWNED)):
        tokens = [name, *values_of(action, name)]
        parsed, given = as_parsed_by_the_router(tokens), as_launched_by_slime(tokens)
        changed = {field: value for field, value in parsed.items() if value != plain[field]}
        assert changed, f"{name} changes nothing in the router itself"
        assert given == without | changed, (name, changed)
    return len(found)


def check_sizes() -> None:
    """slime's reading of numbers with suffixes is SGLang's."""
    from sglang.srt.utils.common import human_readable_int

    def read(kind: Any, text: str) -> int | str:
        try:
            return kind(text)
        except argparse.ArgumentTypeError:
            return "refused"

    numbers = ("", "0", "7", "-1", "-1.5", "25.6", "1.5", ".5", "1.", "1_000", "1e3", "x", " 12 ")
    for text in [number + suffix for number in numbers for suffix in ("", *"kKMmGTi", "Ki", "ki", "Mi", "Ti", "kk")]:
        assert read(options.human_readable_int, text) == read(human_readable_int, text), text


def main() -> None:
    """Print how many options were checked."""
    cpu_standins.install()
    logging.disable(logging.WARNING)  # SGLang's deprecated options say so
    ours = Ours(gpus_per_engine=GPUS_PER_ENGINE)
    assert "sglang.srt.server_args" not in sys.modules, "the parser is built without SGLang"
    counts = {"server": check_server(ours), "router": check_router(ours)}
    check_server_starts_with_typical_values(Ours(gpus_per_engine=1))
    check_sizes()
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
