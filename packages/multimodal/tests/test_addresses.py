"""Which addresses are public, and which spellings of hosts are taken for addresses."""

import pytest

pytest.importorskip("treadle_multimodal", reason="the default environment leaves mlx-vlm out")

from treadle_multimodal import FetchPolicy, MediaError, MediaForbidden
from treadle_multimodal.addresses import is_public, parse_address
from treadle_multimodal.policy import check_url

NOT_PUBLIC = (
    "0.0.0.0",
    "0.1.2.3",
    "10.0.0.1",
    "10.255.255.255",
    "100.64.0.1",
    "100.100.100.200",
    "100.127.255.255",
    "127.0.0.1",
    "127.255.255.254",
    "168.63.129.16",
    "169.254.0.1",
    "169.254.169.254",
    "172.16.0.1",
    "172.31.255.255",
    "192.0.0.192",
    "192.0.2.1",
    "192.88.99.1",
    "192.168.0.1",
    "198.18.0.1",
    "198.19.255.255",
    "198.51.100.1",
    "203.0.113.1",
    "224.0.0.1",
    "239.255.255.250",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::7f00:1",
    "::127.0.0.1",
    "::ffff:127.0.0.1",
    "::ffff:10.0.0.1",
    "::ffff:a9fe:a9fe",
    "::ffff:0:127.0.0.1",
    "64:ff9b::127.0.0.1",
    "64:ff9b::10.0.0.1",
    "64:ff9b::a9fe:a9fe",
    "64:ff9b:1::8.8.8.8",
    "100::1",
    "2001::1",
    "2001:0:4136:e378:8000:63bf:3fff:fdd2",
    "2001:10::1",
    "2001:db8::1",
    "2002:7f00:1::1",
    "2002:a00:1::",
    "2002:c0a8:101::1",
    "2a00:1450::5efe:10.0.0.1",
    "2a00:1450::200:5efe:192.168.1.1",
    "3fff::1",
    "5f00::1",
    "4000::1",
    "fc00::1",
    "fd00:ec2::254",
    "fe80::1",
    "febf::1",
    "fec0::1",
    "ff02::1",
    "ff0e::1",
)

PUBLIC = (
    "1.1.1.1",
    "8.8.8.8",
    "11.0.0.1",
    "100.63.255.255",
    "100.128.0.1",
    "172.15.255.255",
    "172.32.0.1",
    "192.0.1.1",
    "223.255.255.255",
    "::ffff:8.8.8.8",
    "64:ff9b::8.8.8.8",
    "2001:200::1",
    "2001:4860:4860::8888",
    "2002:808:808::1",
    "2606:4700::1111",
    "2a00:1450::5efe:8.8.8.8",
)

# Spellings that some resolver reads as 127.0.0.1, 10.0.0.1 or another address that is not public.
HIDDEN = (
    "0",
    "127.1",
    "127.0.1",
    "2130706433",
    "017700000001",
    "0x7f000001",
    "0x7f.0.0.1",
    "0x7f.1",
    "0X7F000001",
    "0177.0.0.1",
    "0177.0.0.01",
    "127.0.0.1.",
    "127.0.0.01",
    "010.0.0.1",
    "10.0.0.1.",
    "3232235777",
    "1.2.3.4.5",
    "256.256.256.256",
    "[::1]",
    "[::ffff:127.0.0.1]",
    "[0:0:0:0:0:ffff:7f00:0001]",
    "[fe80::1%25eth0]",
    "[fe80::1%eth0]",
    "[2001:4860:4860::8888%25lo]",
    "\uff11\uff12\uff17.\uff10.\uff10.\uff11",
    "127\u30020\u30020\u30021",
    "\u2460\u2461\u2466.0.0.1",
    "loc\u24d0lhost",
    "a..example",
    ".example",
    "a%2eexample",
    "-.example",
    "a" * 64 + ".example",
)


@pytest.mark.parametrize("text", NOT_PUBLIC)
def test_it_is_not_public(text: str) -> None:
    address = parse_address(text)

    assert address is not None
    assert not is_public(address)
    assert not FetchPolicy().allows_address(address)


@pytest.mark.parametrize("text", PUBLIC)
def test_it_is_public(text: str) -> None:
    address = parse_address(text)

    assert address is not None
    assert is_public(address)


