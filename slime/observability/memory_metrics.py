"""How much memory is in use at the end of a phase, as metrics: of the device, of torch in this process, of the host.

It measures; which phases there are, and when they end, their owners know.
"""

from __future__ import annotations

from pathlib import Path

from slime.utils import accelerator

GB = 1e9


def memory_after(phase: str) -> dict[str, float]:
    """`memory/after_<phase>/<what>` in GB (1e9 bytes).

    `host_rss_gb` is this process's resident memory. With CUDA also `gpu_used_gb`, what all processes hold of this
    process's GPU, `gpu_process_gb`, what this process alone holds (where the driver tells processes apart), and
    `torch_allocated_gb` and `torch_reserved_gb` of this process (both count memory that is put away by
    torch_memory_saver as if it were there).
    """
    found = {"host_rss_gb": _resident_bytes()}
    if accelerator.kind() == "cuda":
        import torch

        free, total = torch.cuda.mem_get_info()
        found["gpu_used_gb"] = total - free
        if (own := accelerator.process_bytes()) is not None:
            found["gpu_process_gb"] = own
        found["torch_allocated_gb"] = torch.cuda.memory_allocated()
        found["torch_reserved_gb"] = torch.cuda.memory_reserved()
    return {f"memory/after_{phase}/{name}": num_bytes / GB for name, num_bytes in found.items()}


def _resident_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no line VmRSS")
