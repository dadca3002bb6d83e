"""Small changes of SGLang 0.5.17 in the server processes that a run starts; each says why it is there.

`launch_server` calls the functions that a server needs, once, before it starts. Importing this module is light:
SGLang is imported inside the functions. Changes of how weights are loaded are in `bucket_load`, `disk_weights`,
`weight_samples` and `quantized_layers`, those that CPU needs in `cpu_standins`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import itertools
import multiprocessing.spawn
import os
import re
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from slime.utils.http.network import out_of_reach
from slime.weights.adapters import BASE, SERVED, STACKED, is_stack, live_name, policy_of, version_of
from slime.weights.names import read_header

PROBE = "probe"
"""In the place of a backend of a process group: only see whether the address can be reached."""
BIAS = "score.bias"
OTHER_MODELS = "SGLANG_DISABLED_MODEL_ARCHS"
DRAFTS_OFF = "drafts off"
"""An action of /weights_checker; in the place of a file, that an engine may be asked for it."""


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


def keep_host_copies() -> None:
    """Have a server that gives its memory up keep its copy of the model on the host for the next time.

    Pinning the memory anew takes ten times as long as copying into it.
    """
    from sglang.srt.utils import torch_memory_saver_adapter as saver

    pause = saver._TorchMemorySaverAdapterReal.pause

    def keep_and_pause(adapter: Any, tag: str) -> None:
        saver._memory_saver.retain_cpu_backup = True
        pause(adapter, tag)

    saver._TorchMemorySaverAdapterReal.pause = keep_and_pause


def keep_own_drafts() -> None:
    """Leave a draft that is no part of the trained model as it is in every weight sync and check.

    SGLang gives what it receives to the drafting model, too. A head of its own has layers under the names of the
    target's first ones: with other shapes the sync fails, with the same its weights are overwritten by the target's.
    NGRAM has no model, and SGLang fails to load files into it.
    """
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager as Manager

    start = Manager.__init__

    def start_without_draft(manager: Any, **parts: Any) -> None:
        start(manager, **parts | {"draft_worker": None})

    Manager.__init__ = start_without_draft


def stop_drafts_when_told(num_steps: int) -> None:
    """Have an engine draft so many tokens, and none from the moment on when `DRAFTS_OFF` is asked of it.

    SGLang changes how many it drafts by itself (--speculative-adaptive): it has the graphs of every number, zero among
    them, which is plain decoding. Here it has these two, and changes when it is told to.
    """
    from sglang.srt.managers.io_struct import CheckWeightsReqOutput
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager as Manager
    from sglang.srt.speculative import adaptive_spec_params

    # With zero steps it would still compute the draft's cache, for a return to drafts that does not come.
    os.environ["SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND"] = "1"
    entry = {"candidate_steps": [0, num_steps], "warmup_batches": sys.maxsize}
    adaptive_spec_params._load_adaptive_config = lambda path: ({}, {1: entry})
    check = Manager.check_weights

    def check_or_stop(manager: Any, request: Any) -> Any:
        if request.action != DRAFTS_OFF:
            return check(manager, request)
        controller = getattr(manager.scheduler.draft_worker, "adaptive_controller", None)
        if controller is None:  # SGLang leaves it out where it cannot change the number, and says so in its log
            return CheckWeightsReqOutput(success=False, message="It cannot stop drafting.", payload=None)
        for slot in controller.params._slots.values():
            slot.current_steps = 0
        return CheckWeightsReqOutput(success=True, message="It drafts no more.", payload=None)

    Manager.check_weights = check_or_stop


def serve_live_adapter() -> None:
    """Have a server with LoRA generate with the newest version of the run's adapter (`slime.weights.adapters`).

    - A request that names no adapter gets the version that was loaded last, once generating is not paused. So do
      those of hooks, agents and judges. `BASE` asks for the base, `live_name` for one of several policies.
    - It keeps that version until it ends, and its answer says so: SGLang knows the base's version alone.
    - A version that is not the newest leaves once its last request has ended. SGLang itself would wait for that with
      a lock that loads need, too: with paused requests nothing would ever go on.
    """
    from sglang.srt.managers.io_struct import GenerateReqInput
    from sglang.srt.managers.tokenizer_manager import TokenizerManager as Manager

    live = LiveAdapter()
    resolve, wait = _counting_all(Manager._validate_and_resolve_lora), Manager._wait_one_response
    tokenize = Manager._tokenize_one_request

    async def resolve_live(manager: Any, request: Any) -> None:
        if not isinstance(request, GenerateReqInput) or str(request.rid).startswith("HEALTH_CHECK"):
            return await resolve(manager, request)
        asked, newest = request.lora_path, dict(live.names)
        live.give_to(request, asked)
        try:
            return await resolve(manager, request)
        except ValueError:
            if live.names == newest:
                raise
        live.give_to(request, asked)  # it has left between the two
        return await resolve(manager, request)

    async def wait_and_name(manager: Any, request: Any, *more: Any) -> AsyncIterator[Any]:
        version = version_of(getattr(request, "lora_path", None))
        async for answer in wait(manager, request, *more):
            if version is not None and isinstance(answer, dict) and "meta_info" in answer:
                answer["meta_info"]["weight_version"] = version
            yield answer

    async def tokenize_or_release(manager: Any, request: Any) -> Any:
        try:
            return await tokenize(manager, request)
        except BaseException:  # SGLang would count it for ever, and never unload what it counts
            if isinstance(lora_id := getattr(request, "lora_id", None), str):
                await manager.lora_registry.release(lora_id)
            raise

    Manager._validate_and_resolve_lora = resolve_live
    Manager._wait_one_response = wait_and_name
    Manager._tokenize_one_request = tokenize_or_release
    for method in ("load_lora_adapter", "load_lora_adapter_from_tensors"):
        setattr(Manager, method, live.noting(getattr(Manager, method)))
    _refuse_wrong_checksums()


def _counting_all(resolve: Callable[..., Any]) -> Callable[..., Any]:
    """SGLang's way to count who uses an adapter, with all requests that end.

    It counts n answers of a prompt, and ends n + 1 requests: the first computes the prompt alone.
    """

    async def resolve_and_count(manager: Any, request: Any) -> None:
        await resolve(manager, request)
        if request.lora_path and not request.is_single and getattr(request, "parallel_sample_num", 1) > 1:
            await manager.lora_registry.acquire(request.lora_path[: request.batch_size])

    return resolve_and_count


class LiveAdapter:
    """The version of the run's adapter that a server serves.

    Attributes:
        names: policy (None: there is one, without a name) -> SGLang's name of its newest version.
    """

    def __init__(self) -> None:
        self.names: dict[str | None, str] = {}
        self._leaving: set[asyncio.Task[None]] = set()

    def give_to(self, request: Any, asked: Any) -> None:
        """Name the adapter in a request, and in those that SGLang has made of a batch.

        Args:
            request: which is changed.
            asked: its `lora_path` as it came; of a batch one for all, or a list with one for each.
        """
        if request.is_single:
            request.lora_path = self._chosen(asked)
            return
        count = request.batch_size * request.parallel_sample_num
        names = [self._chosen(name) for name in (asked if isinstance(asked, list) else [asked] * count)]
        request.lora_path = names if any(names) else None
        for number, part in vars(request).get("_sub_obj_cache", {}).items():
            part.lora_path = names[number]

    def _chosen(self, asked: str | None) -> str | None:
        """SGLang's name of what a request asks for: the newest version without a name, none for `BASE`.

        Raises:
            ValueError: there are several policies, and it names none of them.
        """
        if asked == BASE:
            return None
        policy = policy_of(asked) if asked else None
        if asked and (policy is None or version_of(asked)):
            return asked
        if not self.names:
            return None  # adapters begin at zero
        if policy not in self.names:
            known = ", ".join(live_name(name) for name in self.names if name)
            raise ValueError(f"lora_path {asked}: this run has several policies; name one of {known or BASE}")
        return self.names[policy]

    def noting(self, load: Callable[..., Any]) -> Callable[..., Any]:
        """SGLang's way to load, after which the version that was loaded is served, and others leave."""

        async def load_and_note(manager: Any, request: Any, *more: Any) -> Any:
            if version_of(request.lora_name) is None:
                return await load(manager, request, *more)
            path = getattr(request, "lora_path", None)
            if path and (problem := adapter_file_problem(Path(path))):
                from sglang.srt.managers.io_struct import LoadLoRAAdapterReqOutput

                return LoadLoRAAdapterReqOutput(success=False, error_message=problem)
            taken = manager.lora_registry.get_all_adapters()
            names = itertools.chain([request.lora_name], (f"{request.lora_name}.{i}" for i in itertools.count(1)))
            request.lora_name = next(name for name in names if name not in taken)  # the same version, sent again
            result = await load(manager, request, *more)
            if result.success:
                self.names[policy_of(request.lora_name)] = request.lora_name
                self._dismiss_others(manager)
                manager.record_config_updates("slime", weight_version=version_of(request.lora_name))
                served = {SERVED: manager.config_value("weight_version")}  # the trainer need not ask
                result.loaded_adapters = (result.loaded_adapters or {}) | served
            return result

        return load_and_note

    def _dismiss_others(self, manager: Any) -> None:
        stay = {*self.names.values()} | {task.get_name() for task in self._leaving}
        for name, ref in manager.lora_registry.get_all_adapters().items():
            if version_of(name) is not None and name not in stay:
                task = asyncio.get_running_loop().create_task(self._leave(manager, name, ref.lora_id), name=name)
                self._leaving.add(task)
                task.add_done_callback(self._leaving.discard)

    async def _leave(self, manager: Any, name: str, lora_id: str) -> None:
        from sglang.srt.managers.io_struct import UnloadLoRAAdapterReqInput

        await manager.lora_registry._counters[lora_id].wait_for_zero()
        await manager.unload_lora_adapter(UnloadLoRAAdapterReqInput(lora_name=name))
        manager.lora_ref_cache.pop(name, None)  # or SGLang would try to load it again when it is named


