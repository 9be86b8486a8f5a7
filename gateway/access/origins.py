"""Checks the host name of requests and the origin of web pages (v0 §27).

A page of any site can make its browser send requests to a server on this machine or network. A server with
keys is safe: the page has no key. A server without keys makes two checks:

- **Host.** The `Host` must be loopback, the address the server is bound to, or in `STREAMS_ALLOWED_HOSTS`.
  This stops DNS rebinding: if the host name of a page resolves to this server, the browser treats the page
  as same-origin, and only the name reveals it.
- **Site.** `Sec-Fetch-Site`, which pages cannot change, must be `same-origin` or `none`, or the `Origin` must
  be allowed. Browsers omit `Sec-Fetch-Site` for plain HTTP to other machines; then the `Origin` must be
  the host's own.

`STREAMS_CORS_ORIGINS` lists the origins that may use the server, with and without keys: the server answers
their preflights, and they may read responses. Credentials are never allowed: keys are sent in a header.

Other programs send neither header. Browsers always send `Host`, so a request without it (HTTP/1.0) passes.

Cost: three dict lookups per request, under a microsecond.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from gateway.requests.request import Request, Response
from streams.config import host_name, is_loopback, items_of
from streams.protocol.errors import Forbidden
from streams.protocol.model.names import quote

#: Size of the cache of accepted `Host` headers.
_HOSTS_MAX = 256
_ALLOWED_SITES = frozenset(("same-origin", "none"))
_PREFLIGHT_S = b"600"
_METHODS = b"GET, HEAD, POST, PUT, DELETE"
_EXPOSED = b"retry-after, x-request-id"
_match_loopback_origin = re.compile(r"https?://(?:localhost|127\.\d+\.\d+\.\d+|\[::1\])(?::\d+)?").fullmatch


class Origins:
    def __init__(self, *, has_keys: bool, hosts: str = "", bound_to: str = "", origins: str = "") -> None:
        """`hosts` and `origins` are comma-separated; `bound_to` is the address of the listener."""
        self._has_keys = has_keys
        self._hosts = {host_name(host) for host in (*items_of(hosts), bound_to)}
        self._accepted_hosts: set[str] = set()
        self._origins = frozenset(items_of(origins))

    def __repr__(self) -> str:
        return f"<Origins {len(self._hosts)} hosts, {len(self._origins)} origins>"

    # -- checks

    def check_host(self, headers: Mapping[str, str]) -> None:
        """Raise `Forbidden` if the server has no keys and the `Host` is not one of its names."""
        host = headers.get("host")
        if host in self._accepted_hosts or self._has_keys or host is None:
            return
        name = host_name(host)
        if not (name in self._hosts or name.endswith(".localhost") or is_loopback(name)):
            raise Forbidden(
                f"host: {quote(host)} is not a name of this server, and the server has no keys; add it to "
                "STREAMS_ALLOWED_HOSTS",
                field="host",
            )
        if len(self._accepted_hosts) >= _HOSTS_MAX:
            self._accepted_hosts.clear()
        self._accepted_hosts.add(host)

    def check_site(self, headers: Mapping[str, str], *, allow_loopback: bool = False) -> None:
        """Raise `Forbidden` if the server has no keys and the request comes from a page of a foreign origin.

        `allow_loopback` allows pages that this machine serves on other ports.
        """
        site, origin = headers.get("sec-fetch-site"), headers.get("origin")
        if (site is None and origin is None) or self._has_keys or site in _ALLOWED_SITES:
            return
        if origin is not None and (
            origin in self._origins
            or (site is None and _is_same_origin(origin, headers))
            or (allow_loopback and _match_loopback_origin(origin))
        ):
            return
        raise _forbidden_origin(origin)

    def check_socket(self, headers: Mapping[str, str]) -> None:
        """Raise `Forbidden` if a page of this origin may not open a WebSocket.

        Browsers send no preflight for WebSockets, so the origin is checked on servers with keys too.
        """
        self.check_host(headers)
        self.check_site(headers)
        origin = headers.get("origin")
        if not (origin is None or origin in self._origins or _is_same_origin(origin, headers)):
            raise _forbidden_origin(origin)

    # -- CORS

    def allows(self, origin: str) -> bool:
        return origin in self._origins

    def allows_over_s2(self, origin: str) -> bool:
        """Return True if pages of this origin may use the S2 API.

        S2 is made for web pages and authenticates by key or token, never by cookie. So a server with keys
        allows every page, and a server without keys allows pages of this machine and allowed origins.
        """
        return self._has_keys or origin in self._origins or _match_loopback_origin(origin) is not None

    def preflight(self, request: Request) -> Response | None:
        """Return the response to a CORS preflight of an allowed origin; None for every other request."""
        headers = request.headers
        if headers.get("origin") not in self._origins or "access-control-request-method" not in headers:
            return None
        response = Response(204)
        request_headers = headers.get("access-control-request-headers", "")
        response.headers += [
            (b"access-control-allow-methods", _METHODS),
            (b"access-control-allow-headers", request_headers.encode("latin-1")),
            (b"access-control-max-age", _PREFLIGHT_S),
        ]
        return response

    def add_cors_headers(self, request: Request, response: Response) -> None:
        """Let the page of an allowed origin read the response."""
        origin = request.headers.get("origin")
        if origin in self._origins:
            response.headers += [
                (b"access-control-allow-origin", origin.encode("latin-1")),
                (b"access-control-expose-headers", _EXPOSED),
                (b"vary", b"origin"),
            ]


def _is_same_origin(origin: str, headers: Mapping[str, str]) -> bool:
    return origin.lower().partition("://")[2] == headers.get("host", "").lower()


def _forbidden_origin(origin: str | None) -> Forbidden:
    page = "of another origin" if origin is None else f"of {quote(origin)}"
    return Forbidden(
        f"origin: a page {page} may not use this server; add its origin to STREAMS_CORS_ORIGINS",
        field="origin",
    )
