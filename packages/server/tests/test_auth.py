"""The API key is asked for on every route there is, liveness excepted."""

from typing import Any

import pytest

from treadle_server.app import OPEN_PATHS
from treadle_server.settings import HttpConfig, ServeConfig

KEY = "sk-threads-and-pedals"
CONFIG = ServeConfig(http=HttpConfig(api_key=KEY))

WRONG: list[dict[str, str]] = [
    {},
    {"authorization": ""},
    {"authorization": "Bearer"},
    {"authorization": "Bearer wrong"},
    {"authorization": KEY},
    {"authorization": f"Basic {KEY}"},
    {"authorization": f"Bearer {KEY}x"},
    {"authorization": f"Bearer {KEY[:-1]}"},
    {"x-api-key": "wrong"},
    {"x-api-key": ""},
]
RIGHT: list[dict[str, str]] = [
    {"authorization": f"Bearer {KEY}"},
    {"authorization": f"bearer {KEY}"},
    {"x-api-key": KEY},
    {"x-api-key": KEY, "authorization": "Bearer something-else"},
]


@pytest.mark.parametrize("headers", WRONG)
async def test_no_route_but_health_opens_without_the_key(
    serve: Any, headers: dict[str, str]
) -> None:
    async with serve(config=CONFIG) as served:
        tried = 0
        for route in served.app.routes:
            path = route.path.replace("{id:path}", "default")
            for method in route.methods:
                response = await served.client.request(method, path, headers=headers)
                tried += 1
                if path in OPEN_PATHS:
                    assert response.status_code == 200
                    continue
                assert response.status_code == 401, (method, path)
                assert response.headers["www-authenticate"] == "Bearer"
                if method != "HEAD":
                    assert response.json()["error"]["code"] == "invalid_api_key"
        assert tried >= 8
        assert (await served.client.get("/nowhere", headers=headers)).status_code == 401
    assert OPEN_PATHS == {"/health"}


@pytest.mark.parametrize("headers", RIGHT)
async def test_the_key_opens_every_route(serve: Any, headers: dict[str, str]) -> None:
    async with serve(config=CONFIG, headers=headers) as served:
        for route in served.app.routes:
            path = route.path.replace("{id:path}", "default")
            for method in route.methods:
                response = await served.client.request(method, path)
                assert response.status_code != 401, (method, path)
        assert (await served.chat()).status_code == 200
        assert (await served.client.get("/nowhere")).status_code == 404


async def test_without_a_key_configured_none_is_needed(serve: Any) -> None:
    async with serve() as served:
        assert (await served.chat()).status_code == 200
