"""Loading the media of a request: order, limits, failures that name the item, cancellation."""

import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

pytest.importorskip("treadle_multimodal", reason="the default environment leaves mlx-vlm out")

from msgspec.structs import replace
from PIL import Image

from treadle_core import SystemClock
from treadle_core.testing import ManualClock
from treadle_multimodal import (
    Base64,
    BrokenMedia,
    Bytes,
    DataUri,
    DecodedAudio,
    DecodedImage,
    DecodedVideo,
    Fetcher,
    Media,
    MediaError,
    MediaForbidden,
    MediaLimits,
    MediaLoader,
    MediaOptions,
    MediaPart,
    MediaTimeout,
    MediaTooLarge,
    MultimodalConfig,
    PilImage,
    Url,
    load_media,
    parse_content,
    parse_part,
)
from treadle_multimodal.load import spare_cores

from .loopback import (
    HOST,
    FakeResolver,
    Server,
    body,
    redirect,
    serving,
    silence,
    to_loopback,
    until,
)
from .media_files import audio, data_uri, encode, grey_frames, picture, png, tone, video, wav
from .test_images import huge_png

VIDEO = video(grey_frames(range(0, 240, 8)))
LONG = video(grey_frames((k % 250 for k in range(600)), 640, 480), preset="ultrafast")


def image_part(data: bytes) -> MediaPart:
    return MediaPart(kind="image", source=Bytes(data=data))


def loader(server: Server, limits: MediaLimits | None = None) -> MediaLoader:
    config = MultimodalConfig(limits=limits or MediaLimits(), fetch=server.policy)
    fetcher = Fetcher(config.fetch, config.limits, resolver=to_loopback())
    return MediaLoader(config, fetcher=fetcher)


def decoding(max_bytes: int) -> MultimodalConfig:
    return MultimodalConfig(limits=MediaLimits(max_decoded_bytes=max_bytes))


def url_part(url: str) -> MediaPart:
    return MediaPart(kind="image", source=Url(url=url))


async def test_every_kind_of_source_is_loaded_in_order(tmp_path: Path) -> None:
    image = picture(seed=3)
    (tmp_path / "a.png").write_bytes(encode(image))
    async with serving({"/a.png": body(encode(image), "Content-Type: image/png")}) as server:
        config = MultimodalConfig(fetch=server.policy, allowed_directories=(str(tmp_path),))
        fetcher = Fetcher(config.fetch, config.limits, resolver=to_loopback())
        content = [
            {"type": "image_url", "image_url": {"url": server.url("/a.png")}},
            {"type": "image_url", "image_url": {"url": data_uri(encode(image))}},
            {"type": "image", "image": data_uri(encode(image)).partition(",")[2]},
            {"type": "image", "image": encode(image)},
            {"type": "image", "image": image},
            {"type": "image", "image": str(tmp_path / "a.png")},
            {"type": "video", "video": VIDEO},
            {"type": "audio", "audio": wav(tone())},
        ]
        loaded = await load_media(parse_content(content), config, fetcher=fetcher)

    images = loaded[:6]
    assert {type(media) for media in images} == {DecodedImage}
    assert len({media.digest for media in images}) == 1
    assert isinstance(loaded[6], DecodedVideo)
    assert isinstance(loaded[7], DecodedAudio)
    assert loaded[7].sample_rate == 16_000


async def test_order_is_kept_whatever_finishes_first() -> None:
    async def late(stream: Any) -> None:
        await anyio.sleep(0.15)
        await body(png(seed=0))(stream)

    async with serving({"/late": late, "/soon": body(png(seed=1))}) as server:
        parts = [
            url_part(server.url("/late")),
            url_part(server.url("/soon")),
            image_part(png(seed=2)),
        ]
        loaded = await loader(server).load(parts)

    expected = [await load_media([image_part(png(seed=seed))]) for seed in range(3)]
    assert [media.digest for media in loaded] == [media.digest for (media,) in expected]


