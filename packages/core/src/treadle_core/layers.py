"""What each layer of a model keeps between tokens, as data: asked once, at load."""

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from treadle_core.prefix import StateLayout, TokenArray

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int32": 4, "uint32": 4, "uint8": 1}
WORD_BITS = 32


class Quantised(Struct, frozen=True):
    """Numbers of ``bits`` bits; each ``group_size`` of them share a scale and a bias."""

    bits: int
    group_size: int


class FullAttention(Struct, frozen=True, tag="full", omit_defaults=True):
    """Keys and values of every token: plain attention, and MLA (one head, unequal dims).

    A row holds ``[heads, length, key_dim]`` and ``[heads, length, value_dim]``, of ``dtype``
    unless they are ``quantised``.
    """

    heads: int
    key_dim: int
    value_dim: int
    dtype: str
    quantised: Quantised | None = None

    @property
    def arrays(self) -> tuple[TokenArray, ...]:
        """What a row holds: of the keys first, then of the values."""
        return (*self._stored(self.key_dim), *self._stored(self.value_dim))

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in all of them."""
        dims, size = self.key_dim + self.value_dim, DTYPE_BYTES[self.dtype]
        if self.quantised is None:
            return self.heads * dims * size
        bits, group_size = self.quantised.bits, self.quantised.group_size
        return self.heads * (dims * bits // 8 + 2 * dims // group_size * size)

    @property
    def latent(self) -> bool:
        """Whether the layer stores a compressed latent (MLA) in place of keys and values."""
        return self.heads == 1 and self.key_dim != self.value_dim

    def _stored(self, dim: int) -> tuple[TokenArray, ...]:
        if self.quantised is None:
            return (TokenArray(self.heads, dim, self.dtype),)
        words = TokenArray(self.heads, dim * self.quantised.bits // WORD_BITS, "uint32")
        per_group = TokenArray(self.heads, dim // self.quantised.group_size, self.dtype)
        return (words, per_group, per_group)


class Window(Struct, frozen=True, tag="window"):
    """Keys and values of the newest tokens, and of the first ``keep``.

    A query at position q sees the positions p with ``p > q - (size - keep)`` or ``p < keep``.
    """

    heads: int
    key_dim: int
    value_dim: int
    dtype: str
    size: int
    keep: int = 0


class Recurrent(Struct, frozen=True, tag="recurrent"):
    """State arrays of fixed size per row; ``shapes`` leave out the row axis."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]


class Composite(Struct, frozen=True, tag="composite"):
    """A layer with several caches."""

    parts: tuple["LayerSpec", ...]


class Opaque(Struct, frozen=True, tag="opaque"):
    """A layer whose cache only the model itself understands; it runs one row at a time."""

    bytes_per_token: int


LayerSpec = FullAttention | Window | Recurrent | Composite | Opaque


class ModelSpec(Struct, frozen=True, kw_only=True):
    """What an engine must know of a model.

    Attributes:
        layers: One spec per cache of the model, in its order.
        vocab_size: Number of logits.
        context_length: Most tokens of prompt and answer together.
        batched: Whether rows share a forward; otherwise they run one at a time.
        note: Why not, in one sentence, when ``batched`` is false.
        model_type: The architecture's name.
        storable: Whether a row's state comes back as it was; ``note`` says why not.
        media: Whether it understands what requests attach to their prompts.
    """

    layers: tuple[LayerSpec, ...]
    vocab_size: int
    context_length: int
    batched: bool = True
    note: str = ""
    model_type: str = ""
    storable: bool = True
    media: bool = False


def bound(spec: LayerSpec, max_kv_size: int, keep: int) -> LayerSpec:
    """``spec`` with at most ``max_kv_size`` tokens per row, the first ``keep`` among them."""
    match spec:
        case FullAttention(heads, key_dim, value_dim, dtype):
            return Window(heads, key_dim, value_dim, dtype, max_kv_size, keep)
        case Composite(parts):
            return Composite(tuple(bound(part, max_kv_size, keep) for part in parts))
        case Window():
            return replace(spec, size=min(spec.size, max_kv_size))
        case Recurrent() | Opaque():
            return spec


def quantise(spec: LayerSpec, form: Quantised) -> LayerSpec:
    """``spec`` with full attention quantised; windows and recurrent state stay exact."""
    match spec:
        case FullAttention():
            return replace(spec, quantised=form)
        case Composite(parts):
            return Composite(tuple(quantise(part, form) for part in parts))
        case Window() | Recurrent() | Opaque():
            return spec


def layer_bytes(spec: LayerSpec, rows: int, capacity: int, slack: int) -> int:
    """Bytes that ``rows`` rows of ``capacity`` tokens take in one layer.

    Args:
        spec: The layer.
        rows: Allocated rows.
        capacity: Allocated tokens per row.
        slack: Longest draft that rows may take back: tokens that a ring holds beyond its window.
            Recurrent layers keep the state before a draft as well.
    """
    match spec:
        case FullAttention():
            return rows * capacity * spec.token_bytes
        case Window(heads, key_dim, value_dim, dtype):
            columns = min(capacity, ring_size(spec, slack))
            return rows * columns * heads * (key_dim + value_dim) * DTYPE_BYTES[dtype]
        case Recurrent(shapes, dtypes):
            sizes = (_product(s) * DTYPE_BYTES[d] for s, d in zip(shapes, dtypes, strict=True))
            return rows * sum(sizes) * (2 if slack else 1)
        case Composite(parts):
            return sum(layer_bytes(part, rows, capacity, slack) for part in parts)
        case Opaque(bytes_per_token):
            return rows * capacity * bytes_per_token


def state_layout(spec: ModelSpec) -> StateLayout:
    """What the state of a row looks like to a prefix store."""
    parts = [part for layer in spec.layers for part in flatten(layer)]
    kept = [part for part in parts if isinstance(part, FullAttention)] if spec.batched else []
    return StateLayout(
        tokens=tuple(array for part in kept for array in part.arrays),
        has_state=len(kept) < len(parts),
        format=msgspec.json.encode((spec.layers, spec.batched)).decode(),
    )


def why_no_drafts(spec: ModelSpec) -> str:
    """Why rows of a model cannot take tokens back, in one clause; empty where they can."""
    return "" if spec.batched else "its rows run one at a time"


def is_recurrent(spec: ModelSpec) -> bool:
    """Whether some layer keeps recurrent state."""
    return any(isinstance(part, Recurrent) for layer in spec.layers for part in flatten(layer))


def flatten(spec: LayerSpec) -> tuple[LayerSpec, ...]:
    """The parts of a composite layer, or the layer itself."""
    return spec.parts if isinstance(spec, Composite) else (spec,)


def ring_size(spec: Window, slack: int) -> int:
    """Columns of a full ring: the window, and ``slack`` tokens that may still be taken back."""
    return spec.size + slack


def grows(spec: LayerSpec) -> bool:
    """Whether the layer's state grows with the number of tokens."""
    match spec:
        case Composite(parts):
            return any(grows(part) for part in parts)
        case Recurrent():
            return False
        case FullAttention() | Window() | Opaque():
            return True


def _product(shape: tuple[int, ...]) -> int:
    size = 1
    for dimension in shape:
        size *= dimension
    return size
