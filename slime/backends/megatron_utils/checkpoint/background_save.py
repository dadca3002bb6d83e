"""--async-save: a thread writes a rank's part of a checkpoint while training goes on.

When the save begins, the tensors are copied to host memory: what is written is what they were then, and the host needs
room for it. The thread writes them (Megatron's writer, without its forked helpers: megatron_patch.checkpoints)
and reads back what it has written, for the manifest. It ends with its process.
"""

from __future__ import annotations

import concurrent.futures as cf
from collections.abc import Callable
from pathlib import Path

from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

from slime.checkpoints.paths import Entry, entries_of


class BackgroundSave:
    """A checkpoint whose files are written in the background.

    Args:
        request: of `dist_checkpointing.save(..., async_sharded_save=True)`.
        directory: of the checkpoint.
        is_mine: which of its files this rank writes.
    """

    def __init__(self, request: AsyncRequest, directory: Path, is_mine: Callable[[Path], bool]) -> None:
        self._finalize = list(request.finalize_fns)
        write = _staged(request) if request.async_fn is not None else None  # without: this rank has nothing to write

        def run() -> dict[str, Entry]:
            if write is not None:
                write()
            return entries_of(directory, [path for path in sorted(directory.glob("*.distcp")) if is_mine(path)])

        threads = cf.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._entries = threads.submit(run)
        threads.shutdown(wait=False)

    @property
    def is_written(self) -> bool:
        """Whether `finish` has nothing to wait for on this rank."""
        return self._entries.done()

    def finish(self, deadline_s: float) -> dict[str, Entry]:
        """Wait for the files and write what describes them all (collective).

        Returns:
            the entries of this rank's files for the manifest.

        Raises:
            Exception: what writing failed with, on every rank; CheckpointException, which is none, among others.
            TimeoutError: it took too long.
        """
        cf.wait([self._entries], timeout=deadline_s)
        for action in self._finalize:  # the first one raises what any rank failed with
            action()
        return self._entries.result(timeout=deadline_s)


def _staged(request: AsyncRequest) -> Callable[[], None]:
    """The writing of copies; Megatron copies what is on a device, and would write host tensors as they are by then."""
    write, (rank, live, results) = request.async_fn, request.async_fn_args
    held = {tensor.data_ptr() for *_, (_, tensors) in live for _, tensor in tensors}
    staged = []
    for path, key, (data, tensors) in request.preload_fn():
        copies = [(item, tensor.clone() if tensor.data_ptr() in held else tensor) for item, tensor in tensors]
        staged.append((path, key, (data, copies)))
    return lambda: write(rank, staged, results, **request.async_fn_kwargs)
