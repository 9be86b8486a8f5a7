"""S2 sessions frame by frame over one HTTP/2 connection, in a separate process.

    python -m loadtests.s2frames '{"url": …, "seconds": 4, "size": 1024, "count": 1000, "in_flight": 5}'

Batches are built beforehand and responses are not parsed. HTTP/2 is implemented here, with large windows and
few system calls, because a client in Rust uses a fraction of a core, and so must this one. These rows measure
the server; the rows of `s2sdk.py` measure the SDK with it.
"""

from __future__ import annotations

import json
import select
import socket
import statistics
import sys
import time
import urllib.request
from collections import deque
from typing import Any, Final
from urllib.parse import urlsplit

BASIN: Final = "bench-s2-basin"
#: Receive window: bytes that the server may send before we read them; credit is returned by halves.
_WINDOW_BYTES: Final = 64 << 20
_H2_FRAME_BYTES: Final = 16_384
_READ_BYTES: Final = 1 << 20
#: Buffers of one `sendmsg`: a frame takes two, its head and its payload.
_BUFFERS_MAX: Final = 128

_DATA, _HEADERS, _RST, _SETTINGS, _PING, _GOAWAY, _WINDOW = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1
_INITIAL_WINDOW_SIZE: Final = 4
_STATUS_200: Final = 0x88


def batch(size: int, count: int) -> bytes:
    """Return an s2s frame: protobuf of records that have only a body."""
    body = b"x" * size
    record = b"\x1a" + _varint(size) + body
    records = (b"\x0a" + _varint(len(record)) + record) * count
    return (len(records) + 1).to_bytes(3, "big") + b"\0" + records


def _varint(number: int) -> bytes:
    parts = bytearray()
    while number > 127:
        parts.append(number & 127 | 128)
        number >>= 7
    return bytes(parts) + bytes([number])


def _h2(kind: int, flags: int, stream: int, size: int) -> bytes:
    return size.to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big")


