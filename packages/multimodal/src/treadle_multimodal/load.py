"""From the media parts of a request to decoded media: concurrent, bounded, in order."""

import os
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from threading import Lock
from typing import Protocol, TypeVar, assert_never

import anyio
from anyio import from_thread, to_thread

from treadle_core import SystemClock
from treadle_core.ports import Clock
from treadle_multimodal.audio import decode_audio
from treadle_multimodal.config import MultimodalConfig
from treadle_multimodal.encoding import check_bytes, decode_base64, decode_data_uri
from treadle_multimodal.errors import Item, MediaError, MediaTimeout, MediaTooLarge
from treadle_multimodal.fetch import Fetcher
from treadle_multimodal.files import read_file
from treadle_multimodal.images import convert_image, decode_image
from treadle_multimodal.limits import MediaLimits
from treadle_multimodal.media import Checkpoint, Claim, Media
from treadle_multimodal.room import Room, Share
from treadle_multimodal.sources import (
    Base64,
    Bytes,
    DataUri,
    LocalPath,
    MediaPart,
    PilImage,
    Url,
    describe_source,
)
from treadle_multimodal.video import decode_video


class Made(Protocol):
    """What is made of media, such as a prompt."""

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        ...


_T = TypeVar("_T")
_Made = TypeVar("_Made", bound=Made)


