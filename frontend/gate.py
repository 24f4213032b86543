"""Who may come in: requests with one of the API keys, and the web pages of the allowed origins (CORS)."""

import hmac
import re
from collections.abc import Collection, Sequence

from aiohttp import web

from config.api_keys import ApiKey

from .errors import ApiError
from .tenant import key_digest, presented_key, tenant_of_key

# What a web page may read of an answer besides its body.
EXPOSED_HEADERS = "x-request-id, request-id, Retry-After, x-tokenmill-ignored"
_PREFLIGHT_SECONDS = 600  # that a browser may keep the answer to a preflight
_HEADER_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~, \t-]{1,2048}")  # a list of RFC 9110's tokens


class Gate:
    """Checks keys and answers browsers. Without keys everybody may come in; without origins no foreign page may."""

    def __init__(self, keys: Sequence[ApiKey] = (), origins: Collection[str] = ()) -> None:
        self._keys = tuple(keys)
        self._any_origin = "*" in origins
        self._origins = frozenset(origin.lower().rstrip("/") for origin in origins)

    def admit(self, request: web.Request, *, needs_key: bool) -> str:
        """The tenant of a request; `ApiError` (401) when a key is needed and none of ours was presented."""
        presented = presented_key(request.headers)
        if not self._keys:
            return tenant_of_key(presented)
        tenant = self._tenant(presented)
        if tenant is None and needs_key:
            raise _unauthorized(presented)
        return tenant or ""

    def _tenant(self, presented: str) -> str | None:
        """Whose key this is. The time it takes tells nothing: all are compared, to the end, as digests."""
        digest = key_digest(presented)
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key.tenant
        return found

    def is_preflight(self, request: web.Request) -> bool:
        """A browser asks what it may send before it sends it; such a question carries no key."""
        headers = request.headers
        return (
            request.method == "OPTIONS"
            and bool(self._origins)
            and "Origin" in headers
            and "Access-Control-Request-Method" in headers
        )

    def preflight(self, request: web.Request) -> web.StreamResponse:
        """The answer to a preflight; `add_cors_headers` adds the rest. `ApiError` (403) for other origins.

        https://fetch.spec.whatwg.org/#http-cors-protocol
        """
        if not self._allows(request.headers["Origin"]):
            raise ApiError(403, "web pages of this origin may not use the API (see --cors-origin)")
        headers = {
            "Access-Control-Allow-Methods": "GET, POST, OPTIONS",
            "Access-Control-Max-Age": str(_PREFLIGHT_SECONDS),
        }
        # `*` would leave out Authorization.
        wanted = request.headers.get("Access-Control-Request-Headers", "")
        if _HEADER_NAMES.fullmatch(wanted):
            headers["Access-Control-Allow-Headers"] = wanted
        return web.Response(status=204, headers=headers)

    def add_cors_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """What lets the pages of an allowed origin read the response."""
        if not self._origins:
            return
        if not self._any_origin:
            response.headers["Vary"] = "Origin"
        origin = request.headers.get("Origin")
        if origin is not None and self._allows(origin):
            response.headers["Access-Control-Allow-Origin"] = "*" if self._any_origin else origin
            response.headers["Access-Control-Expose-Headers"] = EXPOSED_HEADERS

    def _allows(self, origin: str) -> bool:
        return self._any_origin or origin.lower() in self._origins


def _unauthorized(presented: str) -> ApiError:
    problem = "the API key is not one of this server's" if presented else "an API key is needed"
    return ApiError(
        401,
        f"{problem}: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
        type="authentication_error",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


GATE: web.AppKey[Gate] = web.AppKey("gate", Gate)
