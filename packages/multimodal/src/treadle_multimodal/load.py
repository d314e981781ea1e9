"""From the media parts of a request to decoded media: concurrent, bounded, in order."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar, assert_never

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
from treadle_multimodal.media import Checkpoint, Media
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

_T = TypeVar("_T")


class MediaLoader:
    """Loads the media of requests. One serves all of them, and bounds them together.

    Fetching happens on the event loop, everything else in worker threads.

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
        self._slots = anyio.CapacityLimiter(config.limits.max_concurrent)
        self._threads = anyio.CapacityLimiter(config.limits.max_concurrent)

    async def load(self, parts: Sequence[MediaPart]) -> tuple[Media, ...]:
        """The media of one request, in the order of ``parts``.

        The first item that fails ends the others. When this returns, raises or is cancelled,
        nothing of it runs any more.

        Raises:
            MediaError: There are too many, or an item cannot be used; ``item`` then names it.
        """
        limit = self._config.limits.max_items
        if len(parts) > limit:
            raise MediaTooLarge("media", f"{len(parts)} items", f"at most {limit} in a request")
        budget = ByteBudget(self._config.limits.max_request_bytes)
        loaded: dict[int, Media] = {}
        failures: list[MediaError] = []

        async def load_item(index: int, part: MediaPart) -> None:
            try:
                async with self._slots:
                    loaded[index] = await self._load_part(part, budget)
            except MediaError as error:
                source = describe_source(part.source)
                failures.append(error.of(Item(index=index, kind=part.kind, source=source)))
                tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            for index, part in enumerate(parts):
                tasks.start_soon(load_item, index, part)
        if failures:
            raise failures[0]
        return tuple(loaded[index] for index in range(len(parts)))

    async def _load_part(self, part: MediaPart, budget: "ByteBudget") -> Media:
        source = part.source
        if isinstance(source, Url):
            max_bytes = self._config.limits.max_bytes(part.kind)
            fetched = await self._fetcher.fetch(source.url, max_bytes, budget.take)
            source = Bytes(data=fetched.data, media_type=fetched.media_type)
        elif not isinstance(source, PilImage):
            source = await self._in_thread(partial(self._read, part, source))
            budget.take(len(source.data))
        return await self._in_thread(partial(self._decode, part, source, self._checkpoint()))

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

    def _decode(self, part: MediaPart, source: Bytes | PilImage, checkpoint: Checkpoint) -> Media:
        """A file as what its part says. Blocks."""
        limits = self._config.limits
        if isinstance(source, PilImage):
            return convert_image(source.image, limits, checkpoint=checkpoint)
        data, media_type = source.data, source.media_type
        match part.kind:
            case "image":
                return decode_image(data, limits, media_type=media_type, checkpoint=checkpoint)
            case "video":
                return decode_video(
                    data,
                    limits,
                    fps=part.options.fps or self._config.video_fps,
                    max_frames=part.options.max_frames,
                    media_type=media_type,
                    checkpoint=checkpoint,
                )
            case "audio":
                return decode_audio(
                    data,
                    limits,
                    sample_rate=self._config.audio_sample_rate,
                    media_type=media_type,
                    checkpoint=checkpoint,
                )
            case _:
                assert_never(part.kind)

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        # Not abandoned when cancelled: decoders stop at their next checkpoint, and until then
        # their memory counts.
        return await to_thread.run_sync(work, limiter=self._threads)

    def _checkpoint(self) -> Checkpoint:
        """Ends the work of a thread when it takes too long or nobody waits for it."""
        seconds = self._config.limits.decode_seconds
        end: list[float] = []

        def check() -> None:
            from_thread.check_cancelled()
            now = self._clock.now()
            # The time in the queue for a thread does not count.
            end[:] = end or [now + seconds]
            if now > end[0]:
                raise MediaTimeout("decoding", "more time", f"at most {seconds:g} seconds")

        return check


class ByteBudget:
    """Encoded bytes that one request may still bring.

    Args:
        limit: All of them.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken = 0

    def take(self, num_bytes: int) -> None:
        """Count bytes.

        Raises:
            MediaTooLarge: They are more than are left.
        """
        self._taken += num_bytes
        if self._taken > self._limit:
            limit = f"at most {self._limit} over all media of a request"
            raise MediaTooLarge("bytes", self._taken, limit)


async def load_media(
    parts: Sequence[MediaPart],
    config: MultimodalConfig | None = None,
    *,
    fetcher: Fetcher | None = None,
) -> tuple[Media, ...]:
    """The media of one request, in the order of ``parts``; see :meth:`MediaLoader.load`.

    Raises:
        MediaError: There are too many, or an item cannot be used; ``item`` then names it.
    """
    return await MediaLoader(config or MultimodalConfig(), fetcher=fetcher).load(parts)
