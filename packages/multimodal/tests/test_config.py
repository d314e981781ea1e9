"""Limits, policy and configuration check themselves."""

from typing import Any

import msgspec
import pytest

pytest.importorskip("treadle_multimodal", reason="the default environment leaves mlx-vlm out")

from treadle_core import InvalidRequest
from treadle_multimodal import FetchPolicy, MediaLimits, MultimodalConfig

INTEGERS = [
    name for name, value in msgspec.structs.asdict(MediaLimits()).items() if type(value) is int
]
SECONDS = [name for name in msgspec.structs.asdict(MediaLimits()) if name not in INTEGERS]


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", [-1, 1.5, "1", None, True, 2**70])
def test_a_number_that_makes_no_sense_is_refused(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        MediaLimits(**{name: value})

    assert caught.value.field == name


@pytest.mark.parametrize("name", SECONDS)
@pytest.mark.parametrize("value", [-1.0, 0, float("nan"), float("inf"), "1", None, True, 1e9])
def test_a_time_that_makes_no_sense_is_refused(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        MediaLimits(**{name: value})

    assert caught.value.field == name


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (FetchPolicy, "enabled", 1),
        (FetchPolicy, "allow_http", "no"),
        (FetchPolicy, "allowed_hosts", ("https://a.example",)),
        (FetchPolicy, "allowed_hosts", ("A.example",)),
        (FetchPolicy, "allowed_hosts", ("*.example",)),
        (FetchPolicy, "allowed_hosts", ("",)),
        (FetchPolicy, "allowed_ports", (0,)),
        (FetchPolicy, "allowed_ports", (65_536,)),
        (FetchPolicy, "allowed_ports", ("443",)),
        (FetchPolicy, "allowed_networks", ("10.0.0.0/33",)),
        (FetchPolicy, "allowed_networks", ("10.0.0.1/8",)),
        (FetchPolicy, "allowed_networks", ("host",)),
        (MultimodalConfig, "allowed_directories", ("media",)),
        (MultimodalConfig, "allowed_directories", ("",)),
        (MultimodalConfig, "allowed_directories", ("/a\0",)),
        (MultimodalConfig, "video_fps", 0),
        (MultimodalConfig, "audio_sample_rate", 0),
        (MultimodalConfig, "audio_sample_rate", 16_000.0),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(kind: Any, field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        kind(**{field: value})

    assert caught.value.field == field


def test_the_defaults_allow_https_to_public_hosts_and_no_files() -> None:
    config = MultimodalConfig()

    assert not config.fetch.allow_http
    assert config.fetch.allowed_networks == ()
    assert config.allowed_directories == ()


def test_a_configuration_can_be_read_from_json() -> None:
    text = b'{"limits": {"max_items": 2}, "fetch": {"allow_http": true}, "video_fps": 1}'
    config = msgspec.json.decode(text, type=MultimodalConfig)

    assert (config.limits.max_items, config.fetch.allow_http, config.video_fps) == (2, True, 1.0)
    with pytest.raises(msgspec.ValidationError, match="max_item"):
        msgspec.json.decode(b'{"limits": {"max_item": 2}}', type=MultimodalConfig)
