"""Fakes and fixtures: engines that follow a script, applications over them, and real processes."""

import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest
from blockbuster import blockbuster_ctx
from starlette.types import ASGIApp, Message

from treadle_core import AsyncEngine, Engine, InvalidRequest
from treadle_core.drafting import DraftController, Drafter
from treadle_core.ports import Clock, Observer, PrefixStore, Runner, Tokenizer
from treadle_core.testing import zoo
from treadle_core.testing.fakes import BEGIN, END, ByteTokenizer
from treadle_core.testing.scripted import ScriptedRunner
from treadle_server.app import create_app
from treadle_server.media import Media, text_only
from treadle_server.settings import ServeConfig
from treadle_server.warm import WarmChat

READY = "Treadle is ready on "


needs_cache = pytest.mark.skipif(
    find_spec("treadle_cache") is None, reason="treadle-cache is not installed"
)


needs_multimodal = pytest.mark.skipif(
    find_spec("treadle_multimodal") is None, reason="treadle-multimodal is not installed"
)


class ChatByteTokenizer(ByteTokenizer):
    """Bytes, and a chat template with one rule: the first message must not be an assistant's.

    Every prompt ends in the begin token, so that a script knows where the answer begins.
    """

    def encode(self, text: str) -> list[int]:
        return [*text.encode(), BEGIN] if text else []

    def encode_rendered(self, text: str) -> list[int]:
        return [*text.encode(), BEGIN]

    def token_text(self, token: int) -> str:
        return {BEGIN: "<begin>", END: "<end>"}.get(token) or self.decode([token])

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_args: Any,
    ) -> str:
        if messages[0]["role"] == "assistant":
            raise InvalidRequest("messages", "assistant", "a chat that a user begins")
        lines = [json.dumps(dict(message), sort_keys=True) for message in messages]
        if template_args:
            lines.append(json.dumps(template_args, sort_keys=True))
        return "\n".join([*lines, "assistant:"] if add_generation_prompt else lines)


def spells(answer: Callable[[bytes], bytes]) -> Callable[[Sequence[int]], int]:
    """A script: after its prompt, a row says ``answer(prompt)`` and ends.

    The beginning of a chat has nothing to answer.
    """

    def script(tokens: Sequence[int]) -> int:
        if BEGIN not in tokens:
            return END
        prompt_end = list(tokens).index(BEGIN)
        said = answer(bytes(tokens[:prompt_end]))
        position = len(tokens) - prompt_end - 1
        return said[position] if position < len(said) else END

    return script


class Fixed:
    """A script that always says the same text.

    Args:
        text: The text.
        seconds: How long each token takes, on the owner thread.
    """

    def __init__(self, text: str | bytes, *, seconds: float = 0.0) -> None:
        said = text.encode() if isinstance(text, str) else text
        self._next = spells(lambda prompt: said)
        self._seconds = seconds

    def __call__(self, tokens: Sequence[int]) -> int:
        time.sleep(self._seconds)
        return self._next(tokens)


class Served:
    """An application that runs, a client of it, and its engine."""

    def __init__(self, app: ASGIApp, engine: AsyncEngine, client: httpx2.AsyncClient) -> None:
        self.app = app
        self.engine = engine
        self.client = client

    async def chat(self, text: str = "hi", **fields: Any) -> httpx2.Response:
        body = {"messages": [{"role": "user", "content": text}], **fields}
        return await self.client.post("/v1/chat/completions", json=body)

    async def complete(self, prompt: Any = "hi", **fields: Any) -> httpx2.Response:
        return await self.client.post("/v1/completions", json={"prompt": prompt, **fields})

    async def until_idle(self, seconds: float = 5.0) -> None:
        """Wait until the engine has nothing to do."""
        with anyio.fail_after(seconds):
            while True:
                stats = await self.engine.call(Engine.stats)
                if not (stats.num_running or stats.num_waiting):
                    return
                await anyio.sleep(0.005)


Serve = Callable[..., AbstractAsyncContextManager[Served]]


@pytest.fixture
def anyio_backend() -> str:
    """The server runs on uvicorn, so on asyncio."""
    return "asyncio"


@pytest.fixture
def tokenizer_type() -> type[ChatByteTokenizer]:
    return ChatByteTokenizer


