"""Small changes of SGLang 0.5.17 in the server processes that a run starts; each says why it is there.

`launch_server` calls the functions that a server needs, once, before it starts. Importing this module is light:
SGLang is imported inside the functions. Changes of how weights are loaded are in `bucket_load`, `disk_weights`,
`weight_samples` and `quantized_layers`, those that CPU needs in `cpu_standins`.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing.spawn
import os
import socket
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any

from slime.utils.http.network import out_of_reach

PROBE = "probe"
"""In the place of a backend of a process group: only see whether the address can be reached."""
BIAS = "score.bias"


def probe_before_joining() -> None:
    """Have a server that joins the trainer's process group first see whether it can reach the trainer.

    SGLang joins in its scheduler, which does nothing else meanwhile: where it cannot reach the trainer, it is silent
    for up to half an hour. Now it connects to the trainer's address first, with a deadline of seconds, and says what
    is in the way; with the backend `PROBE` that is all it does. A group of the same name, of an earlier attempt or of
    trainers of before, is left first.
    """
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    join = WeightUpdater.init_weights_update_group

    def probe_and_join(
        updater: Any,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str = "nccl",
    ) -> tuple[bool, str]:
        refusal = out_of_reach(master_address, master_port)
        if refusal is not None:
            return False, refusal
        if backend == PROBE:
            return True, "within reach"
        if group_name in updater._model_update_group:
            updater.destroy_weights_update_group(group_name)
        found: tuple[bool, str] = join(
            updater, master_address, master_port, rank_offset, world_size, group_name, backend
        )
        return found

    WeightUpdater.init_weights_update_group = probe_and_join


def serve_store_at_its_address() -> None:
    """Serve the torch store of an engine's ranks at the engine's address alone; torch serves it on every interface.

    Whoever reaches that store can read the addresses of the ranks, and write others in their place.
    """
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")  # its package has such a function
    make_store = rendezvous.TCPStore

    def make_store_at_its_address(host_name: str, port: int, *, is_master: bool, **options: Any) -> Any:
        # A host whose address is translated on the way has no interface of that address: there, torch's own way.
        with contextlib.suppress(OSError):
            if is_master:
                family = socket.AF_INET6 if ":" in host_name else socket.AF_INET
                listener = socket.create_server((host_name, port), family=family)
                options |= {"master_listen_fd": listener.detach(), "multi_tenant": False}
        return make_store(host_name, port, is_master=is_master, **options)

    rendezvous.TCPStore = make_store_at_its_address


def write_numa_script_privately() -> None:
    """Write the script through which SGLang starts a scheduler on a NUMA node where only this user can write.

    SGLang writes it to /tmp with mode 0777 and executes it a moment later: whoever rewrites it meanwhile runs code as
    the user of the engine.
    """
    from sglang.srt.utils import numa_utils

    numa_utils._create_numactl_executable = write_numa_script


def write_numa_script(numactl_args: str) -> tuple[str, str]:
    """Write the script to the temporary directory, for this user alone.

    Returns:
        its path, and a text for SGLang's log.
    """
    python = os.fsdecode(multiprocessing.spawn.get_executable() or "")
    script = f'#!/bin/sh\nexec numactl {numactl_args} {python} "$@"'
    descriptor, path = tempfile.mkstemp(prefix="slime-numactl-", suffix=".sh")
    with os.fdopen(descriptor, "w") as file:
        file.write(script)
        os.fchmod(file.fileno(), 0o700)
    return path, f"script={script!r}"


def return_routed_experts() -> None:
    """Have an engine that records routed experts return them with every answer.

    SGLang returns them where a request asks (`return_routed_experts`), and the router (0.3.2) drops that field, which
    it does not know, from the requests that it forwards. This can go when the router forwards the field.
    """
    from sglang.srt.managers.io_struct import GenerateReqInput

    normalize = GenerateReqInput.normalize_batch_and_arguments

    def normalize_with_experts(request: Any, *args: Any, **options: Any) -> Any:
        request.return_routed_experts = True
        return normalize(request, *args, **options)

    GenerateReqInput.normalize_batch_and_arguments = normalize_with_experts


def clear_missing_bias() -> None:
    """Set the bias of a classification head to zero where the checkpoint has none.

    SGLang gives the `score` layer of Qwen2 and Qwen3 classifiers a bias. Transformers' checkpoints have none, so it
    kept its random initial value: scores were off by a constant that differed from engine to engine with their seeds
    (seen: -0.03 and +0.06).
    """
    from sglang.srt.model_loader.loader import DefaultModelLoader

    load = DefaultModelLoader.load_weights_and_postprocess

    def load_and_clear(model: Any, weights: Iterable[tuple[str, Any]], *others: Any, **keywords: Any) -> Any:
        names: set[str] = set()

        def noted() -> Iterator[tuple[str, Any]]:
            for name, tensor in weights:
                names.add(name)
                yield name, tensor

        loaded = load(model, noted(), *others, **keywords)
        bias = dict(model.named_parameters()).get(BIAS)
        if bias is not None and BIAS not in names:
            bias.data.zero_()
        return loaded

    DefaultModelLoader.load_weights_and_postprocess = staticmethod(load_and_clear)
