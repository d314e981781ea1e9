"""What decides whether a model takes media, how ``treadle run`` shows them, and who waits for whom."""

import json
import wave
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest

from treadle_core import InvalidRequest, Unsupported
from treadle_core.testing import zoo as text_zoo
from treadle_server import compose
from treadle_server.app import create_app
from treadle_server.cli import main
from treadle_server.media import MediaInput, NoMedia
from treadle_server.settings import MediaOptions, ModelConfig, ServeConfig

from .conftest import needs_cache, needs_multimodal

PART = {"type": "image_url", "image_url": {"url": "https://media.example/one.png"}}


def error_of(reply: httpx2.Response) -> tuple[int, str, str]:
    error = reply.json()["error"]
    return reply.status_code, error["param"], error["message"]


async def look(served: Any, *parts: Any, **fields: Any) -> httpx2.Response:
    content = [*parts, {"type": "text", "text": "look"}]
    wire = {"messages": [{"role": "user", "content": content}], **fields}
    return await served.client.post("/v1/chat/completions", json=wire)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text model whose config says that it sees, which nobody has checked."""
    folder = text_zoo.save_checkpoint("llama", tmp_path_factory.mktemp("zoo") / "seeing")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "vision_config": {}}))
    return folder


@pytest.fixture(scope="module")
def vlm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    zoo = pytest.importorskip("treadle_multimodal.testing.zoo")
    return zoo.save_checkpoint("qwen2_5_vl", tmp_path_factory.mktemp("zoo") / "tiny-vlm")


def test_a_text_model_says_so(checkpoint: Path) -> None:
    assert compose.why_text_only(str(checkpoint), MediaOptions()) == "the model takes text only"


def test_a_vision_model_that_cannot_be_used_as_one_says_what_to_do(seeing: Path) -> None:
    why = compose.why_text_only(str(seeing), MediaOptions())
    if find_spec("treadle_multimodal") is None:
        assert "install treadle-server with its extra, treadle-server[multimodal]" in why
    else:
        assert why.startswith("llama has not been checked with them")
    assert compose.why_text_only(str(seeing), MediaOptions(text_only=True)) == "text_only says so"


@needs_multimodal
def test_a_vision_model_of_a_family_that_cannot_be_taken_says_why(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "phi4mm", "vision_config": {}}')
    why = compose.why_text_only(str(tmp_path), MediaOptions())
    assert why.startswith("phi4mm: mlx-vlm changes all of its weights for prompts with media")


@needs_multimodal
def test_a_vision_model_is_used_as_one_if_it_has_its_processor(vlm: Path, tmp_path: Path) -> None:
    assert compose.why_text_only(str(vlm), MediaOptions()) == ""
    for file in vlm.iterdir():
        if not file.name.endswith("processor_config.json"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    why = compose.why_text_only(str(tmp_path), MediaOptions())
    assert why == "the checkpoint has no processor for them"


@needs_multimodal
def test_the_options_are_those_of_treadle_multimodal_by_other_names(tmp_path: Path) -> None:
    multimodal = pytest.importorskip("treadle_multimodal")
    policy, limits = multimodal.FetchPolicy, multimodal.MediaLimits
    config = multimodal.MultimodalConfig

    assert compose.media_config(MediaOptions()) == config()
    for ours, theirs in compose.MEDIA_LIMITS.items():
        found = compose.media_config(MediaOptions(**{ours: 7}))
        assert found == config(limits=limits(**{theirs: 7})), ours
    assert {*compose.MEDIA_LIMITS.values()} == {*limits.__struct_fields__}
    assert {*compose.MEDIA_POLICY.values(), "enabled"} == {*policy.__struct_fields__}
    found = compose.media_config(
        MediaOptions(
            allow_http_media=True,
            allowed_media_domains=(".example",),
            allowed_media_ports=(8080,),
            allowed_media_networks=("10.0.0.0/8",),
            allowed_local_media_path=(str(tmp_path),),
            default_video_fps=1.5,
        )
    )
    assert found == config(
        fetch=policy(
            allow_http=True,
            allowed_hosts=(".example",),
            allowed_ports=(8080,),
            allowed_networks=("10.0.0.0/8",),
        ),
        allowed_directories=(str(tmp_path),),
        video_fps=1.5,
    )
    assert not compose.media_config(MediaOptions(disable_media_fetch=True)).fetch.enabled


@needs_multimodal
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--max-media-items", "0"], "max_media_items: got 0, expected an integer from 1"),
        (["--max-image-pixels", "99999999999"], "max_image_pixels: got 99999999999"),
        (["--media-fetch-seconds", "0"], "media_fetch_seconds: got 0.0, expected a number above 0"),
        (["--allowed-media-networks", "here"], "allowed_media_networks"),
        (["--allowed-media-domains", "A B"], "allowed_media_domains: got 'A B'"),
        (["--allowed-local-media-path", "/no/such"], "allowed_local_media_path: got '/no/such'"),
        (["--default-video-fps", "0"], "default_video_fps: got 0.0"),
        (["--mllm"], "mllm cannot be honoured, no media are taken: the model takes text only"),
        (["--max-media-items", "3"], "max_media_items cannot be honoured, no media are taken"),
    ],
)
def test_what_cannot_be_honoured_is_one_sentence_at_the_start(
    words: list[str], says: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(checkpoint), "--port", "0", *words]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert says in err


@pytest.mark.skipif(
    find_spec("treadle_multimodal") is not None, reason="treadle-multimodal is installed"
)
def test_an_option_about_media_needs_the_package() -> None:
    with pytest.raises(Unsupported, match=r"max_media_items .* treadle-server\[multimodal\]"):
        compose.check_media(MediaOptions(max_media_items=3))


@needs_multimodal
def test_an_option_that_was_not_checked_with_media_says_how_to_go_on(
    vlm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", str(vlm), "--max-kv-size", "64", "--max-tokens", "3"]
    assert main(["run", "hi", *words]) == 2
    said = "max_kv_size has not been checked with media; text_only takes no media"
    assert said in capsys.readouterr().err
    assert main(["run", "hi", *words, "--text-only"]) == 0


def shown(vlm: Path, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[str, int]:
    """What ``treadle run`` answers, and its number of prompt tokens."""
    more = ["--max-tokens", "8", "--model", str(vlm)]
    assert main(["run", "What is this?", *words, *more]) == 0
    out, err = capsys.readouterr()
    return out, int(err.split()[0])


@needs_multimodal
def test_run_shows_files_in_their_order(
    vlm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pillow = pytest.importorskip("PIL.Image")
    monkeypatch.chdir(tmp_path)
    for name, colour in (("red.png", (250, 10, 10)), ("blue.png", (10, 10, 250))):
        pillow.new("RGB", (80, 60), colour).save(tmp_path / name)
    words, num_words = shown(vlm, capsys)
    one, num_one = shown(vlm, capsys, "--image", "red.png")
    two, num_two = shown(vlm, capsys, "--image", "red.png", "--image", str(tmp_path / "blue.png"))
    swapped, _ = shown(vlm, capsys, "--image", "blue.png", "--image", "red.png")
    assert len({words, one, two, swapped}) == 4
    assert num_two - num_one == num_one - num_words == 6 + 2


@needs_multimodal
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--image", "nowhere.png"], "--image: got 'nowhere.png', expected a file that is there"),
        (["--image", "notes.txt"], "--image (image '"),
        (["--image", "ftp://example.com/x"], "--image: got 'ftp://example.com/x'"),
        (["--image", "https://127.0.0.1/x.png"], "expected a public address"),
        (
            ["--audio", "notes.txt"],
            "audio cannot be shown to the model, which takes image and video",
        ),
        (["--image", "notes.txt", "--raw"], "image and raw exclude each other"),
    ],
)
def test_run_refuses_what_it_cannot_show_in_a_sentence(
    words: list[str],
    says: str,
    vlm: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("I am no image.")
    assert main(["run", "look", "--model", str(vlm), *words]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert says in err


def test_run_refuses_to_show_anything_to_a_text_model(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = ["--image", str(checkpoint / "config.json")]
    assert main(["run", "look", "--model", str(checkpoint), *image]) == 2
    err = capsys.readouterr().err
    if find_spec("treadle_multimodal") is None:
        assert "treadle-server[multimodal]" in err
    else:
        assert "image cannot be shown to the model: the model takes text only" in err


@needs_multimodal
def test_run_plays_audio_to_a_model_that_hears(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    zoo = pytest.importorskip("treadle_multimodal.testing.zoo")
    model = zoo.save_checkpoint("gemma4", tmp_path / "hearing")
    words, num_words = shown(model, capsys)
    with wave.open(str(tmp_path / "noise.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(1)
        # Not the model's rate.
        file.setframerate(8000)
        file.writeframes(bytes(range(256)) * 16)
    heard, num_heard = shown(model, capsys, "--audio", str(tmp_path / "noise.wav"))
    assert heard != words
    assert num_heard > num_words + 2


async def test_a_part_that_nobody_reads_is_refused_with_the_reason(serve: Any) -> None:
    async with serve(media=lambda: NoMedia(why="install something")) as served:
        reply = await look(served, PART)
        assert error_of(reply) == (
            400,
            "messages[0].content[0]",
            "messages[0].content[0]: this server does not offer images: install something",
        )


class Reading:
    """Reads media when it is told to.

    Args:
        waits_for: So many requests have to be reading before any goes on.
    """

    def __init__(self, waits_for: int = 1) -> None:
        self.num_reading = 0
        self.cancelled = anyio.Event()
        self._waits_for = waits_for
        self._all = anyio.Event()

    @asynccontextmanager
    async def prepare(
        self, text: str, parts: Sequence[Any], fields: Sequence[str]
    ) -> AsyncGenerator[Any]:
        self.num_reading += 1
        if self.num_reading == self._waits_for:
            self._all.set()
        try:
            await self._all.wait()
        except anyio.get_cancelled_exc_class():
            self.cancelled.set()
            raise
        if parts:
            # Far enough: the engine behind reads text.
            raise InvalidRequest("media", text, f"nothing of {len(parts)}")
        yield None

    async def until(self, num_reading: int) -> None:
        """Wait for so many requests."""
        with anyio.fail_after(5):
            while self.num_reading < num_reading:  # noqa: ASYNC110 — threads are waited for too
                await anyio.sleep(0.005)

    def media(self, *kinds: str) -> MediaInput:
        def parse(part: Any, field: str) -> Any:
            return part

        return MediaInput(kinds=frozenset(kinds or ("image",)), parse=parse, prepare=self.prepare)


async def test_media_of_several_requests_are_read_at_once_and_text_does_not_wait(
    serve: Any,
) -> None:
    reading = Reading(waits_for=3)
    replies: list[httpx2.Response] = []

    async with serve("yes", media=reading.media) as served, anyio.create_task_group() as tasks:

        async def ask() -> None:
            replies.append(await look(served, PART))

        tasks.start_soon(ask)
        tasks.start_soon(ask)
        await reading.until(2)
        with anyio.fail_after(5):
            assert (await served.chat()).status_code == 200
        assert replies == []
        await ask()
    assert [reply.status_code for reply in replies] == [400] * 3


async def test_a_client_that_leaves_ends_the_reading_of_its_media(serve: Any, visitor: Any) -> None:
    reading = Reading(waits_for=2)
    async with serve(media=reading.media) as served, anyio.create_task_group() as tasks:
        wire = {"messages": [{"role": "user", "content": [PART]}]}
        guest = visitor(served.app, "/v1/chat/completions", wire)
        tasks.start_soon(guest.visit)
        await reading.until(1)
        with anyio.fail_after(5):
            guest.leave()
            await reading.cancelled.wait()
            await guest.done.wait()
        assert guest.messages[0]["status"] == 499


async def test_a_kind_that_the_model_does_not_take_is_refused_before_anything_is_read(
    serve: Any,
) -> None:
    reading = Reading()
    async with serve(media=lambda: reading.media("image", "video")) as served:
        reply = await look(served, PART, {"type": "audio_url", "audio_url": "https://a.example/b"})
    status, param, message = error_of(reply)
    assert (status, param) == (400, "messages[0].content[1]")
    assert message.endswith("audio: the model takes images and videos")
    assert reading.num_reading == 0


async def test_media_that_take_longer_than_the_request_may_are_given_up(serve: Any) -> None:
    reading = Reading(waits_for=2)
    async with serve(media=reading.media) as served:
        reply = await look(served, PART, timeout=0.05)
    assert reply.status_code == 504
    assert reading.cancelled.is_set()


@needs_multimodal
async def test_requests_wait_for_memory_and_one_that_needs_all_and_more_is_refused(
    vlm: Path, tmp_path: Path
) -> None:
    pillow = pytest.importorskip("PIL.Image")
    pillow.new("RGB", (80, 60), (250, 10, 10)).save(tmp_path / "red.png")
    room = 2 * 80 * 60 * 3
    media = MediaOptions(
        allowed_local_media_path=(str(tmp_path),),
        max_image_pixels=80 * 60,
        max_loaded_media_bytes=room,
    )
    config = ServeConfig(model=ModelConfig(model=str(vlm)), media=media)
    engine, takes = await anyio.to_thread.run_sync(compose.serving_engine, config)
    app = create_app(engine, config, media=takes)
    image = {"type": "image", "image": f"file://{tmp_path}/red.png"}
    replies: list[httpx2.Response] = []

    async with (
        app.router.lifespan_context(app),
        httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://test") as client,
    ):

        async def ask(num_images: int) -> httpx2.Response:
            wire = {"messages": [{"role": "user", "content": [image] * num_images}]}
            return await client.post("/v1/chat/completions", json={**wire, "max_tokens": 1})

        async def ask_beside_others() -> None:
            replies.append(await ask(2))

        async with anyio.create_task_group() as tasks:
            for _ in range(4):
                tasks.start_soon(ask_beside_others)
            refused = await ask(3)

    assert [reply.status_code for reply in replies] == [200] * 4
    status, _, message = error_of(refused)
    assert status == 413
    assert message.endswith(
        f"decoded bytes: got {3 * 80 * 60 * 3}, expected at most {room} over all media of a request"
    )


@needs_multimodal
async def test_the_memory_of_a_prompt_is_free_again_however_its_answer_ends(
    vlm: Path, tmp_path: Path, visitor: Any
) -> None:
    """A prompt takes more than all that is there, so nobody's is read before it is given back."""
    pillow = pytest.importorskip("PIL.Image")
    pillow.new("RGB", (80, 60), (250, 10, 10)).save(tmp_path / "red.png")
    media = MediaOptions(
        allowed_local_media_path=(str(tmp_path),),
        max_image_pixels=80 * 60,
        max_loaded_media_bytes=80 * 60 * 3,
    )
    config = ServeConfig(model=ModelConfig(model=str(vlm)), media=media)
    engine, takes = await anyio.to_thread.run_sync(compose.serving_engine, config)
    app = create_app(engine, config, media=takes)
    image = {"type": "image", "image": f"file://{tmp_path}/red.png"}
    path = "/v1/chat/completions"

    def wire(text: str = "look", **fields: Any) -> Any:
        content = [image, {"type": "text", "text": text}]
        more = {"max_tokens": 3, "ignore_eos": True, **fields}
        return {"messages": [{"role": "user", "content": content}], **more}

    async with (
        app.router.lifespan_context(app),
        httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://test") as client,
    ):

        async def ask(body: Any) -> int:
            with anyio.fail_after(10):
                return (await client.post(path, json=body)).status_code

        assert await ask(wire()) == 200
        assert await ask(wire(stream=True)) == 200
        assert await ask(wire(n=2)) == 200
        assert await ask(wire("x" * 10_000)) == 400  # too long for the context
        assert await ask(wire(timeout=1e-3)) == 504
        assert await ask(wire(top_k=-7)) == 400
        guest = visitor(app, path, wire(stream=True, max_tokens=4000))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(guest.visit)
            with anyio.fail_after(10):
                while len(guest.messages) < 3:  # noqa: ASYNC110 — whatever it was sent
                    await anyio.sleep(0.005)
            waiting: list[int] = []

            async def wait() -> None:
                waiting.append(await ask(wire()))

            tasks.start_soon(wait)
            await anyio.sleep(0.1)
            assert waiting == []
            guest.leave()
        assert waiting == [200]


