"""The KV budget is a share of the memory that the device has, weights taken off."""

import os

import mlx.core as mx
import pytest

from treadle_core.errors import InvalidRequest, Unsupported
from treadle_core.mlx_runtime.memory import kv_budget, memory_bytes


def test_a_cpu_works_with_all_of_ram_and_a_gpu_with_what_the_driver_allows() -> None:
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    if mx.default_device() == mx.cpu:
        assert memory_bytes() == ram
    else:
        assert 0 < memory_bytes() != ram


def test_the_budget_is_a_share_of_it_without_what_is_taken_already() -> None:
    taken = mx.zeros((2**22,), dtype=mx.uint8)
    mx.eval(taken)

    budgets = [kv_budget(share) for share in (0.25, 0.5, 1.0)]

    active = mx.get_active_memory()
    assert active >= taken.nbytes
    assert budgets == [int(memory_bytes() * share) - active for share in (0.25, 0.5, 1.0)]


def test_a_share_that_the_weights_use_up_is_refused_with_the_numbers() -> None:
    weights = mx.zeros((2**22,), dtype=mx.uint8)
    mx.eval(weights)

    with pytest.raises(Unsupported, match=r"leaves 0 for KV beside \d+ bytes of weights"):
        kv_budget(weights.nbytes / memory_bytes() / 2)


@pytest.mark.parametrize("share", [0, -0.1, 1.1, float("nan"), True, "half"])
def test_a_share_outside_of_nothing_to_all_is_refused(share: float) -> None:
    with pytest.raises(InvalidRequest, match="gpu_memory_utilization"):
        kv_budget(share)