class MediaLoader:
    """Loads the media of requests. One serves all of them, and bounds them together.

    Fetching happens on the event loop, everything else in worker threads. Remote media are fetched
    first: a request holds nothing that others need to decode theirs while it waits for a host.

    Args:
        config: Limits and policy.
        fetcher: For remote media; one after the configuration by default.
        clock: Times the decoding.
    """

    def __init__(
        self,
        config: MultimodalConfig,
        *,
        fetcher: Fetcher | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._config = config
        self._fetcher = fetcher or Fetcher(config.fetch, config.limits)
        self._clock = clock or SystemClock()
        self._room = Room(config.limits.max_loaded_bytes)
        self._fetch_room = Room(config.limits.max_loaded_bytes)
        self._slots = anyio.CapacityLimiter(config.limits.max_concurrent)
        self._threads = anyio.CapacityLimiter(min(config.limits.max_concurrent, spare_cores()))

    async def load(
        self, parts: Sequence[MediaPart], fields: Sequence[str] = ()
    ) -> tuple[Media, ...]:
        """The media of one request, in the order of ``parts``.

        It waits until there is room for them beside those of other requests. They have it until
        this returns; with :meth:`prepare`, longer.

        The first item that fails ends the others; none is decoded before all are fetched. When this
        returns, raises or is cancelled, nothing of it runs any more.

        Args:
            parts: What to load.
            fields: What the caller calls each in errors; they are numbered by default.

        Raises:
            MediaError: There are too many, or an item cannot be used; ``item`` then names it.
        """
        budget = Budget(self._config.limits)
        async with self._fetched(parts, fields, budget) as files, self._share(parts):
            return await self._load(parts, files, fields, budget)

    @asynccontextmanager
    async def prepare(
        self,
        parts: Sequence[MediaPart],
        work: Callable[[tuple[Media, ...]], _Made],
        fields: Sequence[str] = (),
    ) -> AsyncGenerator[_Made]:
        """What becomes of the media of one request, for the body.

        They have room beside those of other requests until ``work`` is through with them, and what
        it made has room until the body ends. It runs in one of the threads that decode: all of it
        together leaves a core to the engine.

        Args:
            parts: What to load; see :meth:`load`.
            work: Makes something of the media and does not keep them, such as a prompt.
            fields: What the caller calls each in errors.

        Raises:
            MediaError: As :meth:`load`; also what ``work`` raises.
        """
        budget = Budget(self._config.limits)
        async with AsyncExitStack() as stack:
            async with self._fetched(parts, fields, budget) as files:
                share = await stack.enter_async_context(self._share(parts))
                media = await self._load(parts, files, fields, budget)
                del files
            share.resize(budget.decoded)
            made = await self._in_thread(partial(work, media))
            del media
            share.resize(made.nbytes)
            yield made

    @asynccontextmanager
    async def _fetched(
        self, parts: Sequence[MediaPart], fields: Sequence[str], budget: "Budget"
    ) -> AsyncGenerator[tuple[Bytes | None, ...]]:
        """The remote files of a request, which have room; None for items that are here already."""
        limits = self._config.limits
        if len(parts) > limits.max_items:
            most = f"at most {limits.max_items} in a request"
            raise MediaTooLarge("media", f"{len(parts)} items", most)
        remote = [part for part in parts if isinstance(part.source, Url)]
        if not remote:
            yield (None,) * len(parts)
            return

        async def fetch(index: int) -> Bytes | None:
            part = parts[index]
            if not isinstance(part.source, Url):
                return None
            most = limits.max_bytes(part.kind)
            fetched = await self._fetcher.fetch(part.source.url, most, budget.take_encoded)
            return Bytes(data=fetched.data, media_type=fetched.media_type)

        largest = sum(limits.max_bytes(part.kind) for part in remote)
        async with self._fetch_room.share(min(largest, limits.max_request_bytes)) as share:
            at_once = anyio.CapacityLimiter(limits.max_concurrent)
            files = await self._each(parts, fields, at_once, fetch)
            share.resize(budget.encoded)
            yield files

    @asynccontextmanager
    async def _share(self, parts: Sequence[MediaPart]) -> AsyncGenerator[Share]:
        """Room for as much as the media of a request can be, whose sizes nobody knows yet."""
        limits, rate = self._config.limits, self._config.audio_sample_rate
        largest = sum(limits.max_decoded(part.kind, rate) for part in parts)
        async with self._room.share(min(largest, limits.max_decoded_bytes)) as share:
            yield share

    async def _load(
        self,
        parts: Sequence[MediaPart],
        files: Sequence[Bytes | None],
        fields: Sequence[str],
        budget: "Budget",
    ) -> tuple[Media, ...]:
        async def load(index: int) -> Media:
            return await self._load_part(parts[index], files[index], budget)

        return await self._each(parts, fields, self._slots, load)

    async def _each(
        self,
        parts: Sequence[MediaPart],
        fields: Sequence[str],
        at_once: anyio.CapacityLimiter,
        work: Callable[[int], Awaitable[_T]],
    ) -> tuple[_T, ...]:
        """Do something for each item by its number; the first that fails ends the others."""
        done: dict[int, _T] = {}
        failures: list[MediaError] = []

        async def do(index: int, part: MediaPart) -> None:
            try:
                async with at_once:
                    done[index] = await work(index)
            except MediaError as error:
                source = describe_source(part.source)
                field = fields[index] if fields else ""
                item = Item(index=index, kind=part.kind, source=source, field=field)
                failures.append(error.of(item))
                tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            for index, part in enumerate(parts):
                tasks.start_soon(do, index, part)
        if failures:
            raise failures[0]
        return tuple(done[index] for index in range(len(parts)))

    async def _load_part(self, part: MediaPart, fetched: Bytes | None, budget: "Budget") -> Media:
        source = part.source
        if not isinstance(source, PilImage):
            source = fetched or await self._read_here(part, budget)
        return await self._in_thread(partial(self._decode, part, source, budget.take_decoded))

    async def _read_here(self, part: MediaPart, budget: "Budget") -> Bytes:
        source = part.source
        assert not isinstance(source, Url | PilImage), "nothing to read"
        file = await self._in_thread(partial(self._read, part, source))
        budget.take_encoded(len(file.data))
        return file

    def _read(self, part: MediaPart, source: Base64 | Bytes | DataUri | LocalPath) -> Bytes:
        """The bytes of a source that is not fetched. Blocks."""
        max_bytes = self._config.limits.max_bytes(part.kind)
        match source:
            case Base64(data=data, media_type=media_type):
                return Bytes(data=decode_base64(data, max_bytes), media_type=media_type)
            case Bytes(data=data):
                check_bytes(len(data), max_bytes)
                return source
            case DataUri(media_type=media_type):
                return Bytes(data=decode_data_uri(source, max_bytes), media_type=media_type)
            case LocalPath(path=path):
                return Bytes(data=read_file(path, self._config.allowed_directories, max_bytes))
            case _:
                assert_never(source)

    def _decode(self, part: MediaPart, source: Bytes | PilImage, claim: Claim) -> Media:
        """A file as what its part says. Blocks."""
        limits, checkpoint = self._config.limits, self._checkpoint()
        if isinstance(source, PilImage):
            return convert_image(source.image, limits, checkpoint=checkpoint, claim=claim)
        data, media_type = source.data, source.media_type
        match part.kind:
            case "image":
                return decode_image(
                    data, limits, media_type=media_type, checkpoint=checkpoint, claim=claim
                )
            case "video":
                return decode_video(
                    data,
                    limits,
                    fps=part.options.fps or self._config.video_fps,
                    max_frames=part.options.max_frames,
                    media_type=media_type,
                    checkpoint=checkpoint,
                    claim=claim,
                )
            case "audio":
                return decode_audio(
                    data,
                    limits,
                    sample_rate=self._config.audio_sample_rate,
                    media_type=media_type,
                    checkpoint=checkpoint,
                    claim=claim,
                )
            case _:
                assert_never(part.kind)

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        # Not abandoned when cancelled: decoders stop at their next checkpoint, and until then
        # their memory counts.
        return await to_thread.run_sync(work, limiter=self._threads)

    def _checkpoint(self) -> Checkpoint:
        """Ends the work of a thread when it takes too long from now, or nobody waits for it."""
        seconds = self._config.limits.decode_seconds
        end = self._clock.now() + seconds

        def check() -> None:
            from_thread.check_cancelled()
            if self._clock.now() > end:
                raise MediaTimeout("decoding", "more time", f"at most {seconds:g} seconds")

        return check


def spare_cores() -> int:
    """Cores that this process may use beside the engine's; at least one."""
    usable = os.sched_getaffinity(0) if sys.platform == "linux" else range(os.cpu_count() or 1)
    return max(1, len(usable) - 1)


class Budget:
    """What one request may still bring. Safe to use from several threads.

    Args:
        limits: Of a request's encoded and decoded bytes.
    """

    def __init__(self, limits: MediaLimits) -> None:
        self._limits = limits
        self._encoded = 0
        self._decoded = 0
        self._lock = Lock()

    @property
    def encoded(self) -> int:
        """Bytes of files that were taken."""
        return self._encoded

    @property
    def decoded(self) -> int:
        """Bytes of pixels and samples that were taken."""
        return self._decoded

    def take_encoded(self, num_bytes: int) -> None:
        """Count bytes of files.

        Raises:
            MediaTooLarge: They are more than are left.
        """
        with self._lock:
            self._encoded += num_bytes
            self._check("bytes", self._encoded, self._limits.max_request_bytes)

    def take_decoded(self, num_bytes: int) -> None:
        """Count bytes of pixels and samples.

        Raises:
            MediaTooLarge: They are more than are left.
        """
        with self._lock:
            self._decoded += num_bytes
            # Such a request would have to wait for more room than there is.
            most = min(self._limits.max_decoded_bytes, self._limits.max_loaded_bytes)
            self._check("decoded bytes", self._decoded, most)

    def _check(self, field: str, taken: int, limit: int) -> None:
        if taken > limit:
            raise MediaTooLarge(field, taken, f"at most {limit} over all media of a request")


async def load_media(
    parts: Sequence[MediaPart],
    config: MultimodalConfig | None = None,
    *,
    fetcher: Fetcher | None = None,
) -> tuple[Media, ...]:
    """The media of one request, in the order of ``parts``; see :meth:`MediaLoader.load`.

    Each call has a loader of its own, so ``max_concurrent`` bounds this request only.

    Raises:
        MediaError: There are too many, or an item cannot be used; ``item`` then names it.
    """
    return await MediaLoader(config or MultimodalConfig(), fetcher=fetcher).load(parts)