def adapter_file_problem(directory: Path) -> str | None:
    """Why the adapter of a PEFT directory cannot be read; None when it can."""
    file = directory / "adapter_model.safetensors"
    try:
        expected, size = read_header(file).file_bytes, file.stat().st_size
    except OSError as error:
        return f"{error.filename} cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError) as error:
        return f"{file} has a damaged header ({type(error).__name__}: {error})"
    return None if size == expected else f"{file} has {size} bytes instead of {expected}"


def _refuse_wrong_checksums() -> None:
    """Answer tensors of an adapter that arrive damaged; SGLang's scheduler ends there."""
    from sglang.srt.lora.lora_manager import LoRAUpdateOutput
    from sglang.srt.managers.tp_worker import BaseTpWorker

    load = BaseTpWorker.load_lora_adapter_from_tensors

    def load_or_refuse(worker: Any, request: Any) -> Any:
        try:
            return load(worker, request)
        except RuntimeError as error:
            return LoRAUpdateOutput(success=False, error_message=str(error), loaded_adapters={})

    BaseTpWorker.load_lora_adapter_from_tensors = load_or_refuse


def take_stacks() -> None:
    """Keep tensors that come as SGLang would stack them (`STACKED`): views of memory that the trainer has filled.

    SGLang itself copies two thirds of an adapter to stack them, and repeats the A of one that comes with fused names.
    """
    from sglang.srt.layers.utils import get_layer_id
    from sglang.srt.lora.lora import LoRAAdapter

    load = LoRAAdapter.initialize_weights_from_tensors

    def load_unstacked(adapter: Any, tensors: dict[str, Any]) -> None:
        stacks = {name for name in tensors if adapter.config.hf_config.get(STACKED) and is_stack(name)}
        load(adapter, {name: tensor for name, tensor in tensors.items() if name not in stacks})
        for name in stacks:
            adapter.layers[get_layer_id(name)].weights[name] = tensors[name]

    LoRAAdapter.initialize_weights_from_tensors = load_unstacked


