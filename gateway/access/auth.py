"""Who asks: the key in a request, found in the ring (v0 §11). Never sees a record, and never logs a key.

A gateway without keys has no `Guard` at all; that one test is all that being open costs.
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
_ASK = "send Authorization: Bearer and a key"


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
        """Whose request this is. `query` is that of an event stream, which may carry the key."""
        secret = bearer_of(headers.get("authorization"))
        if secret is None and query:
            found = _token.search(query)
            secret = unquote_plus(found[1]) if found else None
        if secret is None:
            raise Unauthorized(f"authorization: there is no key in this request; {_ASK}")
        key = self.ring.find(secret)
        if key is None:
            raise Unauthorized("authorization: this key is not known here")
        return key

    def identify(self, request: Request, *, takes_token: bool) -> Key:
        key = self.admit(request.headers, request.query if takes_token else "")
        if takes_token:
            request.query = without_token(request.query)
        elif "token=" in request.query and _token.search(request.query):
            raise InvalidRequest(f"token: is taken by event streams only; {_ASK}", field="token")
        return key


def without_token(query: str) -> str:
    """What a stream's own code, its answers and its errors get to see of the query."""
    return _token.sub("", query).lstrip("&") if "token=" in query else query


def read_ring(path: str) -> KeyRing:
    """The keys that the supervisor has put there for its children: digests, no secrets."""
    return KeyRing.from_json(Path(path).read_bytes())
