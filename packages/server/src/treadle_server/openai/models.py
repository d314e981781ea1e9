"""``GET /v1/models`` and ``GET /v1/models/{id}``."""

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from treadle_server.http import json_response
from treadle_server.openai.replies import ModelCard, ModelList
from treadle_server.serving import Serving


class Models:
    """Tells what is served.

    Args:
        serving: The engine and its settings.
    """

    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def get_all(self, http: HttpRequest) -> Response:
        """Every name that requests may use."""
        return json_response(ModelList(data=[self._card(name) for name in self._serving.names]))

    async def get_one(self, http: HttpRequest) -> Response:
        """What is known about one name.

        Raises:
            UnknownModel: It is not served.
        """
        name = self._serving.model_name(http.path_params["id"])
        return json_response(self._card(name))

    def _card(self, name: str) -> ModelCard:
        return ModelCard(
            id=name, created=self._serving.created, context_length=self._serving.context_length
        )