async def test_swapped_images_come_swapped() -> None:
    first, second = image_part(png(seed=1)), image_part(png(seed=2))

    forth = await load_media([first, second])
    back = await load_media([second, first])

    assert [media.digest for media in forth] == [media.digest for media in reversed(back)]
    assert forth[0].digest != forth[1].digest


async def test_no_media_are_no_media() -> None:
    assert await load_media([]) == ()


async def test_the_options_of_a_video_count_and_else_the_configuration() -> None:
    config = MultimodalConfig(video_fps=1.0, audio_sample_rate=8000)
    parts = [
        MediaPart(kind="video", source=Bytes(data=VIDEO)),
        MediaPart(kind="video", source=Bytes(data=VIDEO), options=MediaOptions(fps=5.0)),
        MediaPart(
            kind="video", source=Bytes(data=VIDEO), options=MediaOptions(fps=5.0, max_frames=4)
        ),
        MediaPart(kind="audio", source=Bytes(data=wav(tone()))),
    ]
    plain, fast, few, sound = await load_media(parts, config)

    assert isinstance(sound, DecodedAudio)
    assert [
        len(media.frames) for media in (plain, fast, few) if isinstance(media, DecodedVideo)
    ] == [
        3,
        15,
        4,
    ]
    assert sound.sample_rate == 8000


LIMITS = MediaLimits(
    max_items=4,
    max_image_bytes=100_000,
    max_video_bytes=100_000,
    max_audio_bytes=100_000,
    max_request_bytes=150_000,
    max_side=2000,
    max_pixels=1_000_000,
    max_frames=16,
    max_video_seconds=4.0,
    max_audio_seconds=2.0,
    fetch_seconds=0.5,
    decode_seconds=5.0,
    max_redirects=2,
)

NOISE = np.random.default_rng(0).integers(0, 256, 200_000, np.uint8).tobytes()


def bytes_part(kind: Any, data: bytes, media_type: str = "", **options: Any) -> MediaPart:
    source = Bytes(data=data, media_type=media_type)
    return MediaPart(kind=kind, source=source, options=MediaOptions(**options))