@pytest.mark.parametrize("host", [*HIDDEN, *(f"[{text}]" for text in NOT_PUBLIC if ":" in text)])
def test_a_url_with_that_host_is_refused_without_resolving(host: str) -> None:
    with pytest.raises(MediaError) as caught:
        check_url(f"https://{host}/a.png", FetchPolicy())

    assert isinstance(caught.value, MediaForbidden) or "a URL with a host" in caught.value.limit


@pytest.mark.parametrize(
    ("url", "code", "limit"),
    [
        ("http://a.example/", "media_forbidden", "expected https"),
        ("ftp://a.example/", "media_forbidden", "expected https"),
        ("file:///etc/passwd", "media_forbidden", "expected https"),
        ("gopher://a.example:70/", "media_forbidden", "expected https"),
        ("https://user:secret@a.example/", "media_forbidden", "without user and password"),
        ("https://@a.example/", "media_forbidden", "without user and password"),
        ("https://8.8.8.8@127.0.0.1/", "media_forbidden", "without user and password"),
        ("https://a.example:22/", "media_forbidden", "a port among 80, 443"),
        ("https://a.example:8080/", "media_forbidden", "a port among 80, 443"),
        ("https://a.example:0/", "media_forbidden", "a port among 80, 443"),
        ("https://a.example:99999/", "invalid_media", "a host and perhaps a port"),
        ("https://a.example:x/", "invalid_media", "a host and perhaps a port"),
        ("https:///a.png", "media_forbidden", "a host name in ASCII"),
        ("https://", "media_forbidden", "a host name in ASCII"),
        ("https://[::1", "invalid_media", "a host and perhaps a port"),
        ("https://a.example\\@127.0.0.1/", "invalid_media", "none blank or a backslash"),
        ("https://a.example/ b", "invalid_media", "none blank or a backslash"),
        ("https://a.example/\r\nHost: b", "invalid_media", "none blank or a backslash"),
        ("https://a.example/" + "a" * 9000, "invalid_media", "at most 8192 characters"),
    ],
)
def test_a_url_is_refused(url: str, code: str, limit: str) -> None:
    with pytest.raises(MediaError) as caught:
        check_url(url, FetchPolicy())

    assert caught.value.code == code
    assert limit in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_target_has_the_parts_of_the_request() -> None:
    target = check_url("https://A.Example./b c/%C3%A9?q=é#part".replace(" ", "%20"), FetchPolicy())

    assert (target.scheme, target.host, target.port) == ("https", "a.example", 443)
    assert target.path == "/b%20c/%C3%A9?q=%C3%A9"
    assert target.url == "https://a.example:443/b%20c/%C3%A9?q=%C3%A9"


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("cdn.example", True),
        ("CDN.example", True),
        ("a.cdn.example", False),
        ("evil-cdn.example", False),
        ("img.example", False),
        ("a.img.example", True),
        ("b.a.img.example", True),
        ("aimg.example", False),
        ("8.8.8.8", False),
    ],
)
def test_allowed_hosts_are_whole_names_or_all_below_a_dot(host: str, allowed: bool) -> None:
    policy = FetchPolicy(allowed_hosts=("cdn.example", ".img.example"))

    if allowed:
        assert check_url(f"https://{host}/", policy).host == host.lower()
    else:
        with pytest.raises(MediaForbidden, match="one of the allowed hosts"):
            check_url(f"https://{host}/", policy)


def test_an_allowed_host_does_not_make_a_private_address_reachable() -> None:
    with pytest.raises(MediaForbidden, match="a public address"):
        check_url("https://10.0.0.1/", FetchPolicy(allowed_hosts=("10.0.0.1",)))


def test_a_network_makes_just_its_addresses_reachable() -> None:
    policy = FetchPolicy(allowed_networks=("10.1.0.0/16",))

    assert check_url("https://10.1.2.3/", policy).host == "10.1.2.3"
    with pytest.raises(MediaForbidden):
        check_url("https://10.2.0.1/", policy)


def test_nothing_is_fetched_when_fetching_is_off() -> None:
    with pytest.raises(MediaForbidden, match="fetching is off"):
        check_url("https://a.example/", FetchPolicy(enabled=False))
