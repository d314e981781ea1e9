"""Which URLs and addresses may be fetched. Pure: nothing is resolved or connected to."""

import re
from typing import Literal
from urllib.parse import quote, urlsplit

from msgspec import Struct

from treadle_core import InvalidRequest
from treadle_core.request import check_bool, check_int
from treadle_multimodal.addresses import (
    Address,
    is_public,
    parse_address,
    parse_networks,
)
from treadle_multimodal.errors import MediaError, MediaForbidden

MAX_URL = 8192

_LABEL = r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
_HOST = re.compile(rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
_UNWRITABLE = re.compile(r"[\x00-\x20\x7f\\]")

# Characters that stay as they are in a path and query that may be encoded already.
_SAFE = "/?%:@!$&'()*+,;=-._~"


class FetchPolicy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What may be fetched, checked on creation. By default public hosts over https on port 443.

    Attributes:
        enabled: Whether URLs are fetched at all.
        allow_http: Whether http is, besides https.
        allowed_hosts: Host names; one that begins with a dot stands for all names below it. Empty
            allows every host. It does not make a private address reachable.
        allowed_ports: Ports that a URL may name.
        allowed_networks: Networks reachable though they are not public, such as ``10.1.0.0/16``.
    """

    enabled: bool = True
    allow_http: bool = False
    allowed_hosts: tuple[str, ...] = ()
    allowed_ports: tuple[int, ...] = (80, 443)
    allowed_networks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            InvalidRequest: With the field, its value and what is accepted.
        """
        check_bool("enabled", self.enabled)
        check_bool("allow_http", self.allow_http)
        for host in self.allowed_hosts:
            if not _HOST.fullmatch(host.removeprefix(".")):
                raise InvalidRequest("allowed_hosts", host, "a host name in lower case")
        for port in self.allowed_ports:
            check_int("allowed_ports", port, 1, 65_535)
        try:
            parse_networks(self.allowed_networks)
        except ValueError:
            limit = "networks such as 10.1.0.0/16"
            raise InvalidRequest("allowed_networks", self.allowed_networks, limit) from None

    def allows_host(self, host: str) -> bool:
        """Whether a name or written address is among the allowed hosts."""
        if not self.allowed_hosts:
            return True
        return any(
            host.endswith(allowed) if allowed.startswith(".") else host == allowed
            for allowed in self.allowed_hosts
        )

    def allows_address(self, address: Address) -> bool:
        """Whether an address may be connected to: it is public, or in an allowed network."""
        networks = parse_networks(self.allowed_networks)
        return is_public(address) or any(address in network for network in networks)


class Target(Struct, frozen=True, kw_only=True):
    """A URL that the policy allows, in the parts that a request is made of.

    Attributes:
        scheme: As the URL says.
        host: Name in lower case, or address without brackets.
        port: As the URL says, or the scheme's.
        path: Path and query in ASCII; begins with a slash.
    """

    scheme: Literal["http", "https"]
    host: str
    port: int
    path: str

    @property
    def url(self) -> str:
        """The URL, without what is not sent."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.path}"


def check_url(url: str, policy: FetchPolicy) -> Target:
    """The target of a URL.

    Raises:
        MediaForbidden: The policy does not allow it.
        MediaError: It is not a URL, or one that readers disagree about.
    """
    if not policy.enabled:
        raise MediaForbidden("url", url, "no remote media: fetching is off")
    if len(url) > MAX_URL or _UNWRITABLE.search(url):
        raise MediaError("url", url, f"at most {MAX_URL} characters, none blank or a backslash")
    try:
        parts = urlsplit(url)
        scheme, host, port = parts.scheme, parts.hostname or "", parts.port
    except ValueError:
        raise MediaError("url", url, "a URL with a host and perhaps a port") from None
    if scheme not in ("http", "https") or (scheme == "http" and not policy.allow_http):
        limit = "http or https" if policy.allow_http else "https"
        raise MediaForbidden("url", url, limit)
    if parts.username is not None or parts.password is not None:
        raise MediaForbidden("url", f"{scheme}://…@{host}", "a URL without user and password")
    port = port if port is not None else {"http": 80, "https": 443}[scheme]
    if port not in policy.allowed_ports:
        ports = ", ".join(map(str, policy.allowed_ports))
        raise MediaForbidden("url", url, f"a port among {ports}")
    path = quote(parts.path or "/", _SAFE) + (
        f"?{quote(parts.query, _SAFE)}" if parts.query else ""
    )
    return Target(scheme=scheme, host=_check_host(host, url, policy), port=port, path=path)


def check_addresses(target: Target, texts: tuple[str, ...], policy: FetchPolicy) -> tuple[str, ...]:
    """The addresses that a host resolved to, once each.

    Raises:
        MediaForbidden: One of them is not allowed. A name with public and private addresses is not
            picked from.
    """
    for text in texts:
        address = parse_address(text)
        if address is None or not policy.allows_address(address):
            limit = "a host with public addresses only"
            raise MediaForbidden("url", target.url, limit)
    return tuple(dict.fromkeys(texts))


def _check_host(host: str, url: str, policy: FetchPolicy) -> str:
    host = host.removesuffix(".")
    address = parse_address(host)
    # A name whose last label is a number is an address to some resolvers: 0x7f.1, 2130706433.
    is_number = _NUMBER.fullmatch(host.rpartition(".")[2]) is not None
    if address is None and (is_number or not _HOST.fullmatch(host)):
        raise MediaForbidden("url", url, "a host name in ASCII, or an address in its usual form")
    if address is not None and not policy.allows_address(address):
        raise MediaForbidden("url", url, "a public address")
    if not policy.allows_host(host):
        raise MediaForbidden("url", url, "one of the allowed hosts")
    return host
