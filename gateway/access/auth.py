"""Authenticates requests: finds the key of a request in the key ring (v0 §11). Never logs a key.

A gateway without keys has no `Guard`: requests then cost one check for None.
"""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote_plus

from gateway.access.rules import Rule
from gateway.admission.limits import InFlight
from gateway.requests.request import Request
from streams.protocol.access.keys import Key, KeyRing, bearer_of
from streams.protocol.access.rates import RequestRates
from streams.protocol.errors import InvalidRequest, Unauthorized

_token = re.compile(r"(?:^|&)token=([^&]*)")
_HINT = "send Authorization: Bearer KEY"


class Guard:
    def __init__(
        self,
        ring: KeyRing,
        *,
        probe_auth: bool = False,
        in_flight_per_key_max: int = 0,
        rates: RequestRates | None = None,
    ) -> None:
        self.ring = ring
        self.in_flight = InFlight(in_flight_per_key_max, rates)
        self._probe_auth = probe_auth

    def __repr__(self) -> str:
        return f"<Guard with {self.ring!r}>"

    def is_open(self, rule: Rule) -> bool:
        return rule.is_open or (rule.is_probe and not self._probe_auth)

    def admit(self, headers: dict[str, str], query: str = "") -> Key:
        """Return the key of a request. `query` is set for event streams, which may carry the key in it."""
        secret = bearer_of(headers.get("authorization"))
        if secret is None and query:
            match = _token.search(query)
            secret = unquote_plus(match[1]) if match else None
        if secret is None:
            raise Unauthorized(f"authorization: the request has no key; {_HINT}")
        key = self.ring.find(secret)
        if key is None:
            raise Unauthorized("authorization: this server does not have this key")
        return key

    def identify(self, request: Request, *, takes_token: bool) -> Key:
        """Return the key of a request to any route, and remove the key from its query.

        Only routes with `takes_token` accept a key in the query.
        """
        key = self.admit(request.headers, request.query if takes_token else "")
        if takes_token:
            request.query = without_token(request.query)
        elif "token=" in request.query and _token.search(request.query):
            raise InvalidRequest(
                f"token: only event streams accept a key in the query; {_HINT}", field="token"
            )
        return key


def without_token(query: str) -> str:
    """Return the query without the key, so that handlers, responses and errors never contain it."""
    return _token.sub("", query).lstrip("&") if "token=" in query else query


def read_ring(path: str) -> KeyRing:
    """Read the key ring that the supervisor wrote for its child processes: digests, no secrets."""
    return KeyRing.from_json(Path(path).read_bytes())
