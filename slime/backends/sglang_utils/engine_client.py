"""What a run asks of one SGLang server that it can reach, over HTTP: pause, weights, cache, health."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slime.backends.sglang_utils.engine_patches import DRAFTS_OFF, PROBE
from slime.backends.sglang_utils.server_control import (
    CONTROL_TIMEOUT_S,
    Probe,
    model_info_sync,
    server_info_sync,
    why_unhealthy_sync,
)
from slime.backends.sglang_utils.weight_samples import SAMPLE_ACTION
from slime.processes.wait import wait
from slime.utils import http_utils
from slime.utils.errors import HttpError
from slime.utils.http.api_keys import protect_engine
from slime.weights.adapters import SERVED

UPDATE_TIMEOUT_S = 600.0
FLUSH_DEADLINE_S = 60.0
MEMORY_TIMEOUT_S = 300.0
LOAD_FORMAT, COPY_FORMAT = "slime", "slime-copy"
"""Of our engines' /update_weights_from_disk: load a version; only bring the host's copy to it."""
MEMORY_TAGS = ("weights", "kv_cache", "cuda_graph")
"""Kinds of GPU memory that an engine releases and resumes; "cuda_graph" only with SGLANG_MEMORY_SAVER_CUDA_GRAPH=1 in
its environment, otherwise graphs stay where they are."""


@dataclass(frozen=True)
class EngineContact:
    """How to reach an engine without the Ray actor that owns it, and what to say of it.

    Attributes:
        rank: number of the engine in its run.
        url: `http://host:port` of its server.
        log_path: of the server's output; empty where it is not ours.
        first_slot: the first of its slots, among those of all engines of the run; None where it is not known.
    """

    rank: int
    url: str
    log_path: str = ""
    first_slot: int | None = None

    def __str__(self) -> str:
        return f"engine {self.rank} at {self.url}" + (f" (log: {self.log_path})" if self.log_path else "")


class EngineClient:
    """One server.

    Args:
        rank: number of the engine in its run, for messages.

    Attributes:
        disk_load_format: how the server loads weights from files; "auto" is SGLang's own way.
        is_ours: a run has started it, so that it knows more than a stock server (`launch_server.prepare`).
    """

    disk_load_format = LOAD_FORMAT
    is_ours = True

    def __init__(self, *, rank: int) -> None:
        self.rank = rank

    @property
    def url(self) -> str:
        """`http://host:port` of the server."""
        raise NotImplementedError

    def contact(self) -> EngineContact:
        """How others reach this engine."""
        return EngineContact(self.rank, self.url)

    def health(self) -> bool:
        """Whether the server answers."""
        return why_unhealthy_sync(self.url, timeout_s=5.0, probe=Probe.LISTENS) is None

    def pause(self, mode: str = "abort") -> None:
        """Stop generating: "abort" ends the requests in flight, "retract" and "in_place" keep them."""
        self._control("pause_generation", {"mode": mode})

    def flush_cache(self, deadline_s: float = FLUSH_DEADLINE_S) -> None:
        """Forget the prefix cache. The server refuses (400) while requests are in flight: try until they have ended.

        Raises:
            WaitTimeout: requests were still in flight at the deadline.
        """

        def flushed() -> bool:
            try:
                self._control("flush_cache", {})
            except HttpError as error:
                if error.status != 400:
                    raise
                return False
            return True

        wait(f"{self.url} to flush its prefix cache (it refuses while requests are in flight)", deadline_s, flushed)

    def continue_generation(self) -> None:
        """Generate again after `pause`."""
        self._control("continue_generation", {})

    def abort_all(self) -> None:
        """End every request in flight."""
        self._control("abort_request", {"abort_all": True})

    def release_memory_occupation(self, tags: Sequence[str] = MEMORY_TAGS) -> None:
        """Give GPU memory up; needs `enable_memory_saver`, and waits for requests in flight first.

        The KV cache is forgotten, and so are weights, unless the server keeps a copy: they must be sent again after
        they were resumed. (SGLang itself keeps the model's buffers that are no weights.)

        Raises:
            WaitTimeout: requests were still in flight at the deadline.
            HttpError: the server is gone.
        """
        self.flush_cache()  # a server that is not idle would die of the next request
        self._control("release_memory_occupation", {"tags": list(tags)}, timeout_s=MEMORY_TIMEOUT_S)

    def resume_memory_occupation(self, tags: Sequence[str] = MEMORY_TAGS) -> None:
        """Take GPU memory again that `release_memory_occupation` gave up; each tag once.

        Raises:
            HttpError: the server is gone; it also dies where there is not enough memory.
        """
        self._control("resume_memory_occupation", {"tags": list(tags)}, timeout_s=MEMORY_TIMEOUT_S)

    def check_scheduler(self) -> None:
        """Ask the server something that its scheduler answers, also while it is paused.

        Raises:
            HttpError: it did not.
        """
        server_info_sync(self.url)

    def get_weight_version(self) -> str:
        """The version given with the last weight update, or by `set_weight_version` since ("default" before)."""
        return str(model_info_sync(self.url)["weight_version"])  # /get_weight_version is 404

    def set_weight_version(self, version: str) -> str:
        """Give the weights that the server has a version; requests in flight stay. Returns it as read back."""
        self._update("update_weight_version", new_version=version, abort_all_requests=False)
        return self.get_weight_version()

    def check_weights(self, action: str) -> None:
        """Have the server keep a copy of its weights ("snapshot"), overwrite them with random numbers
        ("reset_tensors"), or compare them with the copy ("compare").

        Raises:
            RuntimeError: they differ from the copy; names the tensors.
        """
        self._update("weights_checker", action=action)

    def stop_drafts(self) -> None:
        """Have a server of a run with --spec-auto-off draft no more; requests in flight go on without."""
        self._update("weights_checker", action=DRAFTS_OFF)

    def sample_weights(self, names: Sequence[str]) -> list[dict[str, str]] | None:
        """What each rank of the server holds of these tensors: name -> `weight_samples.describe`.

        Returns:
            None when the server was started by someone else: a stock SGLang knows no such question.
        """
        try:
            answer = self._update("weights_checker", action=SAMPLE_ACTION + " ".join(names))
        except RuntimeError:
            return None
        return [rank["checksums"] for rank in answer["ranks"]]

    def update_weights_from_tensor(
        self,
        serialized_named_tensors: Sequence[str],
        *,
        load_format: str | None = None,
        flush_cache: bool = False,
        weight_version: str | None = None,
    ) -> str:
        """Load tensors out of memory that is shared with the sender.

        Args:
            serialized_named_tensors: one handle a TP rank, of `weight_transfer.serialize_flat`.
            load_format: "flattened_bucket" for those.
            flush_cache: forget the prefix cache afterwards.
            weight_version: the server's version from now on; None leaves it.

        Returns:
            the server's version.
        """
        return self._load(
            "update_weights_from_tensor",
            weight_version,
            serialized_named_tensors=list(serialized_named_tensors),
            load_format=load_format,
            flush_cache=flush_cache,
        )

    def probe_link(self, master_address: str, master_port: int) -> None:
        """See whether a server of ours can connect to the trainer.

        Raises:
            RuntimeError: it cannot; says why.
        """
        where: dict[str, Any] = {"master_address": master_address, "master_port": master_port}
        where |= {"rank_offset": 0, "world_size": 0}
        self._update("init_weights_update_group", **where, group_name=PROBE, backend=PROBE)

    def try_broadcast(self, group_name: str) -> None:
        """Take part in a broadcast of one byte, a 1, over a group that a server of ours has joined."""
        self._update(
            "update_weights_from_distributed",
            names=[],
            dtypes=[],
            shapes=[],
            group_name=group_name,
            load_format="flattened_bucket",
            flush_cache=False,
        )

    def init_weights_update_group(
        self, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None:
        """Join a process group with the trainer; returns when every member has joined.

        Args:
            master_address: of rank 0, the trainer.
            master_port: of rank 0.
            rank_offset: rank in the group of this engine's TP rank 0.
            world_size: trainer ranks plus TP ranks of all engines.
            group_name: the same as the trainer's.
            backend: "gloo" or "nccl".
        """
        self._update(
            "init_weights_update_group",
            master_address=master_address,
            master_port=master_port,
            rank_offset=rank_offset,
            world_size=world_size,
            group_name=group_name,
            backend=backend,
        )

    def update_weights_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        *,
        group_name: str,
        load_format: str | None = None,
        flush_cache: bool = False,
        weight_version: str | None = None,
    ) -> str:
        """Receive tensors that rank 0 of the group broadcasts, and load them.

        Args:
            names: HF names.
            dtypes: "float32", "bfloat16", ...; gloo does not notice when they differ from what is sent.
            shapes: of each tensor.
            group_name: of `init_weights_update_group`.
            load_format: "flattened_bucket" for one broadcast of all, uint8 [num_bytes], in which they follow each
                other without a gap; None for a broadcast of each. Both in the order of `names`.
            flush_cache: forget the prefix cache afterwards.
            weight_version: the server's version from now on; None leaves it.

        Returns:
            the server's version.
        """
        return self._load(
            "update_weights_from_distributed",
            weight_version,
            names=list(names),
            dtypes=list(dtypes),
            shapes=[list(shape) for shape in shapes],
            group_name=group_name,
            load_format=load_format,
            flush_cache=flush_cache,
        )

    def update_weights_from_disk(
        self, path: str, *, weight_version: str, local_dir: str | None = None, timeout_s: float = UPDATE_TIMEOUT_S
    ) -> str:
        """Load the weights that an HF directory holds.

        Args:
            path: of the directory, on the server's host.
            weight_version: the server's version from now on.
            local_dir: a directory of the server's host with its own copy of the weights, to which a delta is applied;
                for servers of ours.
            timeout_s: for reading all of it, which is as large as the model.

        Returns:
            the server's version.

        Raises:
            RuntimeError: the server refuses the directory; it says why.
        """
        return self._load(
            "update_weights_from_disk",
            weight_version,
            timeout_s=timeout_s,
            model_path=path,
            load_format=self.disk_load_format + (f":{local_dir}" if local_dir else ""),
            flush_cache=False,
        )

    def bring_copy(self, path: str, *, local_dir: str, timeout_s: float = UPDATE_TIMEOUT_S) -> None:
        """Have a server of ours bring its host's own copy of the weights to a version, while it generates.

        Args:
            path: of the version's directory, on the server's host.
            local_dir: as of `update_weights_from_disk`, which then has only to load.
            timeout_s: for reading all of the version, and writing it there.

        Raises:
            RuntimeError: the version is refused; it says why.
        """
        load_format = f"{COPY_FORMAT}:{local_dir}"
        self._update("update_weights_from_disk", timeout_s=timeout_s, model_path=path, load_format=load_format)

    def load_adapter(self, name: str, *, path: str | None = None, **tensors: Any) -> str | None:
        """Load a LoRA adapter; with a name of a version, a server of ours serves it from then on.

        Args:
            name: `slime.weights.adapters.adapter_name`, or any other.
            path: a PEFT directory on the server's host; one directory a name, for SGLang may read it again.
            tensors: in its place, the adapter as `weight_transfer.adapter_tensors_of` has it.

        Returns:
            the version that a server of ours has from now on: the name's, as the server has read it.

        Raises:
            RuntimeError: the server refuses it; it says why.
        """
        if path is None:
            answer = self._update("load_lora_adapter_from_tensors", lora_name=name, **tensors)
        else:
            answer = self._update("load_lora_adapter", lora_name=name, lora_path=path)
        return (answer.get("loaded_adapters") or {}).get(SERVED)

    def prompt_log_probs(self, token_ids: Sequence[int], *, adapter: str | None = None) -> list[float]:
        """The log-probs of all tokens but the first.

        Args:
            token_ids: at least two.
            adapter: its name; None is the one that the server serves, `slime.weights.adapters.BASE` none.
        """
        payload: dict[str, Any] = {"input_ids": list(token_ids), "return_logprob": True, "logprob_start_len": 0}
        payload |= {"lora_path": adapter, "sampling_params": {"max_new_tokens": 1}}
        answer = http_utils.post_sync(f"{self.url}/generate", payload, timeout_s=UPDATE_TIMEOUT_S)
        return [entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]]

    def destroy_weights_update_group(self, group_name: str) -> None:
        """Leave a process group."""
        self._update("destroy_weights_update_group", group_name=group_name)

    def _control(self, endpoint: str, payload: dict[str, Any], *, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        http_utils.post_sync(f"{self.url}/{endpoint}", payload, timeout_s=timeout_s)

    def _load(self, endpoint: str, sent: str | None, *, timeout_s: float = UPDATE_TIMEOUT_S, **payload: Any) -> str:
        """Update weights; returns the version then: SGLang sets it once all is loaded, and says so in its answer."""
        answer = self._update(endpoint, timeout_s=timeout_s, weight_version=sent, **payload)
        if sent is not None and f"Weight version updated to {sent}." in str(answer.get("message")):
            return sent
        return self.get_weight_version()

    def _update(self, endpoint: str, *, timeout_s: float = UPDATE_TIMEOUT_S, **payload: Any) -> dict[str, Any]:
        """Post, and return an answer that says success."""
        try:
            answer = http_utils.post_sync(f"{self.url}/{endpoint}", payload, timeout_s=timeout_s)
        except HttpError as error:
            if error.status != 400:
                raise
            raise RuntimeError(f"engine {self.rank} refused {endpoint}: {error}") from None
        if not answer.get("success"):
            why = answer.get("message") or answer.get("error_message")
            raise RuntimeError(f"engine {self.rank} refused {endpoint}: {why}")
        return dict(answer)


class DirectEngine(EngineClient):
    """An engine that belongs to another process, asked directly: a Ray actor in between costs 1 to 2 ms a call.

    Args:
        contact: of the engine.
    """

    def __init__(self, contact: EngineContact) -> None:
        super().__init__(rank=contact.rank)
        self._contact = contact
        protect_engine(contact.url)

    @property
    def url(self) -> str:
        """`http://host:port` of the server."""
        return self._contact.url

    def contact(self) -> EngineContact:
        """As it was given."""
        return self._contact
