"""Whose request it is: the tenant, of bounded length whatever the client sent."""

import hashlib
from collections.abc import Mapping

from aiohttp import web

from config.api_keys import tenant_of_digest


def presented_key(headers: Mapping[str, str]) -> str:
    """The key in `Authorization: Bearer KEY` or `x-api-key: KEY`; "" without one. Other schemes are ignored.

    RFC 6750, section 2.1; the scheme's case does not matter (RFC 9110, 11.1).
    """
    scheme, _, key = headers.get("Authorization", "").partition(" ")
    key = key.strip() if scheme.lower() == "bearer" else ""
    return key or headers.get("x-api-key", "").strip()


def key_digest(key: str) -> bytes:
    """SHA-256 of a key's bytes."""
    # Header bytes that are no UTF-8 arrive as lone surrogates.
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def tenant_of(request: web.Request) -> str:
    """Whose request this is: the name or a digest of its API key; "" without a key."""
    tenant: str = request.get("tenant", "")
    return tenant


def tenant_of_key(key: str) -> str:
    """The tenant of a key that nobody checks; "" without one."""
    return tenant_of_digest(key_digest(key)) if key else ""
