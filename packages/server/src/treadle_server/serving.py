"""What the routes share: the engine, the settings, and how a request is checked against them."""

import time
import uuid
from collections.abc import Callable
from typing import TypeVar

from treadle_core import AsyncEngine, InvalidRequest, PromptTooLong
from treadle_server.errors import UnknownModel
from treadle_server.generation import Dispatcher
from treadle_server.media import Media, text_only
from treadle_server.settings import ServeConfig
from treadle_server.tokenizer import (
    BoundedTokenizer,
    ChatTokenizer,
    TextWorkers,
    TokenNames,
    chat_tokenizer,
)

T = TypeVar("T")

ANY_MODEL = "default"


class Serving:
    """One engine being served.

    Args:
        engine: Makes the answers; it is entered by the application's lifespan.
        config: What the server was told.
        media: What the model does with media; called when the engine runs.
    """

    def __init__(
        self, engine: AsyncEngine, config: ServeConfig, media: Callable[[], Media] = text_only
    ) -> None:
        self.engine = engine
        self.config = config
        self.dispatcher = Dispatcher(engine)
        self.names = config.http.served_model_name or (ANY_MODEL,)
        self.created = int(time.time())
        self._workers = TextWorkers()
        self._media = media
        self._token_names: TokenNames | None = None

    @property
    def tokenizer(self) -> ChatTokenizer:
        """The model's.

        Raises:
            EngineClosed: The engine does not run.
            Unsupported: It cannot do what the server needs.
        """
        return chat_tokenizer(self.engine.engine.tokenizer)

    @property
    def prompt_tokenizer(self) -> BoundedTokenizer:
        """The same, for prompts: it stops at texts that the context has no room for.

        Raises:
            EngineClosed: The engine does not run.
            Unsupported: It cannot do what the server needs.
        """
        return BoundedTokenizer(self.tokenizer, self.context_length)

    @property
    def media(self) -> Media:
        """What the model does with media."""
        return self._media()

    @property
    def token_names(self) -> TokenNames:
        """What the model's tokens are called."""
        if self._token_names is None:
            self._token_names = TokenNames(self.tokenizer)
        return self._token_names

    @property
    def context_length(self) -> int:
        """Most tokens of a prompt and its answer.

        Raises:
            EngineClosed: The engine does not run.
        """
        return self.engine.engine.context_length

    @property
    def keeps_checkpoints(self) -> bool:
        """Whether the engine has a use for the boundaries of a prompt.

        Raises:
            EngineClosed: The engine does not run.
        """
        return self.engine.engine.keeps_checkpoints

    @property
    def priorities(self) -> bool:
        """Whether the queue looks at priorities."""
        return self.config.engine.policy == "priority"

    def model_name(self, asked: str | None) -> str:
        """How a reply calls the model that a request asks for.

        Raises:
            UnknownModel: It asks for another one.
        """
        if asked is None or (asked == ANY_MODEL and asked not in self.names):
            return self.names[0]
        if asked in self.names:
            return asked
        raise UnknownModel(asked, self.names)

    def check_size(self, field: str, prompt: tuple[int, ...]) -> tuple[int, ...]:
        """``prompt``, if the context has room for it; later checks look at every token.

        Args:
            field: What the client calls it.
            prompt: Its token ids.

        Raises:
            PromptTooLong: It has no room.
        """
        if len(prompt) < self.context_length:
            return prompt
        error = PromptTooLong(len(prompt), self.context_length)
        error.field = field
        raise error

    def check_answers(self, field: str, count: int) -> None:
        """Refuse more answers at once than could ever wait.

        Raises:
            InvalidRequest: There are.
        """
        most = self.config.engine.max_queue
        if count > most:
            raise InvalidRequest(field, f"{count} answers", f"at most {most}, the queue's length")

    async def text_work(self, function: Callable[[], T]) -> T:
        """The result of rendering or tokenising, done in a worker thread."""
        return await self._workers.run(function)


def new_id(prefix: str) -> str:
    """An id for a request, in the client's and the engine's sense."""
    return f"{prefix}-{uuid.uuid4().hex}"
