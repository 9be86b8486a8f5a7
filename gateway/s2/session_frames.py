"""Encodes and decodes the frames of s2s sessions (s2 §13). Pure.

[3 bytes length = 1 + body] [flags] [body]
flags: bit 7 terminal · bits 6-5 compression (0 none, 1 zstd, 2 gzip) · bit 4 reconnecting is advised
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import zstandard

from gateway.requests.request import Buffer
from gateway.requests.s2_errors import S2Error

LENGTH_MAX = 2 * 1024 * 1024
_PLAIN_MAX = LENGTH_MAX - 1
_COMPRESS_BYTES_MIN = 1024
_HEAD_BYTES = 4

NONE, ZSTD, GZIP = 0, 1, 2
_TERMINAL, _RECONNECT = 0x80, 0x10


def codec_for(accept_encoding: str | None) -> int:
    """Return the codec for the frames of a response, by the client's `Accept-Encoding`."""
    names = [item.partition(";")[0].strip() for item in (accept_encoding or "").lower().split(",")]
    return ZSTD if "zstd" in names else GZIP if "gzip" in names else NONE


def frame(*parts: Buffer, codec: int = NONE, advises_reconnect: bool = False) -> bytes:
    """Encode a frame whose body is the concatenation of `parts`. Uncompressed parts are copied once."""
    size = sum(map(len, parts))
    if codec == NONE or size < _COMPRESS_BYTES_MIN:
        codec = NONE
    else:
        body = b"".join(parts)
        if codec == ZSTD:
            body = zstandard.ZstdCompressor(level=1).compress(body)
        else:
            encoder = zlib.compressobj(level=1, wbits=31)
            body = encoder.compress(body) + encoder.flush()
        parts, size = (body,), len(body)
    flags = codec << 5 | (_RECONNECT if advises_reconnect else 0)
    return b"".join(((1 + size).to_bytes(3, "big"), bytes((flags,)), *parts))


def terminal(error: S2Error) -> bytes:
    """Encode the last frame of a failed session: status and error body."""
    body = error.status.to_bytes(2, "big") + error.body
    return (1 + len(body)).to_bytes(3, "big") + bytes([_TERMINAL]) + body


class FrameReceiver:
    """Decodes a byte stream into frame bodies. Buffers at most one partial frame and one read."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def __repr__(self) -> str:
        return f"<Receiver {len(self._buffer)} B>"

    def __len__(self) -> int:
        """Return the number of buffered bytes of a partial frame."""
        return len(self._buffer)

    def feed_untrusted(self, data: bytes) -> Iterator[bytes]:
        """Yield the bodies of complete frames; bodies before a bad frame are valid.

        The caller must exhaust the iterator before the next call.
        """
        buffer = self._buffer
        buffer += data
        at = 0
        while len(buffer) - at >= _HEAD_BYTES:
            length = buffer[at] << 16 | buffer[at + 1] << 8 | buffer[at + 2]
            if not 0 < length <= LENGTH_MAX:
                raise _bad(f"a frame has a length of {length} bytes; the limit is {LENGTH_MAX}")
            if len(buffer) - at < 3 + length:
                break
            with memoryview(buffer) as view:
                body = view[at + _HEAD_BYTES : at + 3 + length].tobytes()
            yield _plain(buffer[at + 3], body)
            at += 3 + length
        del buffer[:at]

    def end_untrusted(self) -> None:
        """Raise `bad_frame` if the input ended in the middle of a frame."""
        if self._buffer:
            raise _bad("the session ended in the middle of a frame")


def _plain(flags: int, body: bytes) -> bytes:
    if flags & _TERMINAL:
        raise _bad("a client must end a session by closing it, not with a terminal frame")
    codec = flags >> 5 & 3
    if codec == NONE:
        return body
    try:
        if codec == ZSTD:
            with zstandard.ZstdDecompressor(max_window_size=8 << 20).stream_reader(body) as reader:
                plain = reader.read(_PLAIN_MAX + 1)
        elif codec == GZIP:
            decoder = zlib.decompressobj(wbits=31)
            plain = decoder.decompress(body, _PLAIN_MAX + 1)
            if not decoder.eof and len(plain) <= _PLAIN_MAX:
                raise _bad("a frame is not one complete gzip member")
        else:
            raise _bad("a frame has an unknown compression")
    except (zlib.error, zstandard.ZstdError) as error:
        raise _bad(f"a frame cannot be decompressed: {error}") from None
    if len(plain) > _PLAIN_MAX:
        raise _bad(f"a frame has more than {_PLAIN_MAX} bytes when decompressed")
    return plain


def _bad(message: str) -> S2Error:
    return S2Error("bad_frame", message)
