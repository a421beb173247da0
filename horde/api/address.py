"""Which address a request comes from, for limits and for worker bookkeeping.

The peer's address counts. Only with `trusted_proxies` set is `X-Forwarded-For` read, and then the entry that many hops
from its right end: whatever stands further left was written by the client. What is no IP address is not believed.
"""

from __future__ import annotations

import ipaddress

from flask import request

from horde.api.broker import context

_IPV6_SITE_BITS = 64


def client_address() -> str:
    """The address as text; IPv4 in IPv6 notation is IPv4."""
    peer = request.remote_addr or "unknown"
    hops = context().settings.trusted_proxies
    forwarded = request.headers.get("X-Forwarded-For")
    if hops and forwarded:
        chain = forwarded.split(",")
        claimed = _normal(chain[-hops].strip()) if hops <= len(chain) else None
        if claimed is not None:
            return claimed
    return _normal(peer) or peer


def limit_key() -> str:
    """Who shares a limit: one IPv4 address, or one IPv6 /64, which is what one customer gets."""
    return site_of(client_address())


def site_of(address: str) -> str:
    """One IPv4 address, or the /64 that an IPv6 address is of; what is no address is returned as it is."""
    address = _normal(address) or address
    if ":" not in address:
        return address
    try:
        return str(ipaddress.IPv6Network((address, _IPV6_SITE_BITS), strict=False))
    except ValueError:
        return address


def _normal(text: str) -> str | None:
    try:
        parsed = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(parsed)