class Session:
    """One exchange on one connection."""

    def __init__(self, url: str, method: str, path: str, *, ends: bool) -> None:
        host = urlsplit(url)
        self._sock = socket.create_connection((host.hostname or "", host.port or 80), timeout=60)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        headers = [(":method", method), (":path", path), (":scheme", "http"), (":authority", host.netloc)]
        headers += [("content-type", "s2s/proto"), ("s2-basin", BASIN)]
        block = b"".join(b"\0" + _literal(name) + _literal(value) for name, value in headers)
        setting = _INITIAL_WINDOW_SIZE.to_bytes(2, "big") + _WINDOW_BYTES.to_bytes(4, "big")
        self._sock.sendall(
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
            + _h2(_SETTINGS, 0, 0, len(setting))
            + setting
            + _h2(_WINDOW, 0, 0, 4)
            + (_WINDOW_BYTES - 65_535).to_bytes(4, "big")
            + _h2(_HEADERS, _END_HEADERS | (_END_STREAM if ends else 0), 1, len(block))
            + block
        )
        self._sock.setblocking(False)
        self.bytes = self.frames = 0
        self.has_ended = False
        #: Send windows of the connection (0) and the stream (1).
        self._windows = {0: 65_535, 1: 65_535}
        self._initial_window = 65_535
        self._untaken: deque[memoryview] = deque()
        self._unsent: deque[bytes | memoryview] = deque()
        self._taken_bytes = 0
        self._pending = bytearray()
        #: Of the current s2s frame: the received bytes of its head, and its missing bytes.
        self._head, self._missing = b"", 0

    def __repr__(self) -> str:
        return f"<Session {self.frames} frames, {self.bytes} B>"

    @property
    def is_behind(self) -> bool:
        """True while some data is not sent."""
        return bool(self._untaken or self._unsent)

    def put(self, data: bytes) -> None:
        self._untaken.append(memoryview(data))

    def end(self) -> None:
        assert not self._untaken
        self._unsent.append(_h2(_DATA, _END_STREAM, 1, 0))

    def step(self, wait_s: float | None = None) -> None:
        """Send and receive what is possible; wait until one of them is."""
        self._send()
        readable, _, _ = select.select([self._sock], [self._sock] if self._unsent else [], [], wait_s)
        if readable:
            data = self._sock.recv(_READ_BYTES)
            if not data:
                raise ConnectionError("the server has closed the connection")
            self._receive(data)
        self._send()

    def _send(self) -> None:
        while True:
            while self._untaken and len(self._unsent) < _BUFFERS_MAX:
                size = min(*self._windows.values(), _H2_FRAME_BYTES, len(self._untaken[0]))
                if size <= 0:
                    break
                self._unsent += (_h2(_DATA, 0, 1, size), self._untaken[0][:size])
                for stream in self._windows:
                    self._windows[stream] -= size
                self._untaken[0] = self._untaken[0][size:]
                if not self._untaken[0]:
                    self._untaken.popleft()
            if not self._unsent:
                return
            try:
                sent_bytes = self._sock.sendmsg(list(self._unsent)[:_BUFFERS_MAX])
            except BlockingIOError:
                return
            while self._unsent and sent_bytes >= len(self._unsent[0]):
                sent_bytes -= len(self._unsent.popleft())
            if sent_bytes:
                self._unsent[0] = memoryview(self._unsent[0])[sent_bytes:]

    def _receive(self, data: bytes) -> None:
        self._pending += data
        at, buffer = 0, self._pending
        while len(buffer) - at >= 9:
            size = int.from_bytes(buffer[at : at + 3], "big")
            if len(buffer) - at < 9 + size:
                break
            kind, flags = buffer[at + 3], buffer[at + 4]
            start, at = at + 9, at + 9 + size
            if kind == _DATA:
                self._count(buffer, start, at)
                self._taken_bytes += size
            elif kind == _WINDOW:
                stream = int.from_bytes(buffer[start - 4 : start], "big")
                self._windows[stream] += int.from_bytes(buffer[start:at], "big")
            else:
                self._receive_other(kind, flags, bytes(buffer[start:at]))
            if flags & _END_STREAM and kind in (_DATA, _HEADERS):
                self.has_ended = True
        del buffer[:at]
        if self._taken_bytes >= _WINDOW_BYTES // 2:
            credit = self._taken_bytes.to_bytes(4, "big")
            self._unsent.append(_h2(_WINDOW, 0, 0, 4) + credit + _h2(_WINDOW, 0, 1, 4) + credit)
            self._taken_bytes = 0

    def _receive_other(self, kind: int, flags: int, payload: bytes) -> None:
        if kind == _HEADERS:
            assert payload[0] == _STATUS_200, f"the session was refused: {payload!r}"
        elif kind == _SETTINGS and not flags & _ACK:
            for at in range(0, len(payload), 6):
                if int.from_bytes(payload[at : at + 2], "big") == _INITIAL_WINDOW_SIZE:
                    window = int.from_bytes(payload[at + 2 : at + 6], "big")
                    self._windows[1] += window - self._initial_window
                    self._initial_window = window
            self._unsent.append(_h2(_SETTINGS, _ACK, 0, 0))
        elif kind == _PING and not flags & _ACK:
            self._unsent.append(_h2(_PING, _ACK, 0, 8) + payload)
        elif kind in (_RST, _GOAWAY):
            raise ConnectionError(f"the server reset the session: {payload!r}")

    def _count(self, data: bytearray, at: int, end: int) -> None:
        """Count s2s frames without parsing them."""
        self.bytes += end - at
        while at < end:
            if self._missing:
                size = min(self._missing, end - at)
                self._missing -= size
                at += size
            else:
                size = min(4 - len(self._head), end - at)
                self._head += data[at : at + size]
                at += size
                if len(self._head) < 4:
                    return
                assert self._head[3] < 0x80, bytes(data[at:end])
                self._missing = int.from_bytes(self._head[:3], "big") - 1
                self._head = b""
            if not self._missing:
                self.frames += 1

    def close(self) -> None:
        self._sock.close()


