"""What keeps the tenants of one engine apart."""

import hashlib

_DIGITS = 48  # of a salt's digest: with the longest name of a tenant it is a namespace that validation lets pass


def namespace_of(tenant: str, salt: str) -> str:
    """The prefix-cache namespace: requests share cached prefixes when both tenant and salt are equal.

    Of bounded length, whatever the salt.
    """
    # Header bytes that are no UTF-8 arrive as lone surrogates.
    digest = hashlib.sha256(salt.encode(errors="surrogateescape")).hexdigest()[:_DIGITS]
    return f"{tenant}:{digest}" if salt else tenant
