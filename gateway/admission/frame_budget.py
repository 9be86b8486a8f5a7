"""Limits the HTTP/2 and WebSocket frames that a client may send for each request.

A frame of 9 bytes costs its sender nothing and the HTTP/2 library 20 to 100 µs, and one read brings
thousands. So frames are counted before the library sees them: a walker reads the frame headers out of the raw
bytes (about 1 µs each), charges the connection's budget, and cuts the bytes into slices at frame borders. The
caller parses one slice at a time and lets other tasks run between two. A frame that is over the budget, and
all bytes behind it, are never parsed: the walker raises `FrameFlood`.

The budget is a token bucket. It fills with time, and with useful work: answers and body bytes that were sent.
So normal clients never empty it: not by acknowledging every DATA frame on stream and connection, by
cancelling requests, or by keepalive pings. A client without a valid key has a smaller bucket and gets no
credit for answers that refuse it.

    frame                                    tokens
    HEADERS                                  2
    SETTINGS                                 1, and 1 for each entry
    empty or padding-only DATA               1
    small DATA, before a valid key           1
    larger DATA                              0
    all others, known or not                 1
    WebSocket ping, pong, small message or small fragment   1

Rules of this file: no sockets, no clock (`now_s` is an argument), and bytes of a peer raise `FrameFlood` or
`FrameTooLarge` alone.

Bounds: a walker keeps at most 13 bytes of an incomplete frame header.
"""

from __future__ import annotations

from collections.abc import Iterator

#: The bucket of a client without a valid key, and how fast it fills. 500 frames are at most 50 ms of work.
STRANGER_TOKENS, STRANGER_TOKENS_PER_S = 500, 50
#: The bucket of a client with a valid key. It may cancel 256 requests at once (768 tokens) several times.
KNOWN_TOKENS, KNOWN_TOKENS_PER_S = 4_000, 400
#: How far useful work can fill a bucket. Go acknowledges every 4 KiB that it reads, on stream and connection:
#: the 4 MiB of its window are 2,048 frames.
STRANGER_TOKENS_MAX, KNOWN_TOKENS_MAX = 2_000, 16_000
#: Credit for an answer: its request (2), the empty DATA that ended it, two window updates, a reset, a ping.
ANSWER_CREDIT = 8
#: Credit for each piece of a body that was sent, and for each of these bytes of it.
BODY_CREDIT, BODY_CREDIT_BYTES = 4, 1024
#: DATA of a client without a valid key, and a frame of a WebSocket, is small below this. One read of 64 KiB
#: brings at most 64 frames that are not small.
SMALL_BYTES = 1024

#: The weight of a slice, in frames. With about 50 µs a frame it is 2 ms.
SLICE_WEIGHT = 32
#: A request takes as long as this many frames.
HEADERS_WEIGHT = 16

_DATA, _HEADERS, _SETTINGS = 0x0, 0x1, 0x4
_PADDED = 0x8
#: The largest padding with its length byte.
_PADDING_BYTES_MAX = 256
_H2_HEADER_BYTES = 9
_SETTING_BYTES = 6


class FrameFlood(Exception):
    """The client has sent more frames than its budget allows."""


class FrameTooLarge(Exception):
    """The length field of a frame is larger than the limit."""