BAD: list[tuple[MediaPart, str, str]] = [
    (url_part("http://127.0.0.1:81/a"), "media_forbidden", "a port among"),
    (url_part("http://10.0.0.1/a"), "media_forbidden", "a public address"),
    (url_part("https://169.254.169.254/latest"), "media_forbidden", "a public address"),
    (url_part("https://[::1]/"), "media_forbidden", "a public address"),
    (url_part("https://0x7f.1/"), "media_forbidden", "an address in its usual form"),
    (url_part("https://2130706433/"), "media_forbidden", "an address in its usual form"),
    (url_part("ftp://media.example/"), "media_forbidden", "http or https"),
    (url_part("https://u:p@media.example/"), "media_forbidden", "without user and password"),
    (url_part("https://media.example:22/"), "media_forbidden", "a port among"),
    (url_part("https://private.example/"), "media_forbidden", "public addresses only"),
    (url_part("https://unknown.example/"), "media_unavailable", "Name or service not known"),
    (url_part("/redirect"), "media_forbidden", "a public address"),
    (url_part("/around"), "media_unavailable", "at most 2 redirects"),
    (url_part("/silence"), "media_timeout", "within 0.5 seconds"),
    (url_part("/missing"), "media_unavailable", "status 200, not 404"),
    (url_part("/large"), "media_too_large", "got 200000, expected at most 100000"),
    (url_part("/page"), "unsupported_media", "an HTML page sent as 'text/html'"),
    (url_part("/empty"), "broken_media", "got '0 bytes'"),
    (parse_part({"type": "image", "image": "/etc/passwd"}), "media_forbidden", "allowed directory"),
    (
        parse_part({"type": "image", "image": "file:///etc/passwd"}),
        "media_forbidden",
        "allowed directory",
    ),
    (MediaPart(kind="image", source=Base64(data="*" * 64)), "invalid_media", "with padding"),
    (MediaPart(kind="image", source=Base64(data="A" * 400_000)), "media_too_large", "bytes"),
    (
        MediaPart(kind="image", source=Base64(data="A" * 140_000)),
        "media_too_large",
        "got 105000, expected at most 100000",
    ),
    (
        MediaPart(kind="image", source=DataUri(media_type="", is_base64=True, payload="?")),
        "invalid_media",
        "with padding",
    ),
    (
        MediaPart(kind="image", source=DataUri(media_type="", is_base64=False, payload="")),
        "broken_media",
        "got '0 bytes'",
    ),
    (bytes_part("image", NOISE), "media_too_large", "at most 100000"),
    (bytes_part("image", b""), "broken_media", "got '0 bytes'"),
    (bytes_part("image", b"<svg/>"), "unsupported_media", "an SVG image"),
    (bytes_part("image", b"%PDF-1.4", "image/png"), "unsupported_media", "a PDF document sent as"),
    (bytes_part("image", VIDEO), "unsupported_media", "an MP4 or QuickTime video"),
    (bytes_part("image", png()[:100]), "broken_media", "an undamaged image"),
    (bytes_part("image", huge_png(30_000, 30_000)), "media_too_large", "at most 1000000 pixels"),
    (bytes_part("image", huge_png(2001, 1)), "media_too_large", "at most 2000 pixels on a side"),
    (bytes_part("image", huge_png(0, 1)), "broken_media", "image"),
    (
        MediaPart(kind="image", source=PilImage(image=Image.new("L", (2001, 1)))),
        "media_too_large",
        "at most 2000 pixels on a side",
    ),
    (bytes_part("video", b""), "broken_media", "got '0 bytes'"),
    (bytes_part("video", png()), "unsupported_media", "a PNG image"),
    (bytes_part("video", b"#EXTM3U\n/etc/passwd"), "unsupported_media", "an HLS playlist"),
    (bytes_part("video", VIDEO[:900]), "broken_media", "an undamaged video file"),
    (bytes_part("video", VIDEO, max_frames=17), "media_too_large", "max_frames: got 17"),
    (
        bytes_part("video", video(grey_frames(range(50)))),
        "media_too_large",
        "at most 4 seconds",
    ),
    (
        bytes_part("video", audio(tone(), "mp4", "aac")),
        "broken_media",
        "a file with a video stream",
    ),
    (bytes_part("audio", b""), "broken_media", "got '0 bytes'"),
    (bytes_part("audio", VIDEO), "broken_media", "a file with an audio stream"),
    (bytes_part("audio", NOISE), "media_too_large", "at most 100000"),
    (bytes_part("audio", bytes(900)), "unsupported_media", "content of an unknown kind"),
    (bytes_part("audio", wav(tone(2.1))), "media_too_large", "at most 2 seconds"),
    (bytes_part("audio", wav(tone())[:30]), "broken_media", "audio"),
]


@pytest.mark.parametrize(("part", "code", "message"), BAD, ids=range(len(BAD)))
async def test_a_bad_item_fails_the_request_and_is_named(
    part: MediaPart, code: str, message: str
) -> None:
    routes = {
        "/redirect": redirect("http://10.0.0.1/"),
        "/around": redirect("/around"),
        "/silence": silence,
        "/missing": body(b"", status="404 Not Found"),
        "/large": body(NOISE),
        "/page": body(b"<html>", "Content-Type: text/html"),
        "/empty": body(b""),
    }
    resolver = FakeResolver({HOST: [["127.0.0.1"]], "private.example": [["8.8.8.8", "10.0.0.1"]]})
    async with serving(routes) as server:
        policy = server.policy
        if isinstance(part.source, Url) and part.source.url.startswith("/"):
            part = url_part(server.url(part.source.url))
        config = MultimodalConfig(limits=LIMITS, fetch=policy)
        fetcher = Fetcher(policy, LIMITS, resolver=resolver)
        start = time.monotonic()
        with pytest.raises(MediaError) as caught:
            await MediaLoader(config, fetcher=fetcher).load([image_part(png()), part])
        elapsed = time.monotonic() - start

    error = caught.value
    assert error.code == code
    assert message in str(error)
    assert str(error).startswith(f"media[1] ({part.kind} ")
    assert error.item is not None
    assert (error.item.index, error.item.kind) == (1, part.kind)
    assert len(str(error)) < 500
    assert elapsed < 2.0


