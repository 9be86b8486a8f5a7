"""Checks the content type of bodies, decompresses requests and compresses responses (v0 §0.2).

Limits: a body is decompressed in steps. Each step is charged to the budget of bodies before it runs, and
decompression stops one byte after the limit, whatever size the body claims. Work on more than
`_THREAD_BYTES` runs in one of `_THREADS_MAX` threads, so large bodies do not block the event loop: a thread
writes into mapped memory, and the event loop copies none of it.
"""

from __future__ import annotations

import mmap
import zlib
from collections.abc import Callable
from typing import Protocol

import trio
import zstandard

from gateway.admission.inline import need_task
from gateway.requests.request import Buffer, Request, Response
from streams.protocol.errors import InvalidRequest, PayloadTooLarge, UnsupportedMediaType
from streams.protocol.model.names import quote

_JSON = "application/json"
_FORM = "application/x-www-form-urlencoded"
NDJSON = "application/x-ndjson"

#: Limit for bodies that the gateway parses itself. Parsing 64 MiB would block the event loop for half a
#: second and take ten times as much memory. The largest useful body, a watch of 256 boxes, is a tenth of
#: this.
CONTROL_BYTES_MAX = 1024 * 1024

_COMPRESS_BYTES_MIN = 1024
_THREAD_BYTES = 64 * 1024
#: Compression saturates a core, so more threads would not help.
_THREADS_MAX = 2
_threads = trio.CapacityLimiter(_THREADS_MAX)
#: The first step runs on the event loop. Each further step doubles the output, up to this many bytes.
_STEP_BYTES_MAX = 4 * 1024 * 1024
#: Output of zlib is copied in pieces of this size: a copy holds the GIL for 20 µs.
_COPY_BYTES = 128 * 1024
#: Input per call of zlib, which copies its unused input.
_GZIP_INPUT_BYTES = 64 * 1024
#: zstd windows up to 8 MiB, the size that its format requires every decoder to support.
_ZSTD_WINDOW_MAX = 8 * 1024 * 1024


def check_content_type(request: Request, *, allow_ndjson: bool) -> bool:
    """Check the content type of a body. Return True for NDJSON, False for JSON or no body."""
    if not request.body:
        return False
    headers = request.headers
    content_type = headers.get("content-type")
    if content_type == _JSON:
        return False
    if content_type is None:
        raise UnsupportedMediaType(f"content-type: is missing; send {_JSON}", field="content-type")
    kind = content_type.partition(";")[0].strip().lower()
    if kind == _JSON or (kind.startswith("application/") and kind.endswith("+json")):
        return False
    if kind == _FORM and "origin" not in headers and "sec-fetch-site" not in headers:
        return False  # sent by `curl -d`; a browser's form always has one of these two headers
    if kind == NDJSON and allow_ndjson:
        return True
    raise UnsupportedMediaType(
        f"content-type: {quote(content_type)} is not accepted here; send {_JSON}", field="content-type"
    )


async def decompress_body(request: Request, bytes_max: int) -> Buffer:
    """Return the body of a request, decompressed according to its `Content-Encoding`."""
    encoding = request.headers.get("content-encoding")
    if encoding is None or not request.body:
        return request.body
    name = encoding.strip().lower()
    if name == "identity":
        return request.body
    decoder = _DECODERS.get(name)
    if decoder is None:
        raise UnsupportedMediaType(
            f"content-encoding: {quote(encoding)} is not supported; send gzip, zstd or none",
            field="content-encoding",
        )
    return await _decompress_in_steps(decoder(request.body), request, bytes_max)


async def control_body(request: Request, bytes_max: int) -> bytes:
    """Return the decompressed body of a request that the gateway parses itself."""
    bytes_max = min(bytes_max, CONTROL_BYTES_MAX)
    body = await decompress_body(request, bytes_max)
    if len(body) > bytes_max:
        raise PayloadTooLarge(
            f"body: has more than {bytes_max} bytes, the limit of this route", limit_bytes=bytes_max
        )
    return bytes(body)


class _Decoder(Protocol):
    """Decompresses one body."""

    #: Memory that the decoder may use beside its output, in bytes.
    window_bytes_max: int

    def read(self, size: int) -> bytes:
        """Return the next `size` bytes; fewer only at the end. Raises `InvalidRequest`."""

    def read_into(self, space: memoryview) -> int:
        """Fill `space` and return the number of bytes; fewer than fit only at the end. Raises as `read`."""


