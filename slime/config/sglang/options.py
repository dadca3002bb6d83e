"""Every option of the installed SGLang server and router, as `--sglang-*` and `--router-*`, minus what slime sets.

The options come from cached tables, one for each version, so that a command line is parsed without importing SGLang.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import logging
import re
import warnings
from collections.abc import Collection, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any, cast

from slime.config.option_table import Fill, OptionTable, cached_table

logger = logging.getLogger(__name__)

PREFIX, ROUTER_PREFIX = "sglang_", "router_"
# dest -> what to use instead. slime sets these for every engine.
OWNED = {
    "model_path": "use --hf-checkpoint",
    "config": "give each --sglang-* flag on the command line",
    "trust_remote_code": "use --trust-remote-code",
    "random_seed": "it follows from --seed",
    "enable_memory_saver": "it follows from --offload-rollout",
    "tp_size": "use --rollout-num-gpus-per-engine",
    "host": "engines listen on their node's address",
    "port": "slime finds free ports",
    "nnodes": "it follows from --rollout-num-gpus-per-engine",
    "node_rank": "slime places the engines",
    "dist_init_addr": "slime finds free ports",
    "gpu_id_step": "slime places the engines",
    "base_gpu_id": "slime places the engines",
    "nccl_port": "slime finds free ports",
    "skip_server_warmup": "slime always skips the warm-up",
    "enable_return_routed_experts": "it follows from the training flags",
}
OTHER_NAMES = {"tensor_parallel_size": "tp_size", "model": "model_path", "nccl_init_addr": "dist_init_addr"}
ROUTER_OWNED = {
    "worker_urls": "slime registers its engines",
    "router_prefill": "slime registers its engines",
    "router_decode": "slime registers its engines",
    "router_model_path": "use --hf-checkpoint",
}
# The router's library has these policies, and its own parser (0.3.2) lacks them. Engines' router is started through
# the library (launch_router.py), which takes them.
LIBRARY_POLICIES = ("consistent_hashing", "prefix_hash")
POLICY_OPTIONS = ("router_policy", "router_prefill_policy", "router_decode_policy")
ROUTER_DEFAULTS = {"log_level": "warn", "balance_abs_threshold": 10, "balance_rel_threshold": 1.2}
# What slime itself reads, for a machine without SGLang. A test compares it with the installed defaults.
READ_BY_SLIME = {
    "enable_deterministic_inference": False,
    "load_format": "auto",
    **dict.fromkeys(("max_lora_rank", "reasoning_parser", "speculative_algorithm", "tool_call_parser")),
}
# Options that a patched SGLang has; where it is installed they are among its options, and known.
OF_PATCHES = {
    "sglang_custom_pull_weights_pre_read_hook": "slime's own weight loader applies what engines read; leave it out"
}
INSTALL = "run scripts/setup_env.sh, or train without engines (--debug-train-only)"
_PACKAGES = {"--sglang-": "sglang", "--no-sglang-": "sglang", "--router-": "sglang_router"}


def is_installed(package: str) -> bool:
    """Whether a package (sglang or sglang_router) can be imported."""
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # of an importer that hides it
        return False


def missing_packages() -> list[str]:
    """What engines need and is not installed."""
    return [package for package in ("sglang", "sglang_router") if not is_installed(package)]


def sglang_tables() -> list[OptionTable]:
    """The options of what is installed: SGLang, its router. The first time for a version that takes seconds.

    Raises:
        UsageError: one of them is installed and cannot be imported.
    """
    return [table_of(package) for package in _OPTIONS_OF if is_installed(package)]


def table_of(package: str) -> OptionTable:
    """The options of an installed package, sglang or sglang_router."""
    source, fill = _OPTIONS_OF[package]
    return cached_table(package, _key(package, source), fill, elsewhere=True)


def add_sglang_arguments(parser: argparse.ArgumentParser, tables: Sequence[OptionTable]) -> None:
    """Add every option of `sglang_tables()`; options that the parser already has stay as they are.

    Without SGLang only the attributes that slime reads exist.
    """
    for table in tables:
        table.add_to(parser)
    if not is_installed("sglang"):
        parser.set_defaults(**{PREFIX + name: value for name, value in READ_BY_SLIME.items()})


def _key(package: str, source: str) -> dict[str, str]:
    """The version, and the file with the options: an installation from a checkout changes without a new version."""
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        version = "unknown"
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec else None
    stat = Path(folders[0], source).stat() if folders else None
    return {package: version, "file": f"{stat.st_size} {stat.st_mtime_ns}" if stat else "none"}


def fill_with_server_options(parser: argparse.ArgumentParser) -> None:
    """Ask the installed SGLang for its options; imports it, with the stand-ins it needs without CUDA."""
    from slime.backends.sglang_utils.cpu_standins import install

    install()  # does nothing with CUDA
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "Triton is not supported on current platform"
        from sglang.srt.server_args import ServerArgs

    group = parser.add_argument_group("SGLang engine", "every option of SGLang's server, with --sglang- in front")
    ServerArgs.add_cli_args(_Filtered(group, OWNED, PREFIX))


def fill_with_router_options(parser: argparse.ArgumentParser) -> None:
    """Ask the installed router for its options; imports it."""
    from sglang_router.router_args import RouterArgs

    RouterArgs.add_cli_args(_Filtered(parser, ROUTER_OWNED), use_router_prefix=True, exclude_host_port=True)
    for action in parser._actions:
        if action.dest in POLICY_OPTIONS and action.choices is not None:
            action.choices = [*action.choices, *(name for name in LIBRARY_POLICIES if name not in action.choices)]
    parser.set_defaults(**{ROUTER_PREFIX + name: value for name, value in ROUTER_DEFAULTS.items()})


_OPTIONS_OF: dict[str, tuple[str, Fill]] = {
    "sglang": ("srt/server_args.py", fill_with_server_options),
    "sglang_router": ("router_args.py", fill_with_router_options),
}
"""Package -> (file that has its options, what adds them)."""


class _Filtered:
    """Stands where a package expects a parser: owned options are left out, the others get a prefix.

    Args:
        target: a parser or a group of it.
        owned: attributes that slime sets.
        prefix: `--x` becomes `--sglang-x` with "sglang_".
    """

    def __init__(self, target: Any, owned: Collection[str], prefix: str = "") -> None:
        self._target, self._owned, self._prefix = target, owned, prefix

    def add_argument_group(self, title: str, description: str) -> _Filtered:
        """As argparse's."""
        return _Filtered(self._target.add_argument_group(f"Router: {title}", description), self._owned)

    def add_argument(self, *names: str, **keywords: Any) -> argparse.Action | None:
        """As argparse's."""
        dest = keywords.pop("dest", None) or names[0].lstrip("-").replace("-", "_")
        if dest in self._owned:
            return None
        keywords = {"dest": self._prefix + dest} | _without_sglang(keywords)
        return cast(
            argparse.Action,
            self._target.add_argument(
                *(f"--{self._prefix.replace('_', '-')}{name[2:]}" for name in names), **keywords
            ),
        )


