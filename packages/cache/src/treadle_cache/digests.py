"""Names of stored state: digests of everything that the state depends on.

A chain starts at the root, the digest of a namespace, and goes on block by block:

    root -> tokens [0, size) -> tokens [size, 2 * size) -> ... -> end: the tokens left over

Each digest covers its parent's, so it names the whole prefix up to its last token and the media in
it. Ends name a state at any token count, on a block boundary too; an end never equals a block.
"""

import sys
from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from struct import pack

from msgspec import Struct

from treadle_core.prefix import MediaSpan

DIGEST_BYTES = 32
TOKEN_BYTES = 4

# What keeps the three kinds of digest apart; the number changes with the encoding.
ROOT_DOMAIN = b"treadle.root.1"
BLOCK_DOMAIN = b"treadle.block.1"
END_DOMAIN = b"treadle.end.1"

NO_MEDIA = pack("<I", 0)


class Namespace(Struct, frozen=True, kw_only=True):
    """What states must have in common to be interchangeable, besides tokens and media.

    Attributes:
        fingerprint: Digest of weights, config, settings and dtype.
        kv_format: How the state is kept: dtype or bits of every layer.
        adapter: Identity and version of the adapter in use; empty for none.
        salt: Keeps a tenant's states to itself; empty where all share.
    """

    fingerprint: str
    kv_format: str
    adapter: str = ""
    salt: str = ""

    @property
    def root(self) -> bytes:
        """The digest that the namespace's chains start from."""
        digest = blake2b(digest_size=DIGEST_BYTES, person=ROOT_DOMAIN)
        for field in (self.fingerprint, self.kv_format, self.adapter, self.salt):
            digest.update(_with_length(field.encode()))
        return digest.digest()


class Chain:
    """The digests of one sequence of tokens. Immutable: a copy of the tokens is kept.

    Args:
        root: Digest of the namespace.
        tokens: Token ids, each from 0 to 2**32 - 1.
        block_size: Tokens per block.
        media: What stands at placeholder positions, in any order.

    Raises:
        ValueError: ``block_size`` is below 1.
        OverflowError: A token id is out of range.
    """

    __slots__ = ("_block_size", "_data", "_digests", "_media", "_media_blocks", "_root")

    def __init__(
        self, root: bytes, tokens: Iterable[int], block_size: int, media: Iterable[MediaSpan] = ()
    ) -> None:
        self._root = root
        self._block_size = block_size
        self._media = tuple(media)
        self._data = _encode(tokens)
        self._digests = _digest_blocks(root, self._data, block_size, self._media)
        self._media_blocks = frozenset(
            _media_of_blocks(self._media, block_size, len(self._digests))
        )

    @property
    def root(self) -> bytes:
        """Digest of the namespace."""
        return self._root

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._block_size

    @property
    def digests(self) -> Sequence[bytes]:
        """One digest per full block; not to be changed."""
        return self._digests

    @property
    def num_tokens(self) -> int:
        """Number of tokens, those after the last full block included."""
        return len(self._data) // TOKEN_BYTES

    def position(self, num_blocks: int) -> bytes:
        """Digest of the first ``num_blocks`` blocks; the root for none."""
        return self._digests[num_blocks - 1] if num_blocks else self._root

    def block_tokens(self, number: int) -> bytes:
        """The encoded tokens of a full block, from 0; empty if media overlap it."""
        if number in self._media_blocks:
            return b""
        width = self._block_size * TOKEN_BYTES
        return self._data[number * width : (number + 1) * width]

    def tokens_until_media(self, start: int, stop: int) -> bytes:
        """The encoded tokens from ``start`` up to ``stop`` or the first that stands for media."""
        starts = (max(start, span.start) for span in self._media if span.end > start)
        stop = min(stop, *starts, self.num_tokens)
        return self._data[start * TOKEN_BYTES : stop * TOKEN_BYTES]

    def end(self, num_tokens: int) -> bytes:
        """Digest of the state after exactly ``num_tokens`` tokens.

        Raises:
            ValueError: The chain is shorter.
        """
        if not 0 <= num_tokens <= self.num_tokens:
            raise ValueError(f"{num_tokens} tokens of a chain of {self.num_tokens}")
        num_blocks = num_tokens // self._block_size
        start = num_blocks * self._block_size
        data = self._data[start * TOKEN_BYTES : num_tokens * TOKEN_BYTES]
        return _digest_end(self.position(num_blocks), data, start, self._media)


