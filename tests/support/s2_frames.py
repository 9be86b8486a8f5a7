"""Frames of S2 sessions as tests build and read them."""

from __future__ import annotations

import json

from gateway.s2 import session_frames
from streams.protocol.model import binary_records


def given(*bodies: bytes, match: int | None = None) -> bytes:
    """A frame with a batch."""
    data = b""
    for body in bodies:
        record = b"\x1a%b%b" % (binary_records.varint(len(body)), body)
        data += b"\x0a%b%b" % (binary_records.varint(len(record)), record)
    if match is not None:
        data += b"\x10" + binary_records.varint(match)
    return session_frames.frame(data)


class Frames:
    """What a session has said so far."""

    def __init__(self, data: bytes) -> None:
        self.regular: list[bytes] = []
        self.advised = False
        self.terminal: tuple[int, dict[str, object]] | None = None
        while len(data) >= 4:
            length = int.from_bytes(data[:3], "big")
            if len(data) < 3 + length:
                break
            flags, body, data = data[3], data[4 : 3 + length], data[3 + length :]
            if flags & 0x80:
                self.terminal = (int.from_bytes(body[:2], "big"), json.loads(body[2:]))
            else:
                self.regular.append(body)
                self.advised = self.advised or bool(flags & 0x10)