class FrameBudget:
    """The token bucket of one connection."""

    __slots__ = ("_filled_s", "is_known", "spent_tokens", "tokens")

    def __init__(self, now_s: float) -> None:
        self.tokens: float = STRANGER_TOKENS
        #: True when the client has shown a valid key or, on a server without keys, has made a request.
        self.is_known = False
        #: Tokens spent so far. For the log only.
        self.spent_tokens = 0
        self._filled_s = now_s

    def __repr__(self) -> str:
        return f"<FrameBudget {self.tokens:.0f} tokens, {'known' if self.is_known else 'stranger'}>"

    def set_known(self) -> None:
        if not self.is_known:
            self.is_known = True
            self.tokens += KNOWN_TOKENS - STRANGER_TOKENS

    def fill(self, now_s: float) -> None:
        """Add the tokens for the time that has passed. Never removes tokens that useful work has added."""
        rate, most = (
            (KNOWN_TOKENS_PER_S, KNOWN_TOKENS) if self.is_known else (STRANGER_TOKENS_PER_S, STRANGER_TOKENS)
        )
        if self.tokens < most:
            self.tokens = min(most, self.tokens + (now_s - self._filled_s) * rate)
        self._filled_s = now_s

    def spend(self, count: int) -> None:
        if count > self.tokens:
            raise FrameFlood
        self.tokens -= count
        self.spent_tokens += count

    def credit_answer(self, status: int) -> None:
        if self.is_known or status < 400:
            self._credit(ANSWER_CREDIT)

    def credit_body(self, length: int) -> None:
        """Credit one piece of an answer. A stranger gets nothing for a short piece, which is an error message
        for the missing key."""
        self._credit((BODY_CREDIT if self.is_known else 0) + length // BODY_CREDIT_BYTES)

    def _credit(self, count: int) -> None:
        most = KNOWN_TOKENS_MAX if self.is_known else STRANGER_TOKENS_MAX
        if self.tokens < most:
            self.tokens = min(most, self.tokens + count)


class FrameWalker:
    """Cuts the bytes of one direction into slices of whole frame headers, and charges each frame.

    Subclasses define the length of a header and the cost of its frame.
    """

    __slots__ = ("_header", "_missing", "budget")

    def __init__(self, budget: FrameBudget, skip_bytes: int = 0) -> None:
        self.budget = budget
        #: The first bytes of an incomplete header.
        self._header = b""
        #: Bytes of the current payload that have not come yet.
        self._missing = skip_bytes

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._missing} B missing, {self.budget!r}>"

    def slices_untrusted(self, data: bytes, now_s: float) -> Iterator[bytes]:
        """Yield `data` in slices that weigh `SLICE_WEIGHT` or a little more. Stops at the first frame that is
        over the budget, after yielding the bytes before it, and raises `FrameFlood`."""
        self.budget.fill(now_s)
        start, at, weight = 0, min(self._missing, len(data)), 0
        self._missing -= at
        while at < len(data):
            header_size = len(self._header)
            header = self._header + data[at : at + 14 - header_size]
            size = self._header_bytes(header)
            if len(header) < size:
                self._header = header
                break
            self._header = b""
            try:
                frame_weight = self._charge(header)
            except FrameFlood:
                if start < at:
                    yield data[start:at]
                raise
            at += size - header_size
            payload_size = min(self._missing, len(data) - at)
            self._missing -= payload_size
            at += payload_size
            weight += frame_weight
            if weight >= SLICE_WEIGHT:
                yield data[start:at]
                start, weight = at, 0
        if start < len(data):
            yield data[start:]

    def _header_bytes(self, header: bytes) -> int:
        """Return the length of the header, or a lower bound if its first bytes do not show it yet."""
        raise NotImplementedError

    def _charge(self, header: bytes) -> int:
        """Charge the frame of a complete header, store the length of its payload, and return its weight."""
        raise NotImplementedError


class H2FrameWalker(FrameWalker):
    """The frames of an HTTP/2 connection, behind `skip_bytes` of its preface.

    length (3) | type (1) | flags (1) | stream (4) | payload
    """

    __slots__ = ("_frame_bytes_max",)

    def __init__(self, budget: FrameBudget, *, skip_bytes: int, frame_bytes_max: int) -> None:
        super().__init__(budget, skip_bytes)
        self._frame_bytes_max = frame_bytes_max

    def _header_bytes(self, header: bytes) -> int:
        return _H2_HEADER_BYTES

    def _charge(self, header: bytes) -> int:
        length = header[0] << 16 | header[1] << 8 | header[2]
        if length > self._frame_bytes_max:
            raise FrameTooLarge
        kind = header[3]
        self._missing = length
        if kind == _DATA:
            # The length of the padding is not read: it is at most this, and real clients pad large frames.
            useful = length - _PADDING_BYTES_MAX if header[4] & _PADDED else length
            if useful <= 0 or (useful < SMALL_BYTES and not self.budget.is_known):
                self.budget.spend(1)
            return 1
        if kind == _HEADERS:
            self.budget.spend(2)
            return HEADERS_WEIGHT
        if kind == _SETTINGS:
            cost = 1 + length // _SETTING_BYTES
            self.budget.spend(cost)
            return cost
        self.budget.spend(1)
        return 1


class SocketFrameWalker(FrameWalker):
    """The frames of a WebSocket, as its client sends them.

    fin, opcode (1) | masked, length (1) | longer length (0, 2 or 8) | mask (4) | payload
    """

    __slots__ = ()

    def _header_bytes(self, header: bytes) -> int:
        if len(header) < 2:
            return 2
        short = header[1] & 0x7F
        return 2 + (8 if short == 127 else 2 if short == 126 else 0) + (4 if header[1] & 0x80 else 0)

    def _charge(self, header: bytes) -> int:
        length = header[1] & 0x7F
        if length == 126:
            length = int.from_bytes(header[2:4], "big")
        elif length == 127:
            length = int.from_bytes(header[2:10], "big")
        self._missing = length
        if length < SMALL_BYTES:
            self.budget.spend(1)
        return 1
