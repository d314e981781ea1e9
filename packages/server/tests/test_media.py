"""Images and videos in chats, against a real process over a tiny random vision model."""

import json
import threading
import time
from base64 import b64encode
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from struct import pack
from typing import Any
from zlib import crc32

import httpx2
import numpy as np
import openai
import pytest

pytest.importorskip("treadle_multimodal", reason="the default environment leaves mlx-vlm out")

import av
from PIL import Image

from treadle_multimodal.testing import zoo

from .hosts import Host, body, drip, endless, hosting, redirect

FAMILY = "qwen2_5_vl"
NUM_TOKENS = 12

# Tokens that are stored together.
BLOCK = 32

MAX_BYTES = 100_000
MAX_ITEMS = 4
FETCH_SECONDS = 3.0


def picture(seed: int, width: int = 80, height: int = 60) -> Image.Image:
    """Noise in RGB."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


def encode(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def png(seed: int) -> bytes:
    return encode(picture(seed))


def video(seed: int = 0, num_frames: int = 4) -> bytes:
    file = BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=2)
        stream.width, stream.height, stream.pix_fmt = 80, 60, "yuv420p"
        for number in range(num_frames):
            pixels = np.array(picture(seed + number))
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode(None))
    return file.getvalue()


def uri(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{b64encode(data).decode()}"


def image_part(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def shown(*seeds: int) -> list[dict[str, Any]]:
    return [image_part(uri(png(seed))) for seed in seeds]


def user(text: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


@pytest.fixture(scope="module")
def vlm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo.save_checkpoint(FAMILY, tmp_path_factory.mktemp("zoo") / "tiny-vlm")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that may be read, beside a file that may not."""
    made = tmp_path_factory.mktemp("media") / "allowed"
    made.mkdir()
    (made / "one.png").write_bytes(png(1))
    (made.parent / "secret.png").write_bytes(png(1))
    return made


@pytest.fixture(scope="module")
def host() -> Generator[Host]:
    def routes(host: Host) -> dict[str, Any]:
        whole = png(1)
        return {
            "/one.png": body(whole, Content_Type="image/png"),
            "/moved": redirect("/one.png"),
            "/private": redirect("http://10.0.0.1/one.png"),
            "/file": redirect("file:///etc/passwd"),
            "/loop": redirect("/loop"),
            "/silence": host.silence,
            "/drip": drip,
            "/lying": body(whole[:100], Content_Length=str(len(whole))),
            "/long": body(b"", Content_Length=str(10**12)),
            "/endless": endless,
            "/missing": body(b"no such thing", 404),
            "/page": body(b"<html>not here</html>", Content_Type="image/png"),
            "/zipped": body(whole, Content_Encoding="gzip"),
        }

    with hosting(routes) as running:
        yield running


@pytest.fixture(scope="module")
def server(
    launch: Any, vlm: Path, folder: Path, host: Host, tmp_path_factory: pytest.TempPathFactory
) -> Generator[Any]:
    """A server whose limits are small."""
    log = tmp_path_factory.mktemp("log") / "stderr"
    limits = {
        "max-media-items": MAX_ITEMS,
        "max-image-bytes": MAX_BYTES,
        "max-image-pixels": 1_000_000,
        "max-video-seconds": 5,
        "media-fetch-seconds": FETCH_SECONDS,
        "max-body-bytes": 1_000_000,
        "allowed-local-media-path": folder,
        "allowed-media-networks": "127.0.0.0/8",
        "allowed-media-ports": host.port,
        "max-decode-stall-ms": 10,
    }
    words = [word for name, value in limits.items() for word in (f"--{name}", str(value))]
    with launch(log, "--model", str(vlm), "--mllm", "--allow-http-media", *words) as ready:
        yield ready


