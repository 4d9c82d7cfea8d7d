"""Which network interface leads to a host."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
from pathlib import Path

__all__ = ["towards"]

_SIOCGIFADDR = 0x8915


def towards(host: str) -> str | None:
    """Name of the interface whose address the kernel would use to talk to ``host``; None if that cannot be found.

    Nothing is sent: connecting a datagram socket only asks for the route. Linux; elsewhere always None.
    """
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, target in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(target)
                mine = str(probe.getsockname()[0]).partition("%")[0]
                return _with_address(ipaddress.ip_address(mine))
    return None


def _with_address(wanted: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str | None:
    if wanted.version == 6:
        with contextlib.suppress(OSError):
            for line in Path("/proc/net/if_inet6").read_text().splitlines():
                digits, *_, name = line.split()
                if int(digits, 16) == int(wanted):
                    return name
        return None
    if wanted.is_loopback:
        return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    return next((name for _, name in socket.if_nameindex() if _first_address(name) == wanted.packed), None)


def _first_address(name: str) -> bytes | None:
    """The IPv4 address of an interface, 4 bytes."""
    try:
        import fcntl
    except ImportError:
        return None
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        return answer[20:24]
    return None
