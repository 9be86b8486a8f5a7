"""Serves the console at `/` and the API explorer at `/docs`: static files that use only the public API (§13).

Anyone may load them: they contain no data of the server and prompt for a key if the server
requires one. They load nothing from other hosts, no other page may frame them, and record contents are never
rendered as markup.
"""

from __future__ import annotations

import hashlib
from importlib.resources import files
from typing import Final, NamedTuple

from gateway.requests.request import Request, Response
from streams.protocol.messages.query import Query

_FOLDER: Final = files("gateway") / "console"
_KINDS: Final = {
    "html": b"text/html; charset=utf-8",
    "css": b"text/css; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "txt": b"text/plain; charset=utf-8",
}
#: Address -> file under `gateway/console`. Pages have addresses of their own.
_PAGES: Final = {"/": "index.html", "/docs": "docs.html"}
FILES: Final[dict[str, str]] = _PAGES | {
    f"/console/{each.name}": each.name
    for each in sorted(_FOLDER.iterdir(), key=lambda each: each.name)
    if each.name not in _PAGES.values()
}

_HEADERS: Final = (
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'",
    ),
    (b"referrer-policy", b"no-referrer"),
    # Browsers revalidate on every load, so a page never runs with the script of another version.
    (b"cache-control", b"no-cache"),
)


class _File(NamedTuple):
    text: bytes
    kind: bytes
    tag: str


class Console:
    def __init__(self) -> None:
        self._files: dict[str, _File] = {}
        for path, name in FILES.items():
            text = (_FOLDER / name).read_bytes()
            kind = _KINDS[name.rpartition(".")[2]]
            self._files[path] = _File(text, kind, f'W/"{hashlib.sha256(text).hexdigest()[:32]}"')

    async def file(self, request: Request) -> Response:
        Query(request.query).reject_unknown()
        file = self._files[request.path]
        cached_tags = request.headers.get("if-none-match", "")
        is_cached = file.tag in [tag.strip() for tag in cached_tags.split(",")]
        response = Response(
            304 if is_cached else 200, *([] if is_cached else [file.text]), content_type=file.kind
        )
        response.headers += [*_HEADERS, (b"etag", file.tag.encode())]
        return response