class Client:
    """Asks a server for short greedy answers."""

    def __init__(self, http: httpx2.Client) -> None:
        self._http = http

    def post(self, *messages: Any, **fields: Any) -> httpx2.Response:
        wire = {"messages": messages, "max_tokens": NUM_TOKENS, "temperature": 0, **fields}
        return self._http.post("/v1/chat/completions", json=wire)

    def tokens(self, *messages: Any, **fields: Any) -> list[str]:
        """What the answer's tokens are called."""
        more = {"logprobs": True, "ignore_eos": True, **fields}
        reply = self.post(*messages, **more)
        assert reply.status_code == 200, reply.text
        content = reply.json()["choices"][0]["logprobs"]["content"]
        return [entry["token"] for entry in content]

    def usage(self, *messages: Any) -> tuple[int, int]:
        """Tokens of the prompt, and how many of them were known."""
        usage = self.post(*messages).json()["usage"]
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]

    def stream(self, text: str, num_tokens: int) -> str:
        """A streamed answer to text alone."""
        wire = {
            "messages": [{"role": "user", "content": text}],
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        found: list[str] = []
        with self._http.stream("POST", "/v1/chat/completions", json=wire) as reply:
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    delta = json.loads(line.removeprefix("data: "))["choices"][0]["delta"]
                    found.append(delta.get("content") or "")
        return "".join(found)


@pytest.fixture
def client(server: Any) -> Generator[Client]:
    with httpx2.Client(base_url=server.url, timeout=30) as http:
        yield Client(http)


def test_the_official_client_shows_an_image(server: Any, vlm: Path) -> None:
    message: Any = user("What is this?", *shown(1))
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as official:
        reply = official.chat.completions.create(
            model="tiny-vlm", messages=[message], max_tokens=NUM_TOKENS, temperature=0
        )
        chunks = list(
            official.chat.completions.create(
                model="tiny-vlm",
                messages=[message],
                max_tokens=NUM_TOKENS,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert streamed == reply.choices[0].message.content
    assert reply.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens == reply.usage.prompt_tokens


def test_every_form_of_the_same_image_is_the_same_prompt(
    client: Client, host: Host, folder: Path
) -> None:
    data = b64encode(png(1)).decode()
    file = f"file://{folder}/one.png"
    forms: list[dict[str, Any]] = [
        {"type": "image_url", "image_url": uri(png(1))},
        {"type": "image_url", "image_url": {"url": uri(png(1)), "detail": "auto"}},
        {"type": "input_image", "image_url": uri(png(1), "image/jpeg")},
        {"type": "image", "image": data},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}},
        {"type": "image", "source": {"type": "url", "url": f"{host.url}/one.png"}},
        {"type": "image_url", "image_url": {"url": f"{host.url}/moved"}},
        {"type": "image_url", "image_url": {"url": file}},
        {"type": "image", "image": str(folder / "one.png")},
    ]
    answers = [client.tokens(user("What is this?", form)) for form in forms]
    assert answers == [answers[0]] * len(forms)
    prompts = {client.usage(user("What is this?", form)) for form in forms}
    assert len(prompts) == 1


def test_usage_counts_what_an_image_takes(client: Client) -> None:
    # 80 x 60 pixels become 84 x 56: patches of 14, of which four become one token.
    image = (84 // 28) * (56 // 28) + len(("<|vision_start|>", "<|vision_end|>"))
    words, _ = client.usage(user("What is this?"))
    one, _ = client.usage(user("What is this?", *shown(1)))
    two, _ = client.usage(user("What is this?", *shown(1, 2)))
    assert [one - words, two - words] == [image, 2 * image]


def test_the_next_turn_computes_only_what_is_new(client: Client) -> None:
    first = user("Please describe this picture at length.", *shown(21))
    prompt, _ = client.usage(first)
    again = [
        first,
        {"role": "assistant", "content": "It is noise."},
        {"role": "user", "content": "?"},
    ]
    total, cached = client.usage(*again)
    # The words after the picture are longer than what is lost of them.
    assert prompt - BLOCK <= cached < total


def test_the_same_words_with_another_picture_share_only_the_words_before(client: Client) -> None:
    words = user("Which colours does this picture have? Name them one by one.")
    opening = {"role": "system", "content": "You look at pictures and answer in a few words."}
    before, _ = client.usage(opening)
    for seed in (31, 32, 33):
        message = {**words, "content": [*shown(seed), *words["content"]]}
        _, cached = client.usage(opening, message)
        # "user" and a line break may be the same too.
        assert cached <= before + 10
        total, cached = client.usage(opening, message)
        assert total - BLOCK <= cached < total


def test_images_keep_their_order(client: Client) -> None:
    one, other = (image_part(uri(encode(picture(seed, 140, 140)))) for seed in (51, 52))
    _, cached = client.usage(user("first", one))
    assert cached < BLOCK
    # Each takes 25 tokens: two make more than a block.
    client.usage(user("both", one, other))
    _, cached = client.usage(user("and now", one, other))
    assert cached >= BLOCK
    _, cached = client.usage(user("and now", other, one))
    assert cached < BLOCK


def ask(client: Client, requests: Sequence[Sequence[Any]]) -> list[list[str]]:
    """The answers to requests made together."""
    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(lambda messages: client.tokens(*messages), requests))


def test_requests_made_together_get_the_answers_of_each_alone(client: Client) -> None:
    requests: list[list[Any]] = [
        [user("Compare them.", *shown(41, 42))],
        [user("Compare them.", *shown(42, 41))],
        [user("What is this?", *shown(41))],
        [user("What is this?", *shown(42))],
        [user("What is this?")],
        [user("Compare them.", *shown(43, 43))],
        [{"role": "user", "content": "Tell me a story about a loom. " * 8}],
    ]
    # Each with a salt of its own, so that nothing is reused.
    alone = [client.tokens(*messages, cache_salt="alone") for messages in requests]
    assert len({tuple(answer) for answer in alone}) == len(requests)
    for _ in range(2):
        assert ask(client, requests) == alone


@pytest.fixture(scope="module")
def guessing(
    launch: Any, vlm: Path, tmp_path_factory: pytest.TempPathFactory
) -> Generator[httpx2.Client]:
    """A server that guesses what comes next from what was said."""
    pytest.importorskip("treadle_speculative", reason="treadle-speculative is not installed")
    words = ["--speculative-method", "ngram", "--num-speculative-tokens", "3"]
    log = tmp_path_factory.mktemp("log") / "stderr"
    with (
        launch(log, "--model", str(vlm), *words) as ready,
        httpx2.Client(base_url=ready.url, timeout=30) as http,
    ):
        yield http


@pytest.mark.timeout(120)
def test_guessing_changes_no_answer_to_words_images_and_videos_in_one_batch(
    client: Client, guessing: httpx2.Client
) -> None:
    sampled = {"temperature": 0.4, "seed": 3}
    moving = {"type": "video_url", "video_url": {"url": uri(video(num_frames=6), "video/mp4")}}
    words = "one two three one two three one two three one two"
    asked: list[tuple[Any, dict[str, Any]]] = [
        (user(words), {}),
        (user(words, *shown(41)), {}),
        (user(words, *shown(42, 41)), {}),
        (user(words, *shown(43)), sampled),
        (user(words, moving), {}),
        (user("Tell me a story about a loom. " * 8), sampled),
    ]
    more = {"max_tokens": 48}
    plain = [client.tokens(message, **fields, **more) for message, fields in asked]
    guesser = Client(guessing)

    alone = [guesser.tokens(message, **fields, **more) for message, fields in asked]
    with ThreadPoolExecutor(len(asked)) as pool:
        together = list(pool.map(lambda each: guesser.tokens(each[0], **each[1], **more), asked))

    assert alone == plain
    assert together == plain
    shown_to = guesser.post(asked[1][0], ignore_eos=True, **more).json()["usage"]
    guesses = shown_to["completion_tokens_details"]["speculation"]
    assert 0 < guesses["accepted"] < guesses["attempted"]


def test_videos_are_seen_with_the_frames_that_the_request_asks_for(client: Client) -> None:
    part = {"type": "video_url", "video_url": {"url": uri(video(num_frames=8), "video/mp4")}}
    message = user("What happens?", part)
    many, _ = client.usage(message)
    few = client.post(message, video_max_frames=2).json()["usage"]["prompt_tokens"]
    same = client.post(user("What happens?", {**part, "max_frames": 2})).json()["usage"]
    assert few == same["prompt_tokens"] < many
    assert client.tokens(message) == client.tokens(message)


def test_files_that_people_have_are_read(client: Client) -> None:
    frames = [picture(seed) for seed in range(3)]
    animated = encode(frames[0], "GIF", save_all=True, append_images=frames[1:])
    palette = encode(picture(1).convert("P"))
    clear = encode(picture(1).convert("RGBA"))
    cmyk = encode(picture(1).convert("CMYK"), "JPEG")
    for data in (
        animated,
        palette,
        clear,
        cmyk,
        encode(picture(1), "WEBP"),
        encode(picture(1), "BMP"),
    ):
        reply = client.post(user("?", image_part(uri(data, "image/png"))))
        assert reply.status_code == 200, reply.text


def chunk(kind: bytes, data: bytes) -> bytes:
    return pack(">I", len(data)) + kind + data + pack(">I", crc32(kind + data))


def claiming(width: int, height: int) -> bytes:
    """A PNG of a few bytes that says it is large."""
    head = chunk(b"IHDR", pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return (
        b"\x89PNG\r\n\x1a\n"
        + head
        + chunk(b"IDAT", b"x\x9c\x03\x00\x00\x00\x00\x01")
        + chunk(b"IEND", b"")
    )


def bad_parts(host: Host, folder: Path) -> dict[str, tuple[Any, int, str]]:
    """Parts that cannot be used, with the status and the code of the error."""
    jpeg = encode(picture(1), "JPEG")
    clip = video()
    noise = np.random.default_rng(0).bytes(MAX_BYTES + 1)
    url = host.url
    images: dict[str, tuple[Any, int, str]] = {
        "not an image": (uri(b"hello, I am a text file"), 422, "unsupported_media"),
        "a drawing in XML": (
            uri(b"<svg xmlns='http://www.w3.org/2000/svg'/>"),
            422,
            "unsupported_media",
        ),
        "a page, whatever its type says": (f"{url}/page", 422, "unsupported_media"),
        "a video for an image": (uri(clip), 422, "unsupported_media"),
        "truncated png": (uri(png(1)[:500]), 422, "broken_media"),
        "truncated jpeg": (uri(jpeg[: len(jpeg) // 2]), 422, "broken_media"),
        "damaged png": (uri(png(1)[:200] + b"\0" * 50 + png(1)[250:]), 422, "broken_media"),
        "no bytes": (uri(b""), 422, "broken_media"),
        "zero pixels": (uri(claiming(0, 0)), 422, "broken_media"),
        "a bomb": (uri(claiming(60_000, 60_000)), 413, "media_too_large"),
        "too many pixels": (uri(encode(Image.new("L", (1200, 1000)))), 413, "media_too_large"),
        "too wide for the processor": (
            uri(encode(Image.new("L", (6000, 10)))),
            400,
            "invalid_media",
        ),
        "too many bytes": (uri(noise), 413, "media_too_large"),
        "bad base64": ("data:image/png;base64,@@@@", 400, "invalid_media"),
        "half a data URI": ("data:image/png", 400, "invalid_media"),
        "another scheme": ("ftp://example.com/one.png", 400, "invalid_media"),
        "a relative path": ("one.png", 400, "invalid_media"),
        "an empty string": ("", 400, "invalid_media"),
        "no host": ("http:///one.png", 400, "media_forbidden"),
        "a path that is not allowed": ("file:///etc/passwd", 400, "media_forbidden"),
        "a path out of the allowed one": (f"file://{folder}/../secret.png", 400, "media_forbidden"),
        "a file that is not there": (f"file://{folder}/two.png", 400, "media_forbidden"),
        "a private address": (f"http://10.0.0.1:{host.port}/", 400, "media_forbidden"),
        "metadata of a cloud": (f"http://169.254.169.254:{host.port}/", 400, "media_forbidden"),
        "loopback in IPv6": (f"http://[::1]:{host.port}/", 400, "media_forbidden"),
        "loopback as a number": (f"http://2130706433:{host.port}/", 400, "media_forbidden"),
        "another port": ("http://127.0.0.1:22/", 400, "media_forbidden"),
        "a password": (f"http://me:secret@127.0.0.1:{host.port}/one.png", 400, "media_forbidden"),
        "a redirect to a private address": (f"{url}/private", 400, "media_forbidden"),
        "a redirect to a file": (f"{url}/file", 400, "media_forbidden"),
        "redirects without end": (f"{url}/loop", 400, "media_unavailable"),
        "a host that says nothing": (f"{url}/silence", 400, "media_timeout"),
        "a slow host": (f"{url}/drip", 400, "media_timeout"),
        "a host that stops early": (f"{url}/lying", 400, "media_unavailable"),
        "a host that announces too much": (f"{url}/long", 413, "media_too_large"),
        "a host that never stops": (f"{url}/endless", 413, "media_too_large"),
        "nothing there": (f"{url}/missing", 400, "media_unavailable"),
        "a compressed body": (f"{url}/zipped", 422, "unsupported_media"),
        "a number for a URL": (7, 400, "invalid_value"),
    }
    found = {name: (image_part(bad), status, code) for name, (bad, status, code) in images.items()}
    good = uri(png(1))
    audio = {"data": b64encode(b"RIFF").decode(), "format": "wav"}
    return found | {
        "no image": ({"type": "image_url"}, 400, "invalid_media"),
        "an unknown member": (
            {"type": "image_url", "image_url": {"url": good, "size": 3}}, 400, "unknown_field"
        ),
        "an unknown part": ({"type": "hologram", "hologram": good}, 400, "invalid_value"),
        "an unknown detail": (
            {"type": "image_url", "image_url": {"url": good, "detail": "ultra"}}, 400, "invalid_media"
        ),
        "a low detail": (
            {"type": "image_url", "image_url": {"url": good, "detail": "low"}},
            400,
            "unsupported_value",
        ),
        "not a video": ({"type": "video_url", "video_url": {"url": good}}, 422, "unsupported_media"),
        "truncated video": (
            {"type": "video", "video": uri(clip[: len(clip) // 2], "video/mp4")}, 422, "broken_media"
        ),
        "a long video": (
            {"type": "video", "video": uri(video(num_frames=12))}, 413, "media_too_large"
        ),
        "no frames at all": (
            {"type": "video", "video": uri(clip), "fps": 0}, 400, "invalid_media"
        ),
        "audio": ({"type": "input_audio", "input_audio": audio}, 400, "unsupported_value"),
        "audio elsewhere": ({"type": "audio_url", "audio_url": f"{url}/x"}, 400, "unsupported_value"),
    }  # fmt: skip


def bad_requests(host: Host, folder: Path) -> dict[str, tuple[list[Any], int, str]]:
    """Chats that cannot be answered."""
    found: dict[str, tuple[list[Any], int, str]] = {
        name: ([user("look", part)], status, code)
        for name, (part, status, code) in bad_parts(host, folder).items()
    }
    moving = {"type": "video", "video": uri(video())}
    return found | {
        "too many images": ([user("look", *shown(*range(5)))], 413, "media_too_large"),
        "too many over the chat": (
            [user("look", *shown(1, 2)), user("and", *shown(3, 4, 5))], 413, "media_too_large"
        ),
        "images and videos": ([user("look", *shown(1), moving)], 422, "unsupported_media"),
        "one good, one bad": (
            [user("look", *shown(1), image_part(uri(b"x")))], 422, "unsupported_media"
        ),
        "a placeholder in words": ([user("a <|image_pad|>", *shown(1))], 422, "chat_refused"),
        "an image in instructions": (
            [{"role": "system", "content": shown(1)}, user("hi")], 400, "unsupported_value"
        ),
        "a body that is too long": ([user("x" * 1_000_000)], 413, "body_too_large"),
    }  # fmt: skip


def test_bad_media_get_their_own_error_in_time_and_running_streams_do_not_notice(
    client: Client, host: Host, folder: Path
) -> None:
    cases = bad_requests(host, folder)
    prompts = ("a story about a loom", "another one, about threads and a treadle")
    alone = {prompt: client.stream(prompt, 100) for prompt in prompts}
    over = threading.Event()

    def stream(prompt: str) -> set[str]:
        said = {client.stream(prompt, 100)}
        while not over.is_set():
            said.add(client.stream(prompt, 100))
        return said

    def refused(name: str) -> tuple[int, str, str, float]:
        messages, _, _ = cases[name]
        begun = time.monotonic()
        reply = client.post(*messages)
        error = reply.json()["error"]
        assert error["message"], name
        return reply.status_code, error["code"], error["param"], time.monotonic() - begun

    with ThreadPoolExecutor(len(prompts)) as streams, ThreadPoolExecutor(4) as asking:
        running = {prompt: streams.submit(stream, prompt) for prompt in prompts}
        try:
            found = dict(zip(cases, asking.map(refused, cases), strict=True))
        finally:
            over.set()

    assert len(cases) >= 25
    replies = {name: (status, code) for name, (status, code, _, _) in found.items()}
    assert replies == {name: (status, code) for name, (_, status, code) in cases.items()}
    slow = {name: seconds for name, (*_, seconds) in found.items() if seconds > FETCH_SECONDS + 10}
    assert slow == {}
    assert found["a bomb"][2] == found["a slow host"][2] == "messages[0].content[0]"
    assert found["one good, one bad"][2] == "messages[0].content[1]"
    for prompt, future in running.items():
        assert future.result() == {alone[prompt]}


def test_a_client_that_leaves_ends_the_fetching_of_its_media(client: Client, host: Host) -> None:
    host.arrived.clear()
    host.left.clear()
    with suppress(httpx2.TimeoutException):
        wire = {"messages": [user("look", image_part(f"{host.url}/silence"))]}
        client._http.post("/v1/chat/completions", json=wire, timeout=0.3)
    assert host.arrived.wait(5)
    # Well before the fetch's own limit would end it: it had more than half of that left.
    assert host.left.wait(FETCH_SECONDS / 2)


def test_a_request_has_one_time_limit_for_its_media_and_its_answer(
    client: Client, host: Host
) -> None:
    begun = time.monotonic()
    reply = client.post(user("look", image_part(f"{host.url}/drip")), timeout=0.2)
    assert (reply.status_code, reply.json()["error"]["code"]) == (504, "deadline_exceeded")
    assert time.monotonic() - begun < FETCH_SECONDS
