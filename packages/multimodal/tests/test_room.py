"""Requests share bytes: no more than there are, in order, and nobody is forgotten."""

from functools import partial

import anyio
import pytest

pytest.importorskip("treadle_multimodal", reason="the default environment leaves mlx-vlm out")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from treadle_multimodal.room import Room, Share

SIZE = 10

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(0, 14)),
        st.tuples(st.sampled_from(["leave", "resize", "cancel"]), st.integers(0, 20)),
    ),
    max_size=30,
)


class Guest:
    """A request that takes its share, keeps it, and leaves when it is told to."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = min(num_bytes, SIZE)
        self.share: Share | None = None
        self.scope = anyio.CancelScope()
        self._leave = anyio.Event()

    async def stay(self, room: Room) -> None:
        with self.scope:
            async with room.share(self.num_bytes) as self.share:
                await self._leave.wait()
        self.share = None

    def leave(self) -> None:
        self._leave.set()


class Model:
    """What should be: who is inside with how much, and who waits, in order."""

    def __init__(self) -> None:
        self.inside: dict[Guest, int] = {}
        self.waiting: list[Guest] = []

    def take(self, guest: Guest) -> None:
        self.waiting.append(guest)
        self._admit()

    def leave(self, guest: Guest) -> None:
        self.inside.pop(guest, None)
        if guest in self.waiting:
            self.waiting.remove(guest)
        self._admit()

    def resize(self, guest: Guest, num_bytes: int) -> None:
        self.inside[guest] = num_bytes
        self._admit()

    @property
    def taken(self) -> int:
        return sum(self.inside.values())

    def _admit(self) -> None:
        while self.waiting and self.taken + self.waiting[0].num_bytes <= SIZE:
            guest = self.waiting.pop(0)
            self.inside[guest] = guest.num_bytes


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps=STEPS)
def test_it_is_as_a_small_model_of_it_says(steps: list[tuple[str, int]]) -> None:
    anyio.run(follow, steps)


async def follow(steps: list[tuple[str, int]]) -> None:
    room, model = Room(SIZE), Model()
    guests: list[Guest] = []
    async with anyio.create_task_group() as tasks:
        for what, number in steps:
            before = room.taken
            if what == "take":
                guests.append(Guest(number))
                tasks.start_soon(guests[-1].stay, room)
                await anyio.wait_all_tasks_blocked()
                model.take(guests[-1])
            elif guests:
                act(what, number, guests[number % len(guests)], model)
                await anyio.wait_all_tasks_blocked()
            assert room.taken == model.taken
            assert what == "resize" or room.taken <= max(SIZE, before)
            assert [guest for guest in guests if guest.share is not None] == [
                guest for guest in guests if guest in model.inside
            ]
        tasks.cancel_scope.cancel()
    assert room.taken == 0


def act(what: str, number: int, guest: Guest, model: Model) -> None:
    """Do it to the room through a guest, and to the model."""
    if what == "resize":
        if guest.share is not None:
            guest.share.resize(number)
            model.resize(guest, number)
    elif what == "leave" and guest not in model.waiting:
        guest.leave()
        model.leave(guest)
    elif what == "cancel":
        guest.scope.cancel()
        model.leave(guest)


async def test_whoever_is_let_in_and_cancelled_at_once_leaves_it_to_the_next() -> None:
    room, entered = Room(SIZE), list[str]()
    scope = anyio.CancelScope()

    async def take(name: str) -> None:
        async with room.share(SIZE):
            entered.append(name)

    async def cancelled() -> None:
        with scope:
            await take("cancelled")

    async with anyio.create_task_group() as tasks:
        async with room.share(SIZE):
            tasks.start_soon(cancelled)
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(partial(take, "next"))
            await anyio.wait_all_tasks_blocked()
        # It has its share from now on, and does not know it yet.
        scope.cancel()

    assert entered[-1] == "next"
    assert room.taken == 0
