"""A model's own caches come back from host memory as they were."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from treadle_core.mlx_runtime.adapter import TextModel
from treadle_core.mlx_runtime.host import pack_caches, to_device, to_host, unpack_caches
from treadle_core.testing import zoo


@pytest.mark.parametrize(
    "dtype", [mx.float32, mx.float16, mx.bfloat16, mx.int32, mx.uint8], ids=str
)
def test_values_survive(dtype: mx.Dtype) -> None:
    array = (mx.random.normal((3, 5)) * 100).astype(dtype)
    mx.eval(array)
    back = to_device(to_host(array))
    assert back.dtype == dtype
    assert mx.array_equal(back, array)


def test_a_device_copy_does_not_follow_the_host() -> None:
    host = np.ones((2, 2), dtype=np.float32)
    array = to_device(host)
    host[0, 0] = 7
    assert array[0, 0].item() == 1


@pytest.mark.parametrize("length", [1, 5, 40])
@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_a_row_goes_on_from_unpacked_caches(family: str, length: int) -> None:
    model = TextModel(zoo.build(family))
    tokens = [(7 * i + 3) % 200 + 3 for i in range(length + 4)]
    caches: list[Any] = model.new_cache()
    mx.eval(model.forward(mx.array([tokens[:length]]), caches))
    packed = pack_caches(caches)
    kept = [array.copy() for array in packed]
    expected = model.forward(mx.array([tokens[length:]]), caches)
    mx.eval(expected)
    fresh: list[Any] = model.new_cache()
    unpack_caches(fresh, packed)
    found = model.forward(mx.array([tokens[length:]]), fresh)
    assert mx.array_equal(found, expected)
    for before, after in zip(kept, packed, strict=True):
        assert before.tobytes() == after.tobytes()
