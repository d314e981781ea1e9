"""Rows of one group as lists of tokens: what a runner's buffers hold, without a model.

Rows know nothing of sequences and their lengths. They do what instructions say and nothing else,
so that an instruction that is wrong shows as wrong contents; what lies outside of a buffer is
refused at once.
"""

from treadle_core.plan import Close, Move, Open, Promote, Resize, Transfer

Cell = int | None


class SimulatedRows:
    """Rows ``[decoding | prefilling | free]`` of one group.

    Args:
        shared: Whether rows share a buffer of one capacity; otherwise each grows by itself.

    Attributes:
        cells: Contents by row; None was never written.
        capacity: Tokens per row, when they share a buffer.
        num_used: Rows that belong to somebody.
        num_decoding: How many of them decode.
    """

    def __init__(self, *, shared: bool = True) -> None:
        self.cells: list[list[Cell]] = []
        self.capacity = 0
        self.num_used = 0
        self.num_decoding = 0
        self._shared = shared

    def resize(self, change: Resize) -> None:
        """Change the allocation; used rows keep what fits."""
        if not self._shared:
            return
        assert change.rows >= self.num_used, f"{self.num_used} rows do not fit: {change}"
        kept = [row[: change.capacity] for row in self.cells[: self.num_used]]
        padded = [row + [None] * (change.capacity - len(row)) for row in kept]
        free = change.rows - self.num_used
        self.cells = padded + [[None] * change.capacity for _ in range(free)]
        self.capacity = change.capacity

    def open(self, change: Open) -> None:
        """A row joins at the end, with whatever it held before."""
        assert change.row == self.num_used, f"rows are opened at the end: {change}"
        if not self._shared:
            self.cells.append([])
        assert change.row < len(self.cells), f"no such row: {change}"
        self.num_used += 1

    def promote(self, change: Promote) -> None:
        """A prefilling row becomes the newest decoding row."""
        assert change.to == self.num_decoding, f"decoding rows come first: {change}"
        assert change.to <= change.row < self.num_used, f"not a prefilling row: {change}"
        if change.row != change.to:
            mine = self.read(change.row, change.row_length)
            other = self.read(change.to, change.to_length)
            self._put(change.to, mine)
            self._put(change.row, other)
        self.num_decoding += 1

    def close(self, change: Close) -> None:
        """A row leaves and others fill its hole."""
        assert change.row < self.num_used, f"not a used row: {change}"
        read = [self.read(move.source, move.length) for move in change.moves]
        for move, contents in zip(change.moves, read, strict=True):
            self._move(move, contents)
        self.num_used -= 1
        self.num_decoding -= change.row < self.num_decoding
        if not self._shared:
            self.cells.pop()

    def take(self, row: int, length: int) -> list[Cell]:
        """A decoding row's contents, for another group."""
        assert row < self.num_decoding, f"row {row} does not decode"
        return self.read(row, length)

    def insert(self, change: Transfer, contents: list[Cell]) -> None:
        """A row arrives as the newest decoding row."""
        assert self._shared, f"rows of their own do not move between groups: {change}"
        assert change.to == self.num_decoding, f"decoding rows come first: {change}"
        for move in change.moves:
            self._move(move, self.read(move.source, move.length))
        self._put(change.to, contents)
        self.num_used += 1
        self.num_decoding += 1

    def read(self, row: int, length: int) -> list[Cell]:
        """The first ``length`` cells of a row."""
        assert row < len(self.cells), f"row {row} does not exist"
        assert length <= len(self.cells[row]), f"row {row} has no {length} cells"
        return self.cells[row][:length]

    def write(self, row: int, start: int, tokens: tuple[int, ...]) -> None:
        """Put tokens at ``[start, start + len(tokens))`` of a used row."""
        assert row < self.num_used, f"row {row} belongs to nobody"
        cells, stop = self.cells[row], start + len(tokens)
        if not self._shared:
            cells.extend([None] * (stop - len(cells)))
        assert stop <= len(cells), f"row {row}: {stop} tokens exceed {len(cells)} cells"
        cells[start:stop] = tokens

    def _move(self, move: Move, contents: list[Cell]) -> None:
        assert move.target < len(self.cells), f"row {move.target} does not exist: {move}"
        self._put(move.target, contents)

    def _put(self, row: int, contents: list[Cell]) -> None:
        if self._shared:
            self.cells[row][: len(contents)] = contents
        else:
            self.cells[row] = list(contents)
