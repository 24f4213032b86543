"""The console's files, kept in memory: one page, its styles, its scripts."""

import hashlib
from pathlib import Path

from aiohttp import web

from ..errors import ApiError

_FOLDER = Path(__file__).parent / "static"
_INDEX = "index.html"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Nothing from elsewhere, nothing inline, no markup made from strings; nobody may put the page into a frame.
_POLICY = (
    "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",  # kept, but asked for each time: an update shows at once, and costs nothing else
}


class Pages:
    """Serves the files as they were when this process started."""

    def __init__(self) -> None:
        self._files: dict[str, tuple[bytes, dict[str, str]]] = {}
        for path in _FOLDER.iterdir():
            if path.suffix in _TYPES:
                data = path.read_bytes()
                etag = f'"{hashlib.sha256(data).hexdigest()[:24]}"'
                self._files[path.name] = data, {**_HEADERS, "Content-Type": _TYPES[path.suffix], "ETag": etag}

    async def index(self, request: web.Request) -> web.StreamResponse:
        """GET /: the page."""
        return self._answer(request, _INDEX)

    async def file(self, request: web.Request) -> web.StreamResponse:
        """GET /console/static/{name}"""
        name = request.match_info["name"]
        if name not in self._files:
            raise ApiError(404, f"there is no {request.path[:200]} here", code="not_found")
        return self._answer(request, name)

    def _answer(self, request: web.Request, name: str) -> web.Response:
        data, headers = self._files[name]
        known = request.if_none_match
        if known and any(tag.value == "*" or f'"{tag.value}"' == headers["ETag"] for tag in known):
            return web.Response(status=304, headers={key: headers[key] for key in ("ETag", "Cache-Control")})
        return web.Response(body=data, headers=headers)
