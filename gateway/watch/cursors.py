"""The text of a cursor over many boxes: base64url of a JSON map, box -> seq (v0 §7.2). Pure.

A seq alone does not identify the generation of its box: a box that was deleted and created again may have
grown past it. So the low bits of the box's generation follow each seq, written in the four characters that
JSON calls white space, two bits each:

    {"orders":4711·········,"users":12·········}        · is one of space, tab, line feed, carriage return

Any JSON parser sees the plain map. A cursor that a client decoded and encoded again has lost the bits; its
seqs then count for the current generation."""

from __future__ import annotations

import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import orjson

from gateway.watch.page import Place
from streams.protocol.errors import InvalidRequest
from streams.protocol.model.names import quote
from streams.protocol.payloads.appends import SEQ_MAX

#: Two bits each: 24 bits. A generation is a time in milliseconds, or slightly larger: two generations of a
#: box have the same bits only if they began a multiple of 4.66 hours apart to the millisecond.
_GENERATION_CHARS = 12
_SYMBOLS = b" \t\n\r"
#: 256 names of 255 bytes, their seqs and generations, and base64 on top: no cursor of ours is longer.
_TEXT_BYTES_MAX = 256 * 1024

_entries = re.compile(rb'"([^"\\]+)":([0-9]+)([ \t\n\r]*)[,}]').findall


class CursorEntry(NamedTuple):
    """A client's position in one box. Without `generation_text`, it counts for any generation of the box."""

    seq: int
    generation_text: bytes = b""

    def is_of(self, generation: int | None) -> bool:
        return (
            not self.generation_text
            or generation is None
            or self.generation_text == _generation_text(generation)
        )


Cursor = dict[str, CursorEntry]


@lru_cache(maxsize=65_536)
def _generation_text(generation: int) -> bytes:
    return bytes(_SYMBOLS[generation >> 2 * at & 3] for at in range(_GENERATION_CHARS))


def encode(places: Iterable[tuple[str, Place]]) -> bytes:
    """Return the text of a cursor. Box names need no escaping: `protocol/model/names.py` ensures that."""
    entries = [
        b'"%b":%d%b'
        % (box.encode(), place.seq, b"" if place.generation is None else _generation_text(place.generation))
        for box, place in places
    ]
    return urlsafe_b64encode(b"{%b}" % b",".join(entries)).rstrip(b"=")


def decode_untrusted(text: str, field: str) -> Cursor:
    """Parse the text of a cursor. Raises only `InvalidRequest`."""
    try:
        if len(text) > _TEXT_BYTES_MAX:
            raise ValueError
        raw = urlsafe_b64decode(text.encode("ascii") + b"=" * (-len(text) % 4))
        seqs = _check_seqs(orjson.loads(raw))
    except ValueError:  # of ASCII, of base64, of JSON and of the map
        raise InvalidRequest(
            f"{field}: {quote(text)} is not a cursor this server gave", field=field
        ) from None
    texts = {box.decode(): text for box, _, text in _entries(raw) if len(text) == _GENERATION_CHARS}
    return {box: CursorEntry(seq, texts.get(box, b"")) for box, seq in seqs.items()}


def from_map(seqs: dict[str, int], field: str) -> Cursor:
    try:
        return {box: CursorEntry(seq) for box, seq in _check_seqs(seqs).items()}
    except ValueError:
        raise InvalidRequest(f"{field}: must map boxes to seqs", field=field) from None


def _check_seqs(seqs: object) -> dict[str, int]:
    if not isinstance(seqs, dict):
        raise ValueError
    for seq in seqs.values():
        if type(seq) is not int or not 0 <= seq <= SEQ_MAX:
            raise ValueError
    return seqs
