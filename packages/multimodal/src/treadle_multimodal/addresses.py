"""Which IP addresses are public. Own tables: what ``ipaddress`` calls global varies by version."""

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

# https://www.iana.org/assignments/iana-ipv4-special-registry and multicast.
NOT_PUBLIC_4 = tuple(
    IPv4Network(text)
    for text in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",
        "127.0.0.0/8",
        "169.254.0.0/16",
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.88.99.0/24",
        "192.168.0.0/16",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/4",
        "240.0.0.0/4",
        # Azure's metadata service answers inside its networks at this address.
        "168.63.129.16/32",
    )
)

GLOBAL_UNICAST_6 = IPv6Network("2000::/3")

# https://www.iana.org/assignments/iana-ipv6-special-registry, inside global unicast. Teredo and
# ORCHID are in 2001::/23.
NOT_PUBLIC_6 = tuple(IPv6Network(text) for text in ("2001::/23", "2001:db8::/32", "3fff::/20"))

MAPPED = IPv6Network("::ffff:0:0/96")
NAT64 = IPv6Network("64:ff9b::/96")
SIX_TO_FOUR = IPv6Network("2002::/16")
ISATAP_IDENTIFIERS = (0x00005EFE, 0x02005EFE)


def parse_address(text: str) -> Address | None:
    """The address that ``text`` spells in its usual form; None for anything else.

    A zone id (``fe80::1%eth0``) is anything else: it names an interface of this machine.
    """
    if "%" in text:
        return None
    try:
        return ip_address(text)
    except ValueError:
        return None


def parse_networks(texts: tuple[str, ...]) -> tuple[Network, ...]:
    """Networks as written in a configuration.

    Raises:
        ValueError: One is not a network, or has host bits.
    """
    return tuple(ip_network(text) for text in texts)


def is_public(address: Address) -> bool:
    """Whether an address is on the public internet.

    An IPv6 address that carries an IPv4 address (mapped, NAT64, 6to4, ISATAP) is public if both
    are.
    """
    if isinstance(address, IPv4Address):
        return not any(address in network for network in NOT_PUBLIC_4)
    embedded = embedded_address(address)
    if embedded is not None and not is_public(embedded):
        return False
    if address in MAPPED or address in NAT64:
        return True
    return address in GLOBAL_UNICAST_6 and not any(address in network for network in NOT_PUBLIC_6)


def embedded_address(address: IPv6Address) -> IPv4Address | None:
    """The IPv4 address that packets to ``address`` may end at, if it spells one."""
    value = int(address)
    if address in MAPPED or address in NAT64:
        return IPv4Address(value & 0xFFFFFFFF)
    if address in SIX_TO_FOUR:
        return IPv4Address(value >> 80 & 0xFFFFFFFF)
    if value >> 32 & 0xFFFFFFFF in ISATAP_IDENTIFIERS:
        return IPv4Address(value & 0xFFFFFFFF)
    return None
