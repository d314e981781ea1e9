"""How many bytes live KV may take on this machine."""

import os

import mlx.core as mx

from treadle_core.request import check_float


def kv_budget(utilization: float) -> int:
    """Bytes left for KV when ``utilization`` of the memory is used, weights counted already.

    On a GPU the memory is what the driver recommends as working set, on a CPU all of RAM.

    Args:
        utilization: Share of the memory, above 0 and at most 1.
    """
    check_float("gpu_memory_utilization", utilization, 0.0, 1.0, exclusive_low=True)
    total = int(memory_bytes() * utilization)
    return max(total - mx.get_active_memory(), 0)


def memory_bytes() -> int:
    """Bytes that the default device works with."""
    if mx.default_device() != mx.cpu:
        info = mx.device_info()
        for key in ("max_recommended_working_set_size", "total_memory", "memory_size"):
            value = info.get(key)
            if isinstance(value, int):
                return value
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def wire_memory() -> None:
    """Keep weights and KV resident on a Mac's GPU, up to what the driver recommends.

    Without it macOS may page out weights between steps. Elsewhere there is nothing to do.
    """
    if mx.metal.is_available():
        mx.set_wired_limit(memory_bytes())
