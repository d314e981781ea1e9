"""The engine behind an event loop: one owner thread makes every model call, anyio carries events."""

import math
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Generic, NamedTuple, Self, TypeVar

import anyio
from anyio.from_thread import BlockingPortal
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from treadle_core.engine import Engine, EngineStats
from treadle_core.errors import EngineClosed, describe
from treadle_core.events import Event, Failed, Finished, Timings, Usage
from treadle_core.prefix import PrefixStats
from treadle_core.request import Request

T = TypeVar("T")

CLOSED = "the engine is closed"
TASKS = Path("/proc/self/task")
EXIT_SECONDS = 0.05
LONGEST_EXIT_SECONDS = 2.0
NO_USAGE = Usage(prompt_tokens=0, completion_tokens=0)
NO_TIMINGS = Timings(queue=0.0, prefill=0.0, first_token=0.0, decode=0.0, total=0.0)


class Command(NamedTuple):
    """Something for the owner thread, and what to do if that has ended."""

    run: Callable[[Engine], object]
    otherwise: Callable[[str], None]


class Subscription:
    """Where a request's events go, and how many answers have not ended.

    Attributes:
        left: Whether its reader is gone.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.left = False
        self.open = set(range(request.n))
        streams = anyio.create_memory_object_stream[Event](math.inf)
        self.send: MemoryObjectSendStream[Event] = streams[0]
        self.receive: MemoryObjectReceiveStream[Event] = streams[1]

    def deliver(self, event: Event) -> bool:
        """Pass an event on; returns whether it was the last one."""
        self.send.send_nowait(event)
        if isinstance(event, Finished | Failed):
            self.open.discard(event.index)
        return not self.open


class AsyncEngine:
    """An :class:`Engine` on a thread of its own.

    The factory, every step and every array live on that thread; this side exchanges plain data
    with it. Use it as an async context manager: entering waits until the factory returned (and
    raises what it raised), leaving aborts what is unfinished and frees the model.

    Args:
        factory: Makes the engine, model included, on the owner thread.
    """

    def __init__(self, factory: Callable[[], Engine]) -> None:
        self._factory = factory
        self._subscriptions: dict[str, Subscription] = {}
        self._accepted: dict[str, Subscription] = {}
        self._inbox: deque[Command] = deque()
        self._outbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._draining = False
        self._closing = False
        self._dead: str | None = "the engine was not started"
        self._stats: EngineStats | None = None
        self._thread: threading.Thread | None = None
        self._portal: BlockingPortal | None = None
        self._stack = AsyncExitStack()
        self._engine: Engine | None = None

    async def __aenter__(self) -> Self:
        """Start the owner thread and wait for the model.

        Raises:
            EngineClosed: It was entered before; an engine lives once.
        """
        if self._thread is not None:
            raise EngineClosed("an engine can be entered once")
        self._portal = await self._stack.enter_async_context(BlockingPortal())
        started: Outcome[None] = Outcome()
        self._thread = threading.Thread(
            target=self._own, args=(started,), name="treadle-engine", daemon=True
        )
        self._thread.start()
        try:
            await started.wait()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Abort what is unfinished and free the model."""
        await self._stop()

    @property
    def alive(self) -> bool:
        """Whether the owner thread runs."""
        return self._dead is None

    @property
    def closing(self) -> bool:
        """Whether it was told to end. For any thread, so that what loads for long may look."""
        return self._closing

    @property
    def death(self) -> str | None:
        """Why the owner thread does not run; None while it does."""
        return self._dead

    @property
    def stats(self) -> EngineStats | None:
        """Figures as of the last step; never waits."""
        return self._stats

    @property
    def engine(self) -> Engine:
        """The engine, for its plain properties; its methods belong to the owner thread.

        Raises:
            EngineClosed: It was not started or has ended.
        """
        if self._engine is None:
            raise EngineClosed(self._dead or "the engine is closed")
        return self._engine

    @asynccontextmanager
    async def open(self, request: Request) -> AsyncGenerator[AsyncIterator[Event]]:
        """Submit a request; the body iterates over its events, terminal ones included.

        Leaving the body early, by an exception or a cancellation too, aborts the request.

        Raises:
            TreadleError: The request was not accepted (see :meth:`Engine.add`).
        """
        subscription = Subscription(request)
        try:
            await self.call(lambda engine: self._accept(engine, subscription))
            yield subscription.receive
        finally:
            self._leave(subscription)

    async def generate(self, request: Request) -> list[Event]:
        """All events of a request; cancelling the call aborts it."""
        async with self.open(request) as events:
            return [event async for event in events]

    async def abort(self, request_id: str) -> bool:
        """End a request in whatever state; its stream gets its terminal events.

        Returns:
            Whether it was unfinished.
        """
        return await self.call(lambda engine: self._abort(engine, request_id))

    async def prefix_stats(self) -> PrefixStats | None:
        """Figures of the prefix store, or None without one; waits for no step.

        Raises:
            EngineClosed: It was not started or has ended.
        """
        # In a thread of its own: a tier on disk may have to look there.
        return await anyio.to_thread.run_sync(self.engine.prefix_stats)

    async def clear_prefixes(self) -> None:
        """As :meth:`Engine.clear_prefixes`; when this returns, it is done.

        Raises:
            EngineClosed: The owner thread has ended.
        """
        await self.call(Engine.clear_prefixes)

    async def call(self, function: Callable[[Engine], T]) -> T:
        """Run ``function`` on the owner thread between two steps and return its result.

        Raises:
            EngineClosed: The owner thread has ended.
        """
        if self._dead is not None:
            raise EngineClosed(self._dead)
        outcome: Outcome[T] = Outcome()

        def run(engine: Engine) -> None:
            settle = outcome.attempt(lambda: function(engine))
            self._emit(settle)

        self._post(run, lambda reason: outcome.fail(EngineClosed(reason)))
        return await outcome.wait()

    def _accept(self, engine: Engine, subscription: Subscription) -> None:
        """On the owner thread: only then connect, behind the events of a predecessor's id."""
        engine.add(subscription.request)
        self._tell(engine.flush())
        self._accepted[subscription.request.id] = subscription
        self._emit(lambda: self._connect(subscription))

    def _connect(self, subscription: Subscription) -> None:
        if not subscription.left:
            self._subscriptions[subscription.request.id] = subscription

    def _leave(self, subscription: Subscription) -> None:
        """The reader goes; what has not ended is aborted."""
        subscription.left = True
        if self._subscriptions.get(subscription.request.id) is subscription:
            del self._subscriptions[subscription.request.id]
        subscription.send.close()
        subscription.receive.close()
        self._post(lambda engine: self._abandon(engine, subscription))

    def _abandon(self, engine: Engine, subscription: Subscription) -> None:
        """On the owner thread: abort a request, unless its id is somebody else's."""
        request_id = subscription.request.id
        if self._accepted.get(request_id) is subscription:
            del self._accepted[request_id]
            self._abort(engine, request_id)

    def _abort(self, engine: Engine, request_id: str) -> bool:
        """On the owner thread: abort, and tell before anything else happens."""
        aborted = engine.abort(request_id)
        self._tell(engine.flush())
        return aborted

    def _tell(self, events: list[Event]) -> None:
        if events:
            self._emit(lambda: self._deliver(events))

    def _post(
        self,
        run: Callable[[Engine], object],
        otherwise: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Have the owner thread ``run`` something; ``otherwise`` is told why it never will."""
        with self._wake:
            if self._dead is None:
                self._inbox.append(Command(run, otherwise))
                self._wake.notify()
                return
            reason = self._dead
        otherwise(reason)

    def _emit(self, item: Callable[[], None]) -> None:
        """Have ``item`` called on the event loop, in order, at its next opportunity."""
        self._outbox.append(item)
        with self._wake:
            if self._draining:
                return
            self._draining = True
        assert self._portal is not None
        self._portal.start_task_soon(self._drain)

    async def _drain(self) -> None:
        with self._wake:
            self._draining = False
        while self._outbox:
            self._outbox.popleft()()

    def _deliver(self, events: Iterable[Event]) -> None:
        for event in events:
            subscription = self._subscriptions.get(event.request_id)
            if subscription is None:
                continue
            try:
                last = subscription.deliver(event)
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                # Its reader closed the stream; the other readers' events must still arrive.
                self._leave(subscription)
                continue
            if last:
                del self._subscriptions[event.request_id]
                subscription.send.close()

    def _own(self, started: "Outcome[None]") -> None:
        """The owner thread."""
        try:
            engine = self._factory()
            self._stats = engine.stats()
        except BaseException as error:  # noqa: BLE001 — raised again where the engine is entered
            failure = tellable(error)
            self._dead = f"the engine did not start: {describe(error)}"
            self._emit(lambda: started.fail(failure))
            return
        self._engine = engine
        self._dead = None
        self._emit(lambda: started.succeed(None))
        reason = "the engine stopped"
        try:
            while self._serve(engine):
                pass
            reason = CLOSED
        except BaseException as error:  # noqa: BLE001 — the last resort: nobody may wait for ever
            reason = f"the engine stopped: {describe(error)}"
        finally:
            self._engine = None
            self._end(engine, reason)

    def _serve(self, engine: Engine) -> bool:
        """Run commands, then one step. Returns whether to go on."""
        with self._wake:
            while not (self._inbox or self._closing or engine.has_work):
                self._wake.wait()
            num_commands = len(self._inbox)
        # One by one: if a command ends the engine, those behind it are still there to be told.
        for _ in range(num_commands):
            self._next_command().run(engine)
        if self._closing:
            return False
        if engine.has_work:
            self._tell(engine.step())
        self._stats = engine.stats()
        return True

    def _next_command(self) -> Command:
        with self._wake:
            return self._inbox.popleft()

    def _end(self, engine: Engine, reason: str) -> None:
        """Close the engine and tell everybody who waits."""
        with self._wake:
            self._dead = reason
            orphans = list(self._inbox)
            self._inbox.clear()
        try:
            last = engine.close()
        except Exception as error:  # noqa: BLE001 — closing must reach the waiting callers
            reason = f"{reason}; closing it failed: {describe(error)}"
            last = []
        if reason == CLOSED:
            self._tell(last)
        for command in orphans:
            self._emit(lambda command=command: command.otherwise(reason))
        self._emit(lambda: self._bury(reason))

    def _bury(self, reason: str) -> None:
        """A terminal event for every answer that the engine could not end itself."""
        for request_id, subscription in list(self._subscriptions.items()):
            for index in sorted(subscription.open):
                failed = Failed(
                    request_id=request_id,
                    index=index,
                    code=EngineClosed.code,
                    message=reason,
                    usage=NO_USAGE,
                    timings=NO_TIMINGS,
                )
                self._deliver([failed])

    async def _stop(self) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not None:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(join, self._thread)
        await self._stack.aclose()


def join(thread: threading.Thread) -> None:
    """Wait until a thread has ended, for the operating system too.

    mlx gives back what it keeps for a thread when the system ends it. It needs the interpreter for
    that, and aborts the process if there is none any more. Before 3.13 Python's own join returns
    earlier.
    """
    thread.join()
    if sys.version_info >= (3, 13):
        return
    if not TASKS.is_dir():
        time.sleep(EXIT_SECONDS)
        return
    task, patience = TASKS / str(thread.native_id), time.monotonic() + LONGEST_EXIT_SECONDS
    while task.exists() and time.monotonic() < patience:
        time.sleep(0.001)


def tellable(error: BaseException) -> Exception:
    """An exception that may be raised on another thread: an exit there is not an exit here."""
    return error if isinstance(error, Exception) else EngineClosed(describe(error))


class Outcome(Generic[T]):
    """A result that another thread provides once; settled and awaited on the event loop."""

    def __init__(self) -> None:
        self._event = anyio.Event()
        self._value: list[T] = []
        self._error: Exception | None = None

    def succeed(self, value: T) -> None:
        """Provide the result."""
        self._value.append(value)
        self._event.set()

    def fail(self, error: Exception) -> None:
        """Provide an exception instead."""
        self._error = error
        self._event.set()

    def attempt(self, function: Callable[[], T]) -> Callable[[], None]:
        """Call ``function`` here; return what settles this outcome on the event loop."""
        try:
            value = function()
        except BaseException as error:  # noqa: BLE001 — raised again where the outcome is awaited
            failure = tellable(error)
            return lambda: self.fail(failure)
        return lambda: self.succeed(value)

    async def wait(self) -> T:
        """The result.

        Raises:
            Exception: What was provided instead.
        """
        await self._event.wait()
        if self._error is not None:
            raise self._error
        return self._value[0]