def _without_sglang(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of an option, with what is common and easily done without SGLang in slime's own words."""
    ours = dict(keywords)
    if getattr(ours.get("type"), "__name__", None) == "human_readable_int":
        ours["type"] = human_readable_int
    action = getattr(ours.get("action"), "__name__", "")
    if "new_flag" in ours:
        ours["new_flag"] = f"--sglang-{ours['new_flag'][2:]}"
    if action == "DeprecatedAliasStoreAction":
        ours["action"] = Deprecated
    elif action in ("DeprecatedStoreTrueAction", "DeprecatedStoreConstAction"):
        is_switch = action == "DeprecatedStoreTrueAction"
        const = True if is_switch else ours.pop("const_value")
        ours = {"default": False if is_switch else None} | ours | {"action": Deprecated, "nargs": 0, "const": const}
    elif action == "DeprecatedAction":  # without any effect, so without an attribute
        ours |= {"action": Deprecated, "nargs": 0, "dest": argparse.SUPPRESS}
    return ours


class Deprecated(argparse.Action):
    """An option that SGLang keeps for older scripts: it does what its successor does, and names that."""

    def __init__(self, option_strings: Sequence[str], dest: str, new_flag: str | None = None, **keywords: Any) -> None:
        super().__init__(option_strings, dest, **keywords)
        self.new_flag = new_flag

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """As argparse's."""
        logger.warning("%s is deprecated%s", option_string, f": use {self.new_flag}" if self.new_flag else "")
        if self.dest != argparse.SUPPRESS:
            setattr(namespace, self.dest, self.const if self.nargs == 0 else values)


def human_readable_int(text: str) -> int:
    """A number, or one with a suffix: 4k is 4000, 4Ki is 4096, 1.5M is 1500000 (as SGLang reads it).

    Raises:
        argparse.ArgumentTypeError: it is no such number.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kMGT]|[KMGT]i)", text.strip())
    number, suffix = match.groups() if match else (text, "")
    factor = 1024 if suffix.endswith("i") else 1000
    try:
        exact = Decimal(number) if factor == 1000 and suffix else int(number)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number such as 4096, 4k, 1.5M or 4Ki") from None
    return int(exact * factor ** (" kMGT".index(suffix[0].replace("K", "k")) if suffix else 0))


def explain_unknown(name: str) -> str | None:
    """The sentence for an engine or router flag that is slime's to set, or cannot be checked here; else None."""
    dest = name.lstrip("-").replace("-", "_")
    remedy = ROUTER_OWNED.get(dest)
    if dest.startswith(PREFIX):
        bare = dest.removeprefix(PREFIX)
        remedy = OWNED.get(OTHER_NAMES.get(bare, bare))
    if remedy:
        return f"{name} is set by slime: {remedy}."
    if dest in OF_PATCHES and is_installed("sglang"):
        version = importlib.metadata.version("sglang")
        return f"{name} belongs to a patch of SGLang, which the installed {version} is without: {OF_PATCHES[dest]}."
    package = _package_of(name)
    if package is None or is_installed(package):
        return None
    return f"{name} cannot be checked, for {package} is not installed: {INSTALL}."


def set_aside(tokens: Sequence[str], known: Collection[str]) -> list[str]:
    """The command line without engine flags that cannot be checked and have no effect.

    These are flags of a package that is not installed, in a run without engines: they are accepted unread, and one
    warning names them.

    Args:
        tokens: the command line.
        known: the option strings of the parser.
    """
    given = {token.partition("=")[0] for token in tokens}
    if not given & {"--debug-train-only", "--load-debug-rollout-data"}:
        return list(tokens)
    flag, kept, dropped = "", [], []
    for token in tokens:
        flag = token.partition("=")[0] if token.startswith("--") else flag
        package = _package_of(flag)
        if flag in known or package is None or is_installed(package):
            kept.append(token)
        elif token.startswith("--"):
            dropped.append(flag)
    if dropped:
        logger.warning("not checked, and without effect in a run without engines: %s", ", ".join(dropped))
    return kept


def _package_of(name: str) -> str | None:
    return next((package for prefix, package in _PACKAGES.items() if name.startswith(prefix)), None)
