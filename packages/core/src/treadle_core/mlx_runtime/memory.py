"""How many bytes live KV may take on this machine."""

import os

import mlx.core as mx

from treadle_core.errors import Unsupported
from treadle_core.request import check_float

SMALLEST_BUDGET = 2**20


def kv_budget(utilization: float) -> int:
    """Bytes left for KV when ``utilization`` of the memory is used, weights counted already.

    On a GPU the memory is what the driver recommends as working set, on a CPU all of RAM.

    Args:
        utilization: Share of the memory, above 0 and at most 1.

    Raises:
        InvalidRequest: The share is no share.
        Unsupported: The weights leave nothing of it.
    """
    check_float("gpu_memory_utilization", utilization, 0.0, 1.0, exclusive_low=True)
    total, used = memory_bytes(), mx.get_active_memory()
    left = int(total * utilization) - used
    if left < SMALLEST_BUDGET:
        raise Unsupported(
            f"gpu_memory_utilization: {utilization:g} of {total} bytes leaves {max(left, 0)} for "
            f"KV beside {used} bytes of weights, at least {SMALLEST_BUDGET} are needed"
        )
    return left


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
