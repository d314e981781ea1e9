"""Images and videos in chats, against a real process over a tiny random vision model."""

import json
from base64 import b64encode
from collections.abc import Generator
from io import BytesIO
from pathlib import Path
from typing import Any

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

MAX_BYTES = 100_000
MAX_ITEMS = 4
FETCH_SECONDS = 1.0


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

    def __init__(self, url: str) -> None:
        self._http = httpx2.Client(base_url=url, timeout=30)

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
def client(server: Any) -> Client:
    return Client(server.url)


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
