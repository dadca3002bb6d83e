"""Run one real SGLang server in this process: `python -m slime.backends.sglang_utils.launch_server FILE.json`.

The file holds `{"accelerator": "cpu" | "cuda", "server_args": {ServerArgs field: value}}`, and the environment the API
key. On CPU the stand-ins come first, and SGLang's scheduler and detokenizer are forked instead of spawned: they then
share this process's imports, which halves the start. (With CUDA they are spawned, as SGLang does it; they re-execute
this module as `__mp_main__`.) It does not choose arguments, ports or log files, and it does not watch its parent:
whoever starts it does (`slime.processes.registry`).
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from slime.backends.sglang_utils import cpu_standins, early_kernels
from slime.processes.directories import use_private_temp_dir, write_private
from slime.utils.http.api_keys import ENGINE_ENV, HiddenText, is_secret


def write_launch_file(path: Path, *, accelerator: str, server_args: dict[str, Any]) -> None:
    """Write what `main` reads, for this user alone: there may be passwords in it, and it decides what code runs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_private(path, json.dumps({"accelerator": accelerator, "server_args": server_args}, indent=2))


def main(path: Path) -> None:
    """Serve until told to stop; every child process ends with this one."""
    launch = json.loads(path.read_text())
    # Its sockets and its files in shared directories are for its own processes; the log is open already.
    os.umask(0o077)
    use_private_temp_dir()
    if launch["accelerator"] != "cpu":
        early_kernels.start(launch["server_args"])
    prepare(launch)
    from sglang.launch_server import run_server
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils import kill_process_tree

    key = os.environ.get(ENGINE_ENV)
    values = launch["server_args"] | ({"api_key": key} if key else {})
    server_args = ServerArgs(**{name: hidden(name, value) for name, value in values.items()})
    if launch["accelerator"] == "cpu":
        fork_children()
    try:
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def hidden(name: str, value: Any) -> Any:
    """Return a value that SGLang's log shows as `***` where the name says that it is a secret."""
    return HiddenText(value) if isinstance(value, str) and is_secret(name) else value


def prepare(launch: dict[str, Any]) -> None:
    """Hide what a server does not need, and install what it does: on CPU the stand-ins and the faster attention."""
    # SGLang's tensor dumper imports Megatron where it finds it, to name tensors of a trainer: more than a second.
    sys.modules.setdefault("megatron", None)  # type: ignore[arg-type]
    from slime.weights.names import read_config

    config = read_config(launch["server_args"]["model_path"])
    if launch["accelerator"] == "cpu":
        _prepare_cpu(launch["server_args"], sees_images=bool(config.get("vision_config")))
    from slime.backends.sglang_utils import bucket_load, disk_weights, engine_patches, weight_samples
    from slime.models.families import family_of_config

    is_cpu, values, family = launch["accelerator"] == "cpu", launch["server_args"], family_of_config(config)
    engine_patches.import_one_model(config, values)
    stops_drafts = values.get("speculative_adaptive_config") == engine_patches.DRAFTS_OFF
    classifies = any(name.endswith("ForSequenceClassification") for name in config.get("architectures") or [])
    patches: tuple[tuple[Any, Callable[[], Any]], ...] = (
        (not is_cpu, engine_patches.write_numa_script_privately),
        (not is_cpu and values.get("enable_weights_cpu_backup"), engine_patches.keep_host_copies),
        (True, engine_patches.serve_store_at_its_address),
        (True, disk_weights.install),
        (True, partial(weight_samples.install, on_cpu=is_cpu)),
        (True, bucket_load.install),
        (True, engine_patches.probe_before_joining),
        (values.get("enable_return_routed_experts"), engine_patches.return_routed_experts),
        (_drafts_apart(values), engine_patches.keep_own_drafts),
        (stops_drafts, lambda: engine_patches.stop_drafts_when_told(values["speculative_num_steps"])),
        (values.get("enable_lora"), engine_patches.serve_live_adapter),
        (values.get("enable_lora"), engine_patches.take_stacks),
        (values.get("lora_backend") == "torch_native", _see_rows_of_output_layer),
        (is_cpu and config.get("kv_lora_rank"), cpu_standins.install_latent_attention),
        (is_cpu and config.get("vision_config"), cpu_standins.install_image_processors),
        (is_cpu and family and family.norms_all_heads, cpu_standins.install_all_heads_norm),
        (classifies, engine_patches.clear_missing_bias),
    )
    for is_needed, install in patches:
        if is_needed:
            install()
    if install_layers := _quantized_layers(config):
        install_layers(launch["accelerator"])