async def _decompress_in_steps(decoder: _Decoder, request: Request, bytes_max: int) -> Buffer:
    charge = request.open_charge()
    compressed_bytes = 0 if charge is None else charge.size

    def charge_for(size: int) -> int:
        # The decoder's window is never larger than its output.
        if charge is not None:
            charge.grow(compressed_bytes + size + min(size, decoder.window_bytes_max) - charge.size)
        return size

    capacity = charge_for(min(_THREAD_BYTES, bytes_max + 1))
    plain: Buffer = decoder.read(capacity)
    have = len(plain)
    if have == capacity <= bytes_max:
        memory = mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory[:] = plain
        await need_task()
        while have == capacity <= bytes_max:
            capacity = charge_for(min(have + min(have, _STEP_BYTES_MAX), bytes_max + 1))
            memory.resize(capacity)  # the kernel remaps it without a copy
            with memoryview(memory) as whole, whole[have:] as space:
                have += await trio.to_thread.run_sync(decoder.read_into, space, limiter=_threads)
        memory.resize(have)
        plain = memoryview(memory)
    if have > bytes_max:
        raise PayloadTooLarge(f"body: has more than {bytes_max} bytes when decompressed", limit=bytes_max)
    if charge is not None:
        charge.shrink_to(compressed_bytes + have)
    return plain


class _GzipDecoder:
    window_bytes_max = 64 * 1024

    def __init__(self, body: Buffer) -> None:
        self._body = memoryview(body)
        self._at = 0
        self._decoder = zlib.decompressobj(wbits=31)

    def read(self, size: int) -> bytes:
        decoder, pieces = self._decoder, []
        try:
            while size and not decoder.eof:
                data: Buffer = decoder.unconsumed_tail
                if not data:
                    data = self._body[self._at : self._at + _GZIP_INPUT_BYTES]
                    self._at += len(data)
                piece = decoder.decompress(data, size)
                if not piece and not data:
                    break
                pieces.append(piece)
                size -= len(piece)
        except zlib.error as error:
            raise InvalidRequest(f"body: not valid gzip: {error}") from None
        if size and (not decoder.eof or decoder.unused_data or self._at < len(self._body)):
            raise InvalidRequest("body: not one complete gzip member")
        return b"".join(pieces)

    def read_into(self, space: memoryview) -> int:
        have = 0
        while have < len(space):
            size = min(_COPY_BYTES, len(space) - have)
            piece = self.read(size)
            space[have : have + len(piece)] = piece
            have += len(piece)
            if len(piece) < size:
                break
        return have


class _ZstdDecoder:
    window_bytes_max = _ZSTD_WINDOW_MAX

    def __init__(self, body: Buffer) -> None:
        decoder = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_MAX)
        self._reader = decoder.stream_reader(body, read_across_frames=True)
        self._has_read = False

    def read(self, size: int) -> bytes:
        try:
            piece = self._reader.read(size)
        except zstandard.ZstdError as error:
            raise InvalidRequest(f"body: not valid zstd: {error}") from None
        if not piece and not self._has_read:
            raise InvalidRequest("body: not valid zstd")
        self._has_read = True
        return piece

    def read_into(self, space: memoryview) -> int:
        """Decode directly into `space`, without the GIL."""
        have = 0
        try:
            while have < len(space):
                count = self._reader.readinto(space[have:])
                if not count:
                    break
                have += count
        except zstandard.ZstdError as error:
            raise InvalidRequest(f"body: not valid zstd: {error}") from None
        return have


_DECODERS: dict[str, Callable[[Buffer], _Decoder]] = {
    "gzip": _GzipDecoder,
    "x-gzip": _GzipDecoder,
    "zstd": _ZstdDecoder,
}


async def compress(request: Request, response: Response) -> None:
    """Compress a response in place if the client accepts it and the response is large enough."""
    accept_encoding = request.headers.get("accept-encoding")
    if accept_encoding is None or response.is_streamed:
        return
    size = sum(map(len, response.parts))
    if size < _COMPRESS_BYTES_MIN:
        return
    encoding = _choose_encoding(accept_encoding)
    if encoding is None:
        return
    encode = _gzip if encoding == b"gzip" else _zstd
    if size > _THREAD_BYTES:
        await need_task()
        body = await trio.to_thread.run_sync(encode, response.parts, limiter=_threads)
    else:
        body = encode(response.parts)
    response.parts = [body]
    if response.charge is not None:
        response.charge.shrink_to(len(body))
    response.headers.append((b"content-encoding", encoding))
    response.headers.append((b"vary", b"accept-encoding"))


def _choose_encoding(accept_encoding: str) -> bytes | None:
    weights: dict[str, float] = {}
    for item in accept_encoding.lower().split(","):
        name, _, parameters = item.partition(";")
        weight = 1.0
        key, _, value = parameters.strip().partition("=")
        if key.strip() == "q":
            try:
                weight = float(value)
            except ValueError:
                weight = 0.0
        weights[name.strip()] = weight
    anything = weights.get("*", 0.0)
    candidates = [(weights.get(name, anything), name) for name in ("gzip", "zstd")]
    weight, name = max(candidates)  # zstd on a tie: better and faster
    return name.encode() if weight > 0 else None


def _gzip(parts: list[Buffer]) -> bytes:
    encoder = zlib.compressobj(level=1, wbits=31)
    return b"".join([encoder.compress(part) for part in parts]) + encoder.flush()


def _zstd(parts: list[Buffer]) -> bytes:
    encoder = zstandard.ZstdCompressor(level=1).compressobj(size=sum(map(len, parts)))
    return b"".join([encoder.compress(part) for part in parts]) + encoder.flush()