async def test_too_many_items_are_refused_before_anything_is_read() -> None:
    parts = [url_part("https://media.example/")] * 5

    with pytest.raises(
        MediaTooLarge, match="media: got '5 items', expected at most 4 in a request"
    ):
        await load_media(parts, MultimodalConfig(limits=LIMITS))


async def test_the_bytes_of_all_items_count_together() -> None:
    data = encode(Image.frombytes("RGB", (180, 150), NOISE[: 180 * 150 * 3]))
    assert 75_000 < len(data) < 100_000

    await load_media([image_part(data)], MultimodalConfig(limits=LIMITS))
    with pytest.raises(MediaTooLarge, match="at most 150000 over all media of a request"):
        await load_media([image_part(data)] * 2, MultimodalConfig(limits=LIMITS))


async def test_fetched_bytes_count_together_while_they_arrive() -> None:
    async with serving({"/a": body(NOISE[:90_000])}) as server:
        parts = [url_part(server.url("/a"))] * 2
        limits = MediaLimits(max_request_bytes=100_000, max_image_bytes=95_000)
        with pytest.raises(MediaTooLarge, match="over all media"):
            await loader(server, limits).load(parts)


async def test_decoded_bytes_count_together_before_they_are_decoded() -> None:
    size = 24 * 16 * 3
    parts = [image_part(png(seed=seed)) for seed in range(3)]

    assert len(await load_media(parts, decoding(3 * size))) == 3
    with pytest.raises(MediaTooLarge, match=f"decoded bytes: got {3 * size}, expected at most"):
        await load_media(parts, decoding(3 * size - 1))
    with pytest.raises(MediaTooLarge, match="decoded bytes: got 108000000"):
        await load_media([image_part(huge_png(6000, 6000))], decoding(10**8))


@pytest.mark.parametrize(
    ("part", "size"),
    [
        (bytes_part("video", VIDEO, fps=1.0), 3 * 64 * 48 * 3),
        (bytes_part("audio", wav(tone(0.5))), 8000 * 4),
        (MediaPart(kind="image", source=PilImage(image=picture())), 24 * 16 * 3),
    ],
)
async def test_decoded_bytes_of_every_kind_count(part: MediaPart, size: int) -> None:
    assert len(await load_media([part], decoding(size))) == 1
    with pytest.raises(MediaTooLarge, match="decoded bytes"):
        await load_media([part], decoding(size - 1))


async def test_the_first_failure_ends_the_others() -> None:
    async with serving({"/silence": silence}) as server:
        for error, parts in (
            (MediaForbidden, [url_part(server.url("/silence")), url_part("ftp://nowhere/")]),
            (BrokenMedia, [bytes_part("video", LONG, fps=240.0), image_part(b"")]),
        ):
            start = time.monotonic()
            with pytest.raises(error) as caught:
                await loader(server).load(parts)
            assert caught.value.item is not None
            assert caught.value.item.index == 1
            assert time.monotonic() - start < 2.0


class Counted:
    """An answer that notes how many are under way at once."""

    def __init__(self) -> None:
        self.most = self._running = 0

    async def __call__(self, stream: Any) -> None:
        self._running += 1
        self.most = max(self.most, self._running)
        await anyio.sleep(0.05)
        self._running -= 1
        await body(png())(stream)


async def test_no_more_items_of_a_request_than_allowed_are_fetched_at_once() -> None:
    counted = Counted()
    async with serving({"/a": counted}) as server:
        await loader(server, MediaLimits(max_concurrent=2)).load([url_part(server.url("/a"))] * 5)

    assert counted.most == 2