def _see_rows_of_output_layer() -> None:
    """Let adapters of the output layer have the rows that come to it: a prompt's last, or those with log-probs.

    SGLang's adapters in torch, which engines on the CPU use, take them for the first of all rows, and so for those of
    the first prompt's adapter; its other backends look (0.5.17).
    """
    import torch
    from sglang.srt.lora.backend.torch_backend import TorchNativeLoRABackend as Backend
    from sglang.srt.lora.layers import ParallelLMHeadWithLoRA as Head
    from sglang.srt.lora.utils import get_lm_head_pruned_lens

    prepare, apply = Backend.prepare_lora_batch, Head.apply_lora

    def of_rows(batch: Any, adapters: list[int], lengths: list[int]) -> Any:
        tensors = {"weight_indices_cpu": torch.tensor(adapters), "seg_lens_cpu": torch.tensor(lengths)}
        return replace(batch, use_cuda_graph=False, expected_tokens=sum(lengths), **tensors)

    def prepare_all(backend: Any, forward_batch: Any, weight_indices: list[int], **values: Any) -> None:
        prepare(backend, forward_batch, weight_indices, **values)
        whole, lengths = backend.batch_info, get_lm_head_pruned_lens(forward_batch)
        passes = backend._get_lm_head_pass_segments(weight_indices, lengths) if lengths else None
        backend.lm_head_batch_info = lengths and of_rows(whole, weight_indices, lengths)
        backend.lm_head_pass_batch_infos = passes and [of_rows(whole, *segments) for segments in passes]

    def apply_to_rows(head: Any, output: Any, hidden: Any) -> Any:
        backend, whole = head.lora_backend, head.lora_backend.batch_info
        backend.batch_info = head._get_lm_head_batch_info(len(hidden)) or whole
        try:
            return apply(head, output, hidden)
        finally:
            backend.batch_info = whole

    Backend.prepare_lora_batch, Head.apply_lora = prepare_all, apply_to_rows


def _drafts_apart(server_args: dict[str, Any]) -> bool:
    """Whether drafts come from no part of the model that is served."""
    from slime.config.sglang.drafts import same_directory

    path, algorithm = (server_args.get(f"speculative_{name}") for name in ("draft_model_path", "algorithm"))
    return algorithm == "NGRAM" or (path is not None and not same_directory(path, server_args["model_path"]))


def _quantized_layers(config: dict[str, Any]) -> Callable[[str], None] | None:
    """What changes the layers of a model with quantised weights, by its config.json."""
    from slime.weights.formats import METHODS, quantization_config_of

    method = str(quantization_config_of(config).get("quant_method")).lower()
    if method != "fp8" and method not in METHODS:
        return None
    from slime.backends.sglang_utils import quantized_layers

    return quantized_layers.install_fp8 if method == "fp8" else quantized_layers.install_int4


def _prepare_cpu(server_args: dict[str, Any], *, sees_images: bool) -> None:
    if not sees_images:  # nothing asks for it then, and its import costs an engine two seconds of CPU time
        sys.modules.setdefault("torchvision", None)  # type: ignore[arg-type]
    if server_args.get("enable_deterministic_inference"):
        cpu_standins.install_deterministic()
    else:
        cpu_standins.install()
    cpu_standins.install_kernels()
    cpu_standins.install_structured_output()
    if server_args.get("enable_return_routed_experts") or server_args.get("enable_lora"):
        cpu_standins.drop_pinned_memory()
    cpu_standins.install_attention()


def fork_children() -> None:
    """Make SGLang fork its processes. It asks for "spawn" because of CUDA, which cannot be used after a fork."""
    import sglang.srt.entrypoints.engine as engine
    import sglang.srt.managers.scheduler  # noqa: F401  (imported before the fork, so that no child imports it)

    engine.mp = _Forking()
    gc.collect()
    gc.freeze()  # what was imported stays; no later collection looks at it, or copies its pages into a child


class _Forking:
    """Stands for `multiprocessing` in SGLang's engine module: a fork context that ignores the wish for "spawn"."""

    def __getattr__(self, name: str) -> Any:
        return getattr(multiprocessing.get_context("fork"), name)

    def set_start_method(self, _method: str, force: bool = False) -> None:
        """Stay with fork."""


if __name__ == "__main__":
    main(Path(sys.argv[1]))
elif __name__ == "__mp_main__":
    prepare(json.loads(Path(sys.argv[1]).read_text()))
