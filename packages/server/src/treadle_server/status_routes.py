"""``/status``: all figures as one document. ``/metrics``: the same as Prometheus reads them."""

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from treadle_server.figures import Reporter
from treadle_server.http import json_response
from treadle_server.metrics import CONTENT_TYPE, exposition


class StatusRoutes:
    """Shows figures; neither route waits for a step.

    Args:
        reporter: Collects them.
    """

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter

    async def status(self, http: HttpRequest) -> Response:
        """All of them as JSON.

        Raises:
            EngineClosed: The engine never ran.
        """
        return json_response(await self._reporter.figures())

    async def metrics(self, http: HttpRequest) -> Response:
        """All of them in Prometheus' text format.

        Raises:
            EngineClosed: The engine never ran.
        """
        figures = await self._reporter.figures()
        return Response(exposition(figures), headers={"content-type": CONTENT_TYPE})
