"""Parses and renders HTTP/1.1: a request head to a `Head`, chunked bytes to a body, a response head to bytes.

Rules of this file:
- No sockets, no clock except for the `date` header, nothing awaited.
- A function that parses a peer's bytes ends in `_untrusted` and raises only `StreamsError`.
- A request that two HTTP implementations could read differently is refused, never repaired: request smuggling
  depends on such differences.

The head is cut off at its CRLF CRLF *before* it is parsed, so llhttp (httptools) never sees a body and no
state of one request can reach the next: each head gets a new parser (1 µs). llhttp is strict about fields
(names, control characters, bare CR or LF, folds, Content-Length). It is lenient, as measured, about
the request line (two spaces, a leading LF, `RTSP/1.0`, no version), `Transfer-Encoding: gzip, chunked` and
chunks in HTTP/1.0: those we refuse ourselves.
"""

from __future__ import annotations

import re
import time
from email.utils import formatdate
from http import HTTPStatus

import httptools

from gateway.http.edge_rules import (
    CHUNKED,
    FrontLimits,
    check_body_length,
    check_host,
    check_response_header,
    check_url_length,
    content_length_of,
    split_target,
)
from gateway.requests.request import is_full_duplex
from streams.protocol.errors import InvalidRequest

HEAD_END = b"\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"
#: The first part of the HTTP/2 preface, which looks like a head. `SM\r\n\r\n` follows it.
H2_PREFACE = b"PRI * HTTP/2.0\r\n\r\n"

_REQUEST_LINE = re.compile(rb"([A-Z][A-Z-]{0,19}) ([!-~]+) HTTP/1\.([01])\r\n")
_BARE_LF = re.compile(rb"(?<!\r)\n")


class HttpRequestHead:
    """A request head with unambiguous framing. `length` is the length of the body, or `CHUNKED`."""

    __slots__ = (
        "expects_continue",
        "headers",
        "is_full_duplex",
        "is_http_10",
        "keep_alive",
        "length",
        "method",
        "path",
        "query",
        "upgrades",
    )

    method: str
    path: str
    query: str
    headers: dict[str, str]
    length: int
    keep_alive: bool
    is_http_10: bool
    #: True if it is answered while its body arrives.
    is_full_duplex: bool
    expects_continue: bool
    upgrades: bool

    def __repr__(self) -> str:
        length = "chunked" if self.length == CHUNKED else f"{self.length} B"
        return f"<Head {self.method} {self.path} {length}>"


#: Header names as sent -> lower-case names. Common ones are there from the start; others are added until the
#: table is full, so that clients cannot grow it without limit.
_NAMES: dict[bytes, str] = {}
_NAMES_MAX = 1024


def _learn(name: bytes) -> str:
    key = name.decode("ascii").lower()
    if len(_NAMES) < _NAMES_MAX:
        _NAMES[name] = key
    return key


for _name in (b"Host", b"Content-Type", b"Content-Length", b"User-Agent", b"Accept", b"Authorization"):
    _learn(_name)
    _learn(_name.lower())


class _Fields:
    """Collects the header fields that httptools reports."""

    __slots__ = ("headers",)

    def __init__(self) -> None:
        self.headers: dict[str, str] = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        key = _NAMES.get(name) or _learn(name)
        text = value.strip(b" \t").decode("latin-1")
        headers = self.headers
        headers[key] = f"{headers[key]}, {text}" if key in headers else text


def parse_head_untrusted(raw: bytes, limits: FrontLimits) -> HttpRequestHead:
    """Parse one head. `raw` ends with its CRLF CRLF."""
    if len(raw) > limits.head_bytes_max:
        raise _head_too_large(limits)
    line = _REQUEST_LINE.match(raw)
    if line is None:
        raise InvalidRequest("the request line is not 'METHOD target HTTP/1.1'")
    if raw.count(b"\n") - 2 > limits.header_count_max:
        raise InvalidRequest(f"the request has more than {limits.header_count_max} headers")
    method, target, minor = line.groups()
    check_url_length(len(target), limits)
    head = HttpRequestHead()
    head.method = method.decode("ascii")
    head.path, head.query = split_target(head.method, target.decode("ascii"))
    head.is_http_10 = minor == b"0"
    head.headers, head.upgrades = _parse_fields_untrusted(raw)
    _set_framing(head)
    head.is_full_duplex = is_full_duplex(head.method, head.path, head.headers.get("content-type"))
    return head