def block_digests(
    root: bytes, tokens: Iterable[int], block_size: int, media: Iterable[MediaSpan] = ()
) -> list[bytes]:
    """One digest per full block of ``tokens``, each over its parent's.

    A block depends on a media item if and only if they overlap; blocks before an item do not know
    of it, and blocks after it know through their parent.

    Raises:
        ValueError: ``block_size`` is below 1.
        OverflowError: A token id is below 0 or above 2**32 - 1.
    """
    return _digest_blocks(root, _encode(tokens), block_size, tuple(media))


def encoded_block_digest(parent: bytes, tokens: bytes) -> bytes:
    """Digest of a block that no media overlap, from its encoded tokens.

    Raises:
        ValueError: There are no tokens.
    """
    return _digest_blocks(parent, tokens, len(tokens) // TOKEN_BYTES, ())[0]


def common_tokens(one: bytes, other: bytes) -> int:
    """How many encoded tokens two sequences have in common at their start."""
    pairs = zip(memoryview(one).cast("I"), memoryview(other).cast("I"), strict=False)
    length = min(len(one), len(other)) // TOKEN_BYTES
    return next((number for number, (a, b) in enumerate(pairs) if a != b), length)


def tail_digest(
    parent: bytes, tokens: Iterable[int], start: int = 0, media: Iterable[MediaSpan] = ()
) -> bytes:
    """Digest of a state that ends ``tokens`` after the block ``parent``.

    Args:
        parent: Digest of the last full block, or the root.
        tokens: What follows it, fewer than a block; may be empty.
        start: Position of the first of them in the prompt.
        media: Media of the prompt; only what overlaps the tokens counts.

    Raises:
        OverflowError: A token id is below 0 or above 2**32 - 1.
    """
    return _digest_end(parent, _encode(tokens), start, tuple(media))


def _digest_blocks(
    root: bytes, data: bytes, block_size: int, media: tuple[MediaSpan, ...]
) -> list[bytes]:
    if block_size < 1:
        raise ValueError(f"a block of {block_size} tokens")
    width = block_size * TOKEN_BYTES
    num_blocks = len(data) // width
    suffixes = _media_of_blocks(media, block_size, num_blocks)
    count = pack("<I", block_size)
    blank = blake2b(digest_size=DIGEST_BYTES, person=BLOCK_DOMAIN)
    parent, digests = root, list[bytes]()
    for block in range(num_blocks):
        state = blank.copy()
        tokens = data[block * width : (block + 1) * width]
        state.update(_with_length(parent) + count + tokens + suffixes.get(block, NO_MEDIA))
        parent = state.digest()
        digests.append(parent)
    return digests


def _digest_end(parent: bytes, data: bytes, start: int, media: tuple[MediaSpan, ...]) -> bytes:
    num_tokens = len(data) // TOKEN_BYTES
    spans = [span for span in media if span.start < start + num_tokens and span.end > start]
    state = blake2b(digest_size=DIGEST_BYTES, person=END_DOMAIN)
    state.update(_with_length(parent) + pack("<I", num_tokens) + data)
    state.update(_encode_media(spans, start))
    return state.digest()


def _media_of_blocks(
    media: tuple[MediaSpan, ...], block_size: int, num_blocks: int
) -> dict[int, bytes]:
    """Encoded media of each block that overlaps any."""
    spans: dict[int, list[MediaSpan]] = {}
    for span in media:
        last = min((span.end - 1) // block_size, num_blocks - 1)
        for block in range(span.start // block_size, last + 1):
            spans.setdefault(block, []).append(span)
    return {block: _encode_media(found, block * block_size) for block, found in spans.items()}


def _encode_media(spans: list[MediaSpan], start: int) -> bytes:
    """``spans`` as seen from position ``start``, in a fixed order."""
    encoded = b"".join(
        pack("<qQ", span.start - start, span.length) + _with_length(span.digest)
        for span in sorted(spans)
    )
    return pack("<I", len(spans)) + encoded


def _encode(tokens: Iterable[int]) -> bytes:
    """Each token as a little-endian integer of ``TOKEN_BYTES`` bytes."""
    encoded = array("I", tokens)
    assert encoded.itemsize == TOKEN_BYTES, "this platform's unsigned int has another size"
    if sys.byteorder == "big":
        encoded.byteswap()
    return encoded.tobytes()


def _with_length(data: bytes) -> bytes:
    return pack("<Q", len(data)) + data
