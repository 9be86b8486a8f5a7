"""Bodies as they travel: which types are read, and how they are compressed and uncompressed (v0-api §0.2).

Bounds: a body is uncompressed up to the limit and not a byte further, whatever it claims. Work on more than
`_THREAD_BYTES` runs in a thread, so that one large body does not hold up the others.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import trio
import zstandard

from gateway.http import Buffer, Request, Response
from streams.protocol.errors import InvalidRequest, PayloadTooLarge, UnsupportedMediaType
from streams.protocol.names import shown

_JSON = "application/json"
_FORM = "application/x-www-form-urlencoded"
NDJSON = "application/x-ndjson"

_COMPRESS_BYTES_MIN = 1024
_THREAD_BYTES = 64 * 1024
#: Windows of zstd up to 8 MiB, what its format asks every decoder to support.
_ZSTD_WINDOW_MAX = 8 * 1024 * 1024


def is_ndjson(request: Request, *, allowed: bool) -> bool:
    """Checks the type of a request's body. Whether it is lines of JSON and not one JSON value."""
    if not request.body:
        return False
    headers = request.headers
    given = headers.get("content-type")
    if given == _JSON:
        return False
    if given is None:
        raise UnsupportedMediaType(f"content-type: is missing; send {_JSON}", field="content-type")
    kind = given.partition(";")[0].strip().lower()
    if kind == _JSON or (kind.startswith("application/") and kind.endswith("+json")):
        return False
    if kind == _FORM and "origin" not in headers and "sec-fetch-site" not in headers:
        return False  # what `curl -d` sends; a browser's form always carries one of the two
    if kind == NDJSON and allowed:
        return True
    raise UnsupportedMediaType(
        f"content-type: {shown(given)} is not read here; send {_JSON}", field="content-type"
    )


async def uncompressed(request: Request, bytes_max: int) -> Buffer:
    """The body without its `Content-Encoding`."""
    encoding = request.headers.get("content-encoding")
    if encoding is None or not request.body:
        return request.body
    decode = _DECODERS.get(encoding.strip().lower())
    if decode is None:
        raise UnsupportedMediaType(
            f"content-encoding: {shown(encoding)} is not read here; send gzip, zstd or none",
            field="content-encoding",
        )
    return await trio.to_thread.run_sync(decode, bytes(request.body), bytes_max)


def _gunzip(body: bytes, bytes_max: int) -> bytes:
    decoder = zlib.decompressobj(wbits=31)
    try:
        plain = decoder.decompress(body, bytes_max + 1)
    except zlib.error as error:
        raise InvalidRequest(f"body: not valid gzip: {error}") from None
    if len(plain) > bytes_max:
        raise _too_large(bytes_max)
    if not decoder.eof or decoder.unused_data:
        raise InvalidRequest("body: not one whole gzip member")
    return plain


def _unzstd(body: bytes, bytes_max: int) -> bytes:
    try:
        decoder = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_MAX)
        with decoder.stream_reader(body, read_across_frames=True) as reader:
            plain = reader.read(bytes_max + 1)
    except zstandard.ZstdError as error:
        raise InvalidRequest(f"body: not valid zstd: {error}") from None
    if len(plain) > bytes_max:
        raise _too_large(bytes_max)
    if not plain:
        raise InvalidRequest("body: not valid zstd")
    return plain


def _too_large(bytes_max: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"body: more than {bytes_max} bytes when uncompressed", limit=bytes_max)


_DECODERS: dict[str, Callable[[bytes, int], Buffer]] = {
    "identity": lambda body, _: body,
    "gzip": _gunzip,
    "x-gzip": _gunzip,
    "zstd": _unzstd,
}


async def compress(request: Request, response: Response) -> None:
    """Compresses the answer in place if the request accepts it and it is worth it."""
    accepted = request.headers.get("accept-encoding")
    if accepted is None or response.is_streamed:
        return
    size = sum(map(len, response.parts))
    if size < _COMPRESS_BYTES_MIN:
        return
    encoding = _chosen(accepted)
    if encoding is None:
        return
    encode = _gzip if encoding == b"gzip" else _zstd
    if size > _THREAD_BYTES:
        body = await trio.to_thread.run_sync(encode, response.parts)
    else:
        body = encode(response.parts)
    response.parts = [body]
    response.headers.append((b"content-encoding", encoding))
    response.headers.append((b"vary", b"accept-encoding"))


def _chosen(accepted: str) -> bytes | None:
    weights: dict[str, float] = {}
    for item in accepted.lower().split(","):
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
    offered = [(weights.get(name, anything), name) for name in ("gzip", "zstd")]
    weight, name = max(offered)  # zstd on a tie: better and faster
    return name.encode() if weight > 0 else None


def _gzip(parts: list[Buffer]) -> bytes:
    encoder = zlib.compressobj(level=1, wbits=31)
    return b"".join([encoder.compress(part) for part in parts]) + encoder.flush()


def _zstd(parts: list[Buffer]) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(b"".join(parts))