@pytest.fixture
def serve() -> Serve:
    """Serves a runner, or a script, with ASGI as the transport."""

    @asynccontextmanager
    async def serving(
        model: Runner | Callable[[Sequence[int]], int] | str = "Hello.",
        *,
        config: ServeConfig | None = None,
        raises: bool = True,
        headers: Mapping[str, str] | None = None,
        tokenizer: Tokenizer | None = None,
        observers: Sequence[Observer] = (),
        store: PrefixStore | None = None,
        drafter: Drafter | None = None,
        controller: DraftController | None = None,
        clock: Clock | None = None,
        warm: Sequence[WarmChat] = (),
        media: Callable[[], Media] = text_only,
    ) -> AsyncGenerator[Served]:
        config = config or ServeConfig()
        script = Fixed(model) if isinstance(model, str) else model
        runner: Any = ScriptedRunner(script) if callable(script) else script
        engine = AsyncEngine(
            lambda: Engine(
                runner,
                tokenizer=tokenizer or ChatByteTokenizer(),
                config=config.engine,
                observers=observers,
                store=store,
                drafter=drafter,
                controller=controller,
                clock=clock,
            )
        )
        app = create_app(engine, config, clock=clock, warm=warm, media=media)
        transport = httpx2.ASGITransport(app, raise_app_exceptions=raises)
        async with (
            app.router.lifespan_context(app),
            httpx2.AsyncClient(
                transport=transport, base_url="http://test", headers=headers
            ) as client,
        ):
            yield Served(app, engine, client)

    return serving


def events_of(response: httpx2.Response) -> list[Any]:
    """The events of a streamed response; ``[DONE]`` is a string, comments are left out."""
    assert response.headers["content-type"].startswith("text/event-stream")
    return parse_events(response.text)


def parse_events(text: str) -> list[Any]:
    """Events from their text, which has to be whole."""
    assert text.endswith("\n\n")
    found: list[Any] = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        if block.startswith(":"):
            continue
        assert block.startswith("data: "), block
        data = block.removeprefix("data: ")
        found.append(data if data == "[DONE]" else json.loads(data))
    return found


@pytest.fixture
def events() -> Callable[[httpx2.Response], list[Any]]:
    return events_of


class Visitor:
    """An HTTP client of one request, down to ASGI's messages, that can leave when it wants.

    Args:
        app: The application.
        path: Where to post.
        body: What to post.
    """

    def __init__(self, app: ASGIApp, path: str, body: Any) -> None:
        self._app = app
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"host", b"test")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        self._body = json.dumps(body).encode()
        self._asked = False
        self._left = anyio.Event()
        self._news = anyio.Event()
        self.messages: list[Message] = []
        self.done = anyio.Event()

    async def visit(self) -> None:
        """Make the request; returns when the application does."""
        await self._app(self._scope, self._receive, self._send)
        self.done.set()

    def leave(self) -> None:
        """Close the connection."""
        self._left.set()

    @property
    def text(self) -> str:
        """The body so far."""
        return b"".join(message.get("body", b"") for message in self.messages).decode()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until what was sent fulfils ``condition``."""
        with anyio.fail_after(5):
            while not condition():
                await self._news.wait()
                self._news = anyio.Event()

    async def _receive(self) -> Message:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        self.messages.append(message)
        self._news.set()


@pytest.fixture
def visitor() -> type[Visitor]:
    return Visitor


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random llama."""
    return zoo.save_checkpoint("llama", tmp_path_factory.mktemp("zoo") / "tiny-llama")


def command(*words: str) -> list[str]:
    """The command ``treadle`` in this interpreter."""
    return [sys.executable, "-m", "treadle_server", *words]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "MLX_DISABLE_COMPILE": "1", "HF_HUB_OFFLINE": "1", **more}


class Process:
    """A ``treadle serve`` that is ready.

    Attributes:
        url: Where.
        popen: The process.
        log: The file that its stderr goes to.
    """

    def __init__(self, popen: subprocess.Popen[str], url: str, log: Path) -> None:
        self.popen = popen
        self.url = url
        self.log = log


@contextmanager
def running(log: Path, *words: str) -> Generator[Process]:
    """``treadle serve`` with these options, on a port of the system's choice."""
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command("serve", "--port", "0", *words),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment(),
        ) as popen,
    ):
        try:
            assert popen.stdout is not None
            line = popen.stdout.readline()
            assert line.startswith(READY), f"{line!r}; {log.read_text()}"
            yield Process(popen, line.removeprefix(READY).strip(), log)
        finally:
            if popen.poll() is None:
                popen.kill()


@pytest.fixture(scope="session")
def process(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Generator[Process]:
    """One server over the tiny model for all tests that leave it as it was."""
    log = tmp_path_factory.mktemp("log") / "stderr"
    # Long prompts of others shall not slow the tests down.
    quick = ["--max-decode-stall-ms", "10"]
    with running(log, "--model", str(checkpoint), "--max-num-seqs", "32", *quick) as ready:
        yield ready


@pytest.fixture(scope="session")
def launch() -> Callable[..., Any]:
    """Starts a server of the test's own."""
    return running


@pytest.fixture(autouse=True)
def nothing_blocks_the_loop() -> Generator[None]:
    """Fails a test in which our code makes a blocking call on the event loop."""
    with blockbuster_ctx("treadle_server"):
        yield
