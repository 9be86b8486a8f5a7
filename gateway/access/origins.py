"""Which host names a server answers to, and which web pages may use it (v0 §27).

A browser lends every page its network: a page of any site can send requests to a server on this machine or
in this network. With keys that does not matter, for a page has none. Without keys, two checks replace them:

- **Host.** The `Host` must be loopback, the address the server was bound to, or in `STREAMS_ALLOWED_HOSTS`. A
  page whose own name is made to point here (DNS rebinding) is of the same origin to its browser, and is known
  by the name alone.
- **Site.** `Sec-Fetch-Site`, which pages cannot change, must be `same-origin` or `none`, or the `Origin` must
  be allowed. Browsers leave `Sec-Fetch-Site` out towards plain-text addresses of other machines; there an
  `Origin` that is not the host's own is refused.

`STREAMS_CORS_ORIGINS` are the origins that may use the server, with and without keys: their preflights are
answered and they may read answers. Credentials are never allowed: keys are sent in a header.

Programs other than browsers send neither header. A request without `Host` (HTTP/1.0) is never a browser's.

Cost: three lookups in a dict for each request, under a microsecond.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from gateway.requests.request import Request, Response
from streams.config import host_name, is_loopback, items_of
from streams.protocol.errors import Forbidden
from streams.protocol.model.names import shown

#: Host headers that were found good are remembered as they were sent, up to so many.
_HOSTS_MAX = 256
_GOOD_SITES = frozenset(("same-origin", "none"))
_PREFLIGHT_S = b"600"
_METHODS = b"GET, HEAD, POST, PUT, DELETE"
_EXPOSED = b"retry-after, x-request-id"
_of_this_machine = re.compile(r"https?://(?:localhost|127\.\d+\.\d+\.\d+|\[::1\])(?::\d+)?").fullmatch


class Origins:
    def __init__(self, *, has_keys: bool, hosts: str = "", bound_to: str = "", origins: str = "") -> None:
        """`hosts` and `origins` are comma-separated; `bound_to` is the address of the listener."""
        self._has_keys = has_keys
        self._hosts = {host_name(host) for host in (*items_of(hosts), bound_to)}
        self._good_hosts: set[str] = set()
        self._origins = frozenset(items_of(origins))

    def __repr__(self) -> str:
        return f"<Origins {len(self._hosts)} hosts, {len(self._origins)} origins>"

    # -- checks

    def check_host(self, headers: Mapping[str, str]) -> None:
        """Raise `Forbidden` if the server has no keys and is asked by a name that is not its own."""
        host = headers.get("host")
        if host in self._good_hosts or self._has_keys or host is None:
            return
        name = host_name(host)
        if not (name in self._hosts or name.endswith(".localhost") or is_loopback(name)):
            raise Forbidden(
                f"host: {shown(host)} is not a name of this server, which has no keys; add it to "
                "STREAMS_ALLOWED_HOSTS",
                field="host",
            )
        if len(self._good_hosts) >= _HOSTS_MAX:
            self._good_hosts.clear()
        self._good_hosts.add(host)

    def check_site(self, headers: Mapping[str, str], *, is_local_enough: bool = False) -> None:
        """Raise `Forbidden` if the server has no keys and a page of an origin that is not allowed asks.

        `is_local_enough` allows pages that this machine serves on other ports.
        """
        site, origin = headers.get("sec-fetch-site"), headers.get("origin")
        if (site is None and origin is None) or self._has_keys or site in _GOOD_SITES:
            return
        if origin is not None and (
            origin in self._origins
            or (site is None and _is_of_host(origin, headers))
            or (is_local_enough and _of_this_machine(origin))
        ):
            return
        raise _refused(origin)

    def check_socket(self, headers: Mapping[str, str]) -> None:
        """Raise `Forbidden` if a WebSocket may not be opened. A browser asks nobody before it opens one to
        another site, so its origin is checked also where there are keys."""
        self.check_host(headers)
        self.check_site(headers)
        origin = headers.get("origin")
        if not (origin is None or origin in self._origins or _is_of_host(origin, headers)):
            raise _refused(origin)

    # -- CORS

    def allows(self, origin: str) -> bool:
        return origin in self._origins

    def allows_over_s2(self, origin: str) -> bool:
        """The S2 API is made for pages. A request proves itself by its key or token and never by a cookie, so
        where there are keys every page may use it; elsewhere those of this machine, and the allowed ones."""
        return self._has_keys or origin in self._origins or _of_this_machine(origin) is not None

    def preflight(self, request: Request) -> Response | None:
        """The answer to a CORS preflight of an allowed origin; None for every other request."""
        headers = request.headers
        if headers.get("origin") not in self._origins or "access-control-request-method" not in headers:
            return None
        response = Response(204)
        asked = headers.get("access-control-request-headers", "")
        response.headers += [
            (b"access-control-allow-methods", _METHODS),
            (b"access-control-allow-headers", asked.encode("latin-1")),
            (b"access-control-max-age", _PREFLIGHT_S),
        ]
        return response

    def let_read(self, request: Request, response: Response) -> None:
        """Let the page of an allowed origin read the response."""
        origin = request.headers.get("origin")
        if origin in self._origins:
            response.headers += [
                (b"access-control-allow-origin", origin.encode("latin-1")),
                (b"access-control-expose-headers", _EXPOSED),
                (b"vary", b"origin"),
            ]


def _is_of_host(origin: str, headers: Mapping[str, str]) -> bool:
    return origin.lower().partition("://")[2] == headers.get("host", "").lower()


def _refused(origin: str | None) -> Forbidden:
    named = "of another origin" if origin is None else f"of {shown(origin)}"
    return Forbidden(
        f"origin: a page {named} may not use this server; add its origin to STREAMS_CORS_ORIGINS",
        field="origin",
    )
