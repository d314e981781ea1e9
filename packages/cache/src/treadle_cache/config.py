"""Options of a store, and how much memory it may take when nobody says."""

from collections.abc import Callable

import psutil
from msgspec import Struct

from treadle_core.errors import InvalidRequest
from treadle_core.request import check_float, check_int

STORAGE_BITS = (4, 8)
GROUP_SIZES = (32, 64)


class CacheConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of a RAM store.

    Attributes:
        capacity_bytes: Most bytes, bookkeeping included; 0 stores nothing, None takes
            ``memory_fraction``.
        memory_fraction: Share of the memory that would be free without the store. It is read
            again before every insertion, so that the store shrinks when others need memory.
        block_size: Tokens per block: what is stored and evicted as one, and what prompts share of
            tiers below RAM.
        kv_storage_bits: Bits of a stored number, 4 or 8; None stores what is there, bit by bit.
        group_size: Numbers that share a scale, 32 or 64, where ``kv_storage_bits`` is set.
        min_quantize_tokens: Blocks that begin before this position are stored as they are, so
            that states up to this length lose nothing, whoever shares them.
    """

    capacity_bytes: int | None = None
    memory_fraction: float = 0.2
    block_size: int = 32
    kv_storage_bits: int | None = None
    group_size: int = 64
    min_quantize_tokens: int = 0

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            InvalidRequest: With the field, its value and what is accepted.
        """
        if self.capacity_bytes is not None:
            check_int("capacity_bytes", self.capacity_bytes, 0)
        check_float("memory_fraction", self.memory_fraction, 0.0, 1.0, exclusive_low=True)
        check_int("block_size", self.block_size, 1)
        check_int("min_quantize_tokens", self.min_quantize_tokens, 0)
        if self.kv_storage_bits is not None:
            _check_choice("kv_storage_bits", self.kv_storage_bits, STORAGE_BITS)
        _check_choice("group_size", self.group_size, GROUP_SIZES)


def free_memory() -> int:
    """Bytes that programs can still take without swapping, as the operating system sees it."""
    return int(psutil.virtual_memory().available)


def capacity(config: CacheConfig, used_bytes: int, free: Callable[[], int]) -> int:
    """Most bytes of a store that uses ``used_bytes`` now."""
    if config.capacity_bytes is not None:
        return config.capacity_bytes
    return int((max(0, free()) + used_bytes) * config.memory_fraction)


def _check_choice(field: str, value: object, choices: tuple[int, ...]) -> None:
    if isinstance(value, bool) or value not in choices:
        raise InvalidRequest(field, value, " or ".join(map(str, choices)))