async def test_hosts_that_are_slow_hold_up_nobody_else() -> None:
    """Neither a thread nor the room for pixels is taken while something is fetched."""
    limits = MediaLimits(max_concurrent=1, max_pixels=24 * 16, max_loaded_bytes=2**20)
    async with serving({"/silence": silence, "/a": body(png())}) as server:
        shared = loader(server, replace(limits, max_image_bytes=2**18))
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(shared.load, [url_part(server.url("/silence"))] * 2)
            await until(lambda: len(server.heads) == 2)
            with anyio.fail_after(5):
                assert len(await shared.load([image_part(png())] * 3)) == 3
            tasks.cancel_scope.cancel()
        # Those who fetch share room of their own: the third waited.
        assert len(server.heads) == 2
        assert len(await shared.load([url_part(server.url("/a")), image_part(png())])) == 2
        assert (shared._room.taken, shared._fetch_room.taken) == (0, 0)


async def test_cancelling_ends_fetches_and_decoders() -> None:
    clock = CountingClock()
    config = MultimodalConfig(limits=MediaLimits(max_frames=5000, max_video_pixels=2**38))
    async with serving({"/silence": silence}) as server:
        fetcher = Fetcher(server.policy, config.limits, resolver=to_loopback())
        shared = MediaLoader(config, fetcher=fetcher, clock=clock)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(shared.load, [url_part(server.url("/silence"))])
            tasks.start_soon(shared.load, [bytes_part("video", LONG, fps=240.0)])
            # All 600 packets were looked at, and some of the 600 frames.
            await until(lambda: clock.calls > 620 and bool(server.heads))
            tasks.cancel_scope.cancel()
        calls = clock.calls
        await until(lambda: server.closed == 1)
        await anyio.sleep(0.05)

    assert clock.calls == calls < 1200


class CountingClock(SystemClock):
    """Says how far a decoder has come: it is asked for the time at each checkpoint."""

    calls = 0

    def now(self) -> float:
        self.calls += 1
        return super().now()


async def test_decoding_has_a_time_limit() -> None:
    class Rushing(ManualClock):
        def now(self) -> float:
            self.advance(0.5)
            return super().now()

    config = MultimodalConfig(limits=MediaLimits(decode_seconds=5.0))
    with pytest.raises(MediaTimeout, match="at most 5 seconds"):
        await MediaLoader(config, clock=Rushing()).load([bytes_part("video", VIDEO)])


async def test_the_loop_goes_on_while_media_are_decoded() -> None:
    gaps: list[float] = []

    async def watch() -> None:
        while True:
            start = time.monotonic()
            await anyio.sleep(0.005)
            gaps.append(time.monotonic() - start)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        await load_media([bytes_part("video", LONG, fps=1.0)] * 2)
        tasks.cancel_scope.cancel()

    assert len(gaps) > 5
    assert max(gaps) < 0.5


async def test_one_loader_serves_requests_at_the_same_time() -> None:
    shared = MediaLoader(MultimodalConfig(limits=MediaLimits(max_concurrent=1)))
    found: dict[int, Sequence[Media]] = {}

    async def load(seed: int) -> None:
        found[seed] = await shared.load([image_part(png(seed=seed))])

    async with anyio.create_task_group() as tasks:
        for seed in range(6):
            tasks.start_soon(load, seed)

    assert len({found[seed][0].digest for seed in range(6)}) == 6


async def test_a_failed_request_leaves_the_loader_usable() -> None:
    shared = MediaLoader(MultimodalConfig(limits=MediaLimits(max_concurrent=1)))

    for _ in range(3):
        with pytest.raises(BrokenMedia):
            await shared.load([image_part(b""), image_part(png())])
    assert len(await shared.load([image_part(png())])) == 1


class Ten:
    """What takes ten bytes."""

    nbytes = 10


async def test_what_is_made_of_media_shares_the_threads_of_the_decoders() -> None:
    shared = MediaLoader(MultimodalConfig())
    lock, running, most = threading.Lock(), 0, 0
    done: list[int] = []

    def work(number: int, media: tuple[Media, ...]) -> Ten:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.01)
        with lock:
            running -= 1
        assert media[0].digest == digests[number]
        return Ten()

    async def prepare(number: int) -> None:
        async with shared.prepare([image_part(png(seed=number))], partial(work, number)):
            done.append(number)

    digests = [(await load_media([image_part(png(seed=n))]))[0].digest for n in range(8)]
    async with anyio.create_task_group() as tasks:
        for number in range(8):
            tasks.start_soon(prepare, number)

    assert sorted(done) == list(range(8))
    assert most <= spare_cores()