def import_one_model(config: Mapping[str, Any], server_args: Mapping[str, Any]) -> None:
    """Have SGLang import the module of the model that it serves alone, in place of all of its two hundred.

    They cost every scheduler 4.5 s of CPU time. A model that may need a second one (a draft, a language model inside
    another) gets all, and so does one whose class is not found in exactly one module.

    Args:
        config: the model's config.json.
        server_args: of the server.
    """
    package = importlib.util.find_spec("sglang")
    others = ("speculative_algorithm", "model_impl", "json_model_override_args")
    if package is None or package.origin is None or any(map(server_args.get, others)):
        return
    if {OTHER_MODELS, "SGLANG_EXTERNAL_MODEL_PACKAGE"} & set(os.environ):  # both are about modules of these names
        return
    modules = {path.stem: path.read_text() for path in Path(package.origin).parent.joinpath("srt/models").glob("*.py")}
    served = set()
    for architecture in config.get("architectures") or []:
        is_entry = re.compile(rf"^EntryClass\b.*\b{re.escape(architecture)}\b", re.M | re.S).search
        found = [name for name, text in modules.items() if f"class {architecture}(" in text and is_entry(text)]
        if len(found) != 1 or not architecture.endswith("ForCausalLM") or architecture.startswith("Mixtral"):
            return  # (a quantised Mixtral is a class of its own)
        served |= set(found)
    if served and not any("ModelRegistry" in modules[name] for name in served):
        os.environ[OTHER_MODELS] = ",".join(sorted(set(modules) - served))
