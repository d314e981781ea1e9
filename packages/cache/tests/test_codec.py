"""States in 8 or 4 bits."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from treadle_cache.codec import Quantizer
from treadle_cache.config import CacheConfig
from treadle_cache.index import block_metadata_bytes
from treadle_cache.ram import RamStore
from treadle_cache.testing import FakeSlowTier, layout_of
from treadle_cache.tiered import TieredStore
from treadle_core.errors import InvalidRequest, Unsupported
from treadle_core.prefix import HostArray, PrefixKey
from treadle_core.testing.prefixes import KeyedRow

SIZE = 4
DTYPES = ("bfloat16", "float16", "float32")


def quantized(min_tokens: int = 0, bits: int = 8, capacity: int = 1 << 22) -> RamStore:
    config = CacheConfig(
        capacity_bytes=capacity,
        block_size=SIZE,
        kv_storage_bits=bits,
        group_size=32,
        min_quantize_tokens=min_tokens,
    )
    return RamStore(config)


def key(num_tokens: int) -> PrefixKey:
    return PrefixKey(tokens=tuple(range(num_tokens)))


def numbers(array: HostArray) -> HostArray:
    """The numbers of an array that may be bfloat16."""
    if array.dtype == np.uint16:
        return np.array(mx.array(array).view(mx.bfloat16).astype(mx.float32))
    return array.astype(np.float32)


def expected(array: HostArray, bits: int) -> HostArray:
    """What mlx makes of all tokens at once."""
    device = mx.array(array)
    if array.dtype == np.uint16:
        device = device.view(mx.bfloat16)
    packed = mx.quantize(device, group_size=32, bits=bits)
    plain = mx.dequantize(*packed, group_size=32, bits=bits)
    return np.array(plain.view(mx.uint16) if plain.dtype == mx.bfloat16 else plain)


@pytest.mark.parametrize("bits", [8, 4])
def test_blocks_hold_what_mlx_makes_of_the_whole_row(bits: int) -> None:
    layout = layout_of(*DTYPES, dim=64)
    store = quantized(bits=bits)
    store.attach("weights", layout)
    row = KeyedRow(key(12), layout)
    store.insert(key(12), row, 0)
    store.check_integrity()
    ticket = store.find(key(13), 12).ticket
    assert ticket is not None
    fresh = row.tokens(0, 12)
    for index in range(3):
        loaded = store.load(ticket).tokens(index)
        assert loaded.dtype == fresh[index].dtype
        assert loaded.tobytes() == expected(fresh[index], bits).tobytes()
        error = np.abs(numbers(loaded) - numbers(fresh[index])).max()
        assert 0 < error < (0.1 if bits == 8 else 1.1)


def test_quantised_blocks_are_smaller() -> None:
    layout = layout_of("float32", dim=64)
    exact = RamStore(CacheConfig(capacity_bytes=1 << 20, block_size=SIZE))
    small = quantized(bits=4)
    sizes: list[int] = []
    for store in (exact, small):
        store.attach("weights", layout)
        store.insert(key(8), KeyedRow(key(8), layout), 0)
        sizes.append(store.stats().used_bytes - 2 * block_metadata_bytes(SIZE))
    # A group of 32 floats: 128 bytes, or 16 and a scale and a bias.
    assert sizes[1] * 128 == sizes[0] * 24


def test_short_states_are_kept_as_they_are_whoever_shares_them() -> None:
    layout = layout_of("float16", dim=64)
    its = [key(6), key(20)]
    for order in (its, its[::-1]):
        store = quantized(min_tokens=6)
        store.attach("weights", layout)
        for one in order:
            store.insert(one, KeyedRow(one, layout), 0)
            store.check_integrity()
        ticket = store.find(key(21), 20).ticket
        assert ticket is not None
        loaded = store.load(ticket).tokens(0)
        (fresh,) = KeyedRow(key(20), layout).tokens(0, 20)
        assert loaded[:, :8].tobytes() == fresh[:, :8].tobytes()
        assert loaded[:, 8:].tobytes() == expected(fresh[:, 8:], 8).tobytes()


def test_the_budget_knows_both_sizes_of_block() -> None:
    layout = layout_of("float32", dim=64)
    head = SIZE * layout.token_bytes + block_metadata_bytes(SIZE)
    body = SIZE * layout.token_bytes * 40 // 128 + block_metadata_bytes(SIZE)
    store = quantized(min_tokens=5, capacity=2 * head + 3 * body)
    store.attach("weights", layout)
    store.insert(key(6 * SIZE), KeyedRow(key(6 * SIZE), layout), 0)
    store.check_integrity()
    assert store.stats().used_bytes == store.stats().capacity_bytes
    assert store.find(key(24), 24).num_tokens == 5 * SIZE


def test_what_follows_the_last_block_is_kept_as_it_is() -> None:
    layout = layout_of("bfloat16", has_state=True, dim=64)
    store = quantized()
    store.attach("weights", layout)
    row = KeyedRow(key(6), layout)
    store.insert(key(6), row, 0)
    ticket = store.find(key(7), 6).ticket
    assert ticket is not None
    loaded, fresh = store.load(ticket), row.tokens(0, 6)[0]
    assert loaded.tokens(0)[:, 4:].tobytes() == fresh[:, 4:].tobytes()
    assert [one.tobytes() for one in loaded.state()] == [one.tobytes() for one in row.state()]


def test_exact_and_quantised_states_are_never_confused(tmp_path: Path) -> None:
    layout = layout_of("float32", dim=64)
    stores = [RamStore(CacheConfig(capacity_bytes=1 << 20, block_size=SIZE))]
    stores += [quantized(), quantized(bits=4), quantized(min_tokens=8)]
    for store in stores:
        store.attach("weights", layout)
        store.insert(key(8), KeyedRow(key(8), layout), 0)
    assert len({store.chain(key(8)).root for store in stores}) == len(stores)
    stores[0].save_to_disk(tmp_path / "exact")
    assert stores[1].load_from_disk(tmp_path / "exact") == 0


def test_quantised_blocks_survive_both_ways_out(tmp_path: Path) -> None:
    layout = layout_of("float16", dim=64)
    store = TieredStore(quantized(min_tokens=3, capacity=0), FakeSlowTier())
    store.attach("weights", layout)
    store.insert(key(12), KeyedRow(key(12), layout), 0)
    ticket = store.find(key(13), 12).ticket
    assert ticket is not None
    rows = [store.load(ticket).tokens(0)]
    first, second = quantized(min_tokens=3), quantized(min_tokens=3)
    for ram in (first, second):
        ram.attach("weights", layout)
    first.insert(key(12), KeyedRow(key(12), layout), 0)
    first.save_to_disk(tmp_path / "cache")
    assert second.load_from_disk(tmp_path / "cache") == 3
    second.check_integrity()
    for ram in (first, second):
        ticket = ram.find(key(13), 12).ticket
        assert ticket is not None
        rows.append(ram.load(ticket).tokens(0))
    assert len({row.tobytes() for row in rows}) == 1


@pytest.mark.parametrize(
    ("dtypes", "dim", "reason"),
    [
        (("float16",), 48, "head dimension 48 is not a multiple of group_size=32"),
        (("float16", "uint32"), 64, "KV is uint32 already"),
        ((), 64, "keeps nothing per token"),
    ],
)
def test_what_cannot_be_quantised_is_refused(
    dtypes: tuple[str, ...], dim: int, reason: str
) -> None:
    with pytest.raises(Unsupported, match=reason):
        quantized().attach("weights", layout_of(*dtypes, has_state=True, dim=dim))


def test_a_quantizer_names_the_arrays_it_makes() -> None:
    layout = layout_of("bfloat16", dim=64)
    codec = Quantizer(layout.tokens, 4, 32)
    arrays = codec.encode(KeyedRow(key(5), layout).tokens(0, 5))
    assert [(one.heads, one.dim, one.dtype) for one in codec.arrays] == [
        (2, 8, "uint32"),
        (2, 2, "bfloat16"),
        (2, 2, "bfloat16"),
    ]
    assert [(one.shape, str(one.dtype)) for one in arrays] == [
        ((2, 5, 8), "uint32"),
        ((2, 5, 2), "uint16"),
        ((2, 5, 2), "uint16"),
    ]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("capacity_bytes", -1),
        ("capacity_bytes", True),
        ("memory_fraction", 0.0),
        ("memory_fraction", 1.5),
        ("block_size", 0),
        ("kv_storage_bits", 3),
        ("group_size", 16),
        ("min_quantize_tokens", -1),
    ],
)
def test_a_wrong_option_is_named_with_its_value(field: str, value: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        CacheConfig(**{field: value})
    assert (caught.value.field, caught.value.value) == (field, value)
