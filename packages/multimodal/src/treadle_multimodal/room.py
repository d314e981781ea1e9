"""Memory that requests share: who wants some waits for it, in order."""

from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio


class Share:
    """What one request has of a :class:`Room`.

    Args:
        room: Of which.
        num_bytes: How much it wants, and has once it was admitted.
    """

    def __init__(self, room: "Room", num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.admitted = anyio.Event()
        self._room = room

    def resize(self, num_bytes: int) -> None:
        """Have so many bytes instead. While they are more than there is room for, nobody enters."""
        self._room.resize(self, num_bytes)


class Room:
    """So many bytes, shared by requests. For one event loop.

    A request takes all that it may need at once, so none waits for more while it has some. Those
    that wait get theirs in the order in which they came, so that large ones get it too.

    Args:
        num_bytes: How many.
    """

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._taken = 0
        self._waiting: deque[Share] = deque()

    @property
    def taken(self) -> int:
        """What requests have of it."""
        return self._taken

    @asynccontextmanager
    async def share(self, num_bytes: int) -> AsyncGenerator[Share]:
        """Wait for so many bytes, and have them until the body ends; at most all.

        Cancelled while it waits, a request has nothing, and those behind it do not wait for it.
        """
        share = Share(self, min(num_bytes, self._num_bytes))
        self._waiting.append(share)
        self._admit()
        try:
            await share.admitted.wait()
            yield share
        finally:
            self._leave(share)

    def resize(self, share: Share, num_bytes: int) -> None:
        """See :meth:`Share.resize`."""
        assert share.admitted.is_set(), "it has nothing yet"
        self._taken += num_bytes - share.num_bytes
        share.num_bytes = num_bytes
        self._admit()

    def _leave(self, share: Share) -> None:
        if share.admitted.is_set():
            self._taken -= share.num_bytes
        else:
            self._waiting.remove(share)
        self._admit()

    def _admit(self) -> None:
        """Let those in whose turn it is, as far as there is room."""
        while self._waiting and self._taken + self._waiting[0].num_bytes <= self._num_bytes:
            share = self._waiting.popleft()
            self._taken += share.num_bytes
            share.admitted.set()