class HeadMemory:
    """A cache of parsed heads, by their bytes.

    Most clients send the same few heads again and again: same path, same headers, one of a few hundred
    lengths. Parsing is a pure function of the bytes, so a cached head costs 1 µs instead of 13 in a running
    server. The cache is bounded by the number and the size of heads; when it is full, it is cleared. A cached
    `Head` is shared: it is never changed, and its headers are copied for use."""

    COUNT_MAX = 4096
    HEAD_BYTES_MAX = 1024

    __slots__ = ("_heads", "_limits")

    def __init__(self, limits: FrontLimits) -> None:
        self._limits = limits
        self._heads: dict[bytes, HttpRequestHead] = {}

    def __repr__(self) -> str:
        return f"<HeadMemory {len(self._heads)} heads>"

    def parse_untrusted(self, raw: bytes) -> HttpRequestHead:
        head = self._heads.get(raw)
        if head is None:
            head = parse_head_untrusted(raw, self._limits)
            if len(raw) <= self.HEAD_BYTES_MAX:
                if len(self._heads) >= self.COUNT_MAX:
                    self._heads.clear()
                self._heads[raw] = head
        return head


def _parse_fields_untrusted(raw: bytes) -> tuple[dict[str, str], bool]:
    fields = _Fields()
    try:
        httptools.HttpRequestParser(fields).feed_data(raw)
    except httptools.HttpParserUpgrade:
        return fields.headers, True
    except httptools.HttpParserError as error:
        raise InvalidRequest(f"the request head is not valid HTTP/1.1: {error}") from None
    return fields.headers, False


def _set_framing(head: HttpRequestHead) -> None:
    headers = head.headers
    host = headers.get("host")
    if host is not None or not head.is_http_10:
        check_host(host)
    coding = headers.get("transfer-encoding")
    if coding is None:
        head.length = content_length_of(headers.get("content-length"))
    else:
        if coding.lower() != "chunked":
            raise InvalidRequest("the only supported Transfer-Encoding is 'chunked'")
        if "content-length" in headers or head.is_http_10:
            raise InvalidRequest("Transfer-Encoding is not allowed with Content-Length or in HTTP/1.0")
        head.length = CHUNKED
    head.keep_alive = not head.is_http_10
    connection = headers.get("connection")
    if connection is not None:
        options = [option.strip() for option in connection.lower().split(",")]
        head.keep_alive = "close" not in options and (head.keep_alive or "keep-alive" in options)
    expectation = headers.get("expect")
    if expectation is not None and expectation.lower() != "100-continue":
        raise InvalidRequest("the only supported Expect is '100-continue'")
    head.expects_continue = expectation is not None and not head.is_http_10


def check_partial_head_untrusted(partial: bytes | bytearray, limits: FrontLimits) -> None:
    """Refuse bytes that can never become a head, so that their sender gets the error before the deadline."""
    if len(partial) >= limits.head_bytes_max:
        raise _head_too_large(limits)
    if H2_PREFACE.startswith(partial):
        return
    first = partial[0]
    if not (65 <= first <= 90 or partial == b"\r"):
        raise InvalidRequest("this is not HTTP/1.1 (is the client speaking TLS to a plain port?)")
    if b"\n" in partial and (_BARE_LF.search(partial) or _REQUEST_LINE.match(partial) is None):
        raise InvalidRequest("the request head is not valid HTTP/1.1: its lines must end in CRLF")


def _head_too_large(limits: FrontLimits) -> InvalidRequest:
    return InvalidRequest(f"the request head is larger than {limits.head_bytes_max} bytes")


# Chunked bodies.
#
#   1a3;ext=1 CRLF  <0x1a3 bytes> CRLF  …  0 CRLF  Trailer: x CRLF  CRLF
#   `- line ------'                `-gap   `- line  `- trailers --------'

_CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:;[\t -~\x80-\xff]*)?")
_TRAILER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[\t -~\x80-\xff]*")
_FORBIDDEN_TRAILERS = frozenset((b"content-length", b"transfer-encoding", b"host"))
_CHUNK_LINE_BYTES_MAX = 1024
#: Wire bytes allowed for each byte of the body, plus the size of a head: a chunk of one byte costs six.
_WIRE_FACTOR_MAX = 8
#: Framing lines parsed by one `feed_untrusted`: about a millisecond. One read of one-byte chunks has 20,000.
LINES_PER_FEED_MAX = 512

_LINE, _DATA, _GAP, _TRAILERS, _DONE = range(5)