@needs_multimodal
@needs_cache
async def test_layers_that_cannot_be_cut_go_on_where_chats_with_media_part(tmp_path: Path) -> None:
    zoo = pytest.importorskip("treadle_multimodal.testing.zoo")
    pillow = pytest.importorskip("PIL.Image")
    pillow.new("RGB", (80, 60), (250, 10, 10)).save(tmp_path / "red.png")
    model = str(zoo.save_checkpoint("gemma3", tmp_path / "gemma3"))
    config = ServeConfig(
        model=ModelConfig(model=model),
        media=MediaOptions(allowed_local_media_path=(str(tmp_path),)),
    )
    engine, media = await anyio.to_thread.run_sync(compose.serving_engine, config)
    app = create_app(engine, config, media=media)
    system = {"role": "system", "content": "You look at pictures and answer in a few words."}
    image = {"type": "image", "image": f"file://{tmp_path}/red.png"}
    first = {"role": "user", "content": [image, {"type": "text", "text": "Which colour is this?"}]}
    other = {"role": "user", "content": [image, {"type": "text", "text": "How large is it?"}]}
    answer = {"role": "assistant", "content": "It is red."}

    async with (
        app.router.lifespan_context(app),
        httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://test") as client,
    ):

        async def usage(*messages: Any) -> tuple[int, int]:
            wire = {"messages": messages, "max_tokens": 1, "temperature": 0}
            reply = await client.post("/v1/chat/completions", json=wire)
            counts = reply.json()["usage"]
            return counts["prompt_tokens"], counts["prompt_tokens_details"]["cached_tokens"]

        opening, _ = await usage(system)
        shown, _ = await usage(system, first)
        _, instructions = await usage(system, other)
        await usage(system, first, answer, {"role": "user", "content": "And what shape has it?"})
        _, before = await usage(system, first, answer, {"role": "user", "content": "Why so?"})
        seen = (await client.get("/status")).json()["media"]
        scraped = (await client.get("/metrics")).text

    # A chat ends with what opens the answer, "<|im_start|>assistant" and a line break.
    closing = len("assistant\n") + 1
    assert opening - closing <= instructions < shown
    assert before > shown
    assert seen["kinds"] == ["image"]
    assert seen["encode_seconds"] > 0
    assert seen["features"]["num_items"] == 1
    assert f"treadle_vision_cache_used_bytes {seen['features']['used_bytes']}.0" in scraped
