"""Serves the documentation site at `/docs/guide/`, from the archive that `STREAMS_GUIDE` names.

Anyone may load it: it contains no data of the server. Its scripts and styles are files of the archive;
nothing inline and nothing of other hosts runs.
"""

from __future__ import annotations

from typing import Final

import structlog
import trio

from gateway.requests.guide_archive import BadGuide, GuideArchive
from gateway.requests.request import Request, Response
from streams.protocol.errors import NotFound

log = structlog.get_logger("gateway.guide")

PREFIX: Final = "/docs/guide/"
_HEADERS: Final = (
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        b"base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    ),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
)


class Guide:
    def __init__(self, path: str) -> None:
        self._archive: GuideArchive | None = None
        self._problem = (
            "this server has no guide; build it with `make site` and set STREAMS_GUIDE to the archive"
        )
        if not path:
            return
        try:
            self._archive = GuideArchive(path)
        except BadGuide as error:  # the supervisor has checked it: somebody changed it since
            self._problem = str(error)
            log.warning("guide not served", reason=str(error))

    async def redirect(self, request: Request) -> Response:
        """Answer the address without its last slash, from which relative links would lead elsewhere."""
        response = Response(308, content_type=b"text/plain; charset=utf-8")
        response.headers.append((b"location", PREFIX.encode()))
        return response

    async def file(self, request: Request, name: str = "") -> Response:
        archive = self._archive
        if archive is None:
            raise NotFound(self._problem)
        page = archive.find(name)
        if page is None:
            raise NotFound(f"the guide has no page at {PREFIX}{name}"[:300])
        tag = archive.tag(page)
        tags = [each.strip() for each in request.headers.get("if-none-match", "").split(",")]
        if tag in tags:
            response = Response(304, content_type=archive.kind(page))
        else:
            response = Response(200, await self._content(archive, page), content_type=archive.kind(page))
        response.headers += [*_HEADERS, (b"etag", tag.encode())]
        return response

    @staticmethod
    async def _content(archive: GuideArchive, name: str) -> bytes:
        content = archive.content(name)
        if content is None:
            try:
                content = await trio.to_thread.run_sync(archive.read, name)
            except BadGuide as error:
                log.warning("guide page not read", reason=str(error))
                raise NotFound(str(error)) from None
        return content
