"""Whose request it is: tenant and prefix-cache namespace, of bounded length whatever the client sent."""

import hashlib

_TENANT_DIGITS = 16


def tenant_of(authorization: str | None) -> str:
    """The tenant that an `Authorization: Bearer KEY` header stands for, by a digest of the key; "" without one.

    Headers of any other form are ignored. RFC 6750, section 2.1; the scheme's case does not matter (RFC 9110, 11.1).
    """
    scheme, _, key = (authorization or "").partition(" ")
    key = key.strip()
    if scheme.lower() != "bearer" or not key:
        return ""
    return _digest(key)[:_TENANT_DIGITS]


def namespace_of(tenant: str, cache_salt: str) -> str:
    """The prefix-cache namespace: requests share cached prefixes when both tenant and salt are equal."""
    return f"{tenant}:{_digest(cache_salt)}" if cache_salt else tenant


def _digest(text: str) -> str:
    # Header bytes that are no UTF-8 arrive as lone surrogates.
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()