def sharing(max_bytes: int) -> MediaLoader:
    """A loader in which an image takes 24 x 16 pixels before it is loaded and when it is."""
    limits = MediaLimits(max_loaded_bytes=max_bytes, max_pixels=24 * 16, max_concurrent=16)
    return MediaLoader(MultimodalConfig(limits=limits))


IMAGE_BYTES = 24 * 16 * 3


class Held:
    """Keeps requests in their last step until it is told to let them go."""

    def __init__(self, loader: MediaLoader) -> None:
        self.entered: list[int] = []
        self.done: list[int] = []
        self.left = anyio.Event()
        self._loader = loader
        self._go = threading.Event()

    async def prepare(self, number: int, num_images: int = 1) -> None:
        parts = [image_part(png())] * num_images
        async with self._loader.prepare(parts, partial(self._work, number)):
            self.done.append(number)
            await self.left.wait()

    def _work(self, number: int, media: tuple[Media, ...]) -> Ten:
        self.entered.append(number)
        self._go.wait(10)
        return Ten()

    def go(self) -> None:
        """Let them prepare their prompts, and use them."""
        self._go.set()

    def leave(self) -> None:
        """Let them go, and those that come."""
        self.left.set()


async def test_media_of_all_requests_have_so_much_room_until_they_are_prepared() -> None:
    loader = sharing(2 * IMAGE_BYTES)
    held = Held(loader)

    async with anyio.create_task_group() as tasks:
        for number in range(5):
            tasks.start_soon(held.prepare, number)
        await until(lambda: len(held.entered) >= 1)
        # Those that wait for a thread have their pixels already.
        await until(lambda: loader._room.taken == 2 * IMAGE_BYTES)
        await anyio.sleep(0.05)
        assert loader._room.taken == 2 * IMAGE_BYTES
        assert len(held.entered) <= 2
        held.go()
        held.leave()

    assert sorted(held.done) == [0, 1, 2, 3, 4]
    assert loader._room.taken == 0


async def test_a_request_that_is_alone_over_all_of_the_room_is_refused() -> None:
    loader = sharing(2 * IMAGE_BYTES)

    with pytest.raises(MediaTooLarge) as caught:
        await loader.load([image_part(png())] * 3)

    error = caught.value
    assert error.value == 3 * IMAGE_BYTES
    assert error.limit == f"at most {2 * IMAGE_BYTES} over all media of a request"
    assert len(await loader.load([image_part(png())] * 2)) == 2
    assert loader._room.taken == 0


async def test_a_request_that_fails_or_is_cancelled_leaves_its_room_to_others() -> None:
    loader = sharing(2 * IMAGE_BYTES)
    held = Held(loader)
    with pytest.raises(BrokenMedia):
        await loader.load([image_part(png()), image_part(b"")])

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(held.prepare, 0)
        await until(lambda: held.entered == [0])
        # This one waits for all of the room, and the next one behind it, though there is some.
        async with anyio.create_task_group() as waiting:
            waiting.start_soon(held.prepare, 1, 2)
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(held.prepare, 2)
            await anyio.wait_all_tasks_blocked()
            assert loader._room.taken == IMAGE_BYTES
            waiting.cancel_scope.cancel()
        await until(lambda: loader._room.taken == 2 * IMAGE_BYTES)
        held.go()
        held.leave()

    assert sorted(held.done) == [0, 2]
    assert loader._room.taken == 0


async def test_what_an_item_does_not_take_of_its_most_is_given_back() -> None:
    loader = MediaLoader(MultimodalConfig())
    held = Held(loader)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(held.prepare, 0)
        await until(lambda: held.entered == [0])
        assert loader._room.taken == IMAGE_BYTES
        held.go()
        await until(lambda: held.done == [0])
        assert loader._room.taken == Ten.nbytes
        held.leave()

    assert loader._room.taken == 0