class ChunkedBody:
    """Parses the wire bytes of a chunked body until `is_complete`. `rest` then holds the bytes behind it.

    A body that is read as it arrives (`take`) has no limit of length: `is_bounded` is False.
    """

    __slots__ = (
        "_is_bounded",
        "_limits",
        "_missing",
        "_state",
        "_taken_bytes",
        "_trailer_bytes",
        "_trailer_count",
        "_wire_bytes",
        "body",
        "is_behind",
        "rest",
    )

    def __init__(self, limits: FrontLimits, *, is_bounded: bool = True) -> None:
        self.body = bytearray()
        self.rest = b""
        #: True if `rest` has complete lines that are not parsed yet.
        self.is_behind = False
        self._limits = limits
        self._is_bounded = is_bounded
        self._state = _LINE
        self._missing = 0
        self._taken_bytes = 0
        self._trailer_bytes = 0
        self._trailer_count = 0
        self._wire_bytes = 0

    def __repr__(self) -> str:
        return f"<ChunkedBody {'done' if self.is_complete else 'open'}, {len(self.body)} B>"

    @property
    def is_complete(self) -> bool:
        return self._state == _DONE

    def take(self) -> bytes:
        """Return the bytes of the body that have come since the last call."""
        piece = bytes(self.body)
        self.body.clear()
        self._taken_bytes += len(piece)
        return piece

    def feed_untrusted(self, data: bytes) -> None:
        """Parse at most `LINES_PER_FEED_MAX` lines. While `is_behind`, the caller lets other tasks run and
        feeds b""."""
        assert not self.is_complete
        self._wire_bytes += len(data)
        data = self.rest + data  # `rest` is short, a part of a line, unless `is_behind` was set
        at = lines = 0
        self.is_behind = False
        while True:
            if self._state == _DATA:
                count = min(self._missing, len(data) - at)
                self.body += memoryview(data)[at : at + count]
                at += count
                self._missing -= count
                if self._missing:
                    break
                self._state = _GAP
            end = data.find(b"\r\n", at, at + _CHUNK_LINE_BYTES_MAX + 2)
            if end < 0:
                self._check_partial_line(data[at : at + _CHUNK_LINE_BYTES_MAX + 2])
                break
            self._line(data[at:end])
            at = end + 2
            lines += 1
            if self._state == _DONE:
                break
            if lines == LINES_PER_FEED_MAX:
                self.is_behind = at < len(data)
                break
        self.rest = data[at:]
        body_bytes = self._taken_bytes + len(self.body)
        overhead_max = _WIRE_FACTOR_MAX * body_bytes + self._limits.head_bytes_max
        if self._wire_bytes - len(self.rest) > overhead_max:
            raise InvalidRequest("the chunked body is nearly all framing")

    def _check_partial_line(self, partial: bytes) -> None:
        if len(partial) > _CHUNK_LINE_BYTES_MAX or b"\n" in partial or b"\r" in partial[:-1]:
            raise InvalidRequest("the chunked body has a line that does not end in CRLF or is too long")
        if self._state == _GAP and partial not in (b"", b"\r"):
            raise InvalidRequest("a chunk is longer than it says")

    def _line(self, line: bytes) -> None:
        if self._state == _GAP:
            if line:
                raise InvalidRequest("a chunk is longer than it says")
            self._state = _LINE
        elif self._state == _LINE:
            match = _CHUNK_LINE.fullmatch(line)
            if match is None:
                raise InvalidRequest("a chunk does not start with its size in hex")
            self._missing = int(match[1], 16)
            if self._is_bounded:
                check_body_length(len(self.body) + self._missing, self._limits)
            self._state = _DATA if self._missing else _TRAILERS
        elif line:
            self._trailer(line)
        else:
            self._state = _DONE

    def _trailer(self, line: bytes) -> None:
        """Check a trailer and drop it: the server uses none."""
        self._trailer_bytes += len(line) + 2
        self._trailer_count += 1
        match = _TRAILER.fullmatch(line)
        if match is None or match[1].lower() in _FORBIDDEN_TRAILERS:
            raise InvalidRequest("the chunked body has a trailer that is not valid")
        limits = self._limits
        if self._trailer_bytes > limits.head_bytes_max or self._trailer_count > limits.header_count_max:
            raise InvalidRequest("the chunked body has too many trailers")


_STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus
}

_COMMON_LINES = {
    (name, value): b"%b: %b\r\n" % (name, value)
    for name, value in (
        (b"content-type", b"application/json"),
        (b"content-type", b"text/event-stream"),
        (b"content-type", b"application/x-ndjson"),
        (b"x-content-type-options", b"nosniff"),
        (b"cache-control", b"no-store"),
    )
}


class HeadWriter:
    """Renders response heads. Caches the status line and date of the current second."""

    __slots__ = ("_ready", "_second")

    def __init__(self) -> None:
        self._second = 0
        self._ready: dict[int, bytes] = {}

    def render(self, status: int, headers: list[tuple[bytes, bytes]], framing: bytes) -> bytes:
        """Render a response head. `framing` holds the lines that the front adds, each with its CRLF."""
        second = int(time.time())
        if second != self._second:
            self._second = second
            self._ready.clear()
        start = self._ready.get(status)
        if start is None:
            date = formatdate(second, usegmt=True).encode()
            start = self._ready[status] = b"%bdate: %b\r\n" % (_STATUS_LINES[status], date)
        lines = [start]
        for header in headers:
            line = _COMMON_LINES.get(header)
            if line is None:
                check_response_header(*header)
                line = b"%b: %b\r\n" % header
            lines.append(line)
        lines.append(framing)
        lines.append(b"\r\n")
        return b"".join(lines)