def _literal(text: str) -> bytes:
    assert len(text) < 127
    return bytes([len(text)]) + text.encode()


def append(url: str, path: str, frame: bytes, *, seconds: float, in_flight: int) -> tuple[float, int]:
    """Append with `in_flight` batches outstanding. Return seconds until the last ack, and batches."""
    session = Session(url, "POST", path, ends=False)
    began = time.perf_counter()
    sent_count = 0
    while time.perf_counter() < began + seconds:
        while sent_count - session.frames < in_flight:
            session.put(frame)
            sent_count += 1
        session.step()
    _finish(session, sent_count)
    return time.perf_counter() - began, sent_count


def append_at_rate(
    url: str, path: str, frame: bytes, *, seconds: float, per_s: float, in_flight: int
) -> tuple[list[float], int]:
    """Append batches at a steady rate. Return milliseconds from the due time of each to its ack, and batches.

    A batch that is due while `in_flight` are outstanding waits here, and the wait counts.
    """
    session = Session(url, "POST", path, ends=False)
    session.step()
    began = time.perf_counter()
    due: deque[float] = deque()
    sent_count = acked_count = 0
    took_ms: list[float] = []
    while (now := time.perf_counter()) < began + seconds or due:
        next_s = began + sent_count / per_s
        if next_s <= now and next_s < began + seconds and sent_count - session.frames < in_flight:
            session.put(frame)
            due.append(next_s)
            sent_count += 1
            session.step(0)
        else:
            session.step(max(0.0, next_s - now) if next_s > now and next_s < began + seconds else 0.05)
        now = time.perf_counter()
        while acked_count < session.frames:
            took_ms.append(1000 * (now - due.popleft()))
            acked_count += 1
    _finish(session, sent_count)
    return took_ms, sent_count


def _finish(session: Session, sent_count: int) -> None:
    while session.is_behind:
        session.step()
    session.end()
    while not session.has_ended:
        session.step()
    assert session.frames == sent_count, "every batch is acked"
    session.close()


def read(url: str, path: str, *, records: int, size: int) -> float:
    session = Session(url, "GET", f"{path}?seq_num=0&count={records}", ends=True)
    began = time.perf_counter()
    while not session.has_ended:
        session.step()
    took_s = time.perf_counter() - began
    assert session.bytes > records * size, "a read gets all that was acked"
    session.close()
    return took_s


def measure(url: str, path: str, plan: dict[str, Any]) -> dict[str, float]:
    size, count = plan["size"], plan["count"]
    frame = batch(size, count)
    if "mib_per_s" in plan:
        per_s = plan["mib_per_s"] * 2**20 / (size * count)
        took_ms, _ = append_at_rate(
            url, path, frame, seconds=plan["seconds"], per_s=per_s, in_flight=plan["in_flight"]
        )
        return {"p50": statistics.median(took_ms), "p99": statistics.quantiles(took_ms, n=100)[98]}
    append_s, sent_count = append(url, path, frame, seconds=plan["seconds"], in_flight=plan["in_flight"])
    records = sent_count * count
    read_s = read(url, path, records=records, size=size)
    return {
        "append-records": records / append_s,
        "read-records": records / read_s,
        "append-mib": records * size / append_s / 2**20,
        "read-mib": records * size / read_s / 2**20,
    }


def main(plan: dict[str, Any]) -> dict[str, float]:
    url, stream = plan["url"], f"frames-{time.time_ns()}"

    def call(method: str, path: str) -> None:
        request = urllib.request.Request(url + path, method=method, headers={"s2-basin": BASIN})
        urllib.request.urlopen(request).close()

    call("PUT", f"/v1/basins/{BASIN}")
    call("PUT", f"/v1/streams/{stream}")
    try:
        return measure(url, f"/v1/streams/{stream}/records", plan)
    finally:
        call("DELETE", f"/v1/streams/{stream}")


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
