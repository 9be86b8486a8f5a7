"""Sessions of the S2 API frame by frame over one HTTP/2 connection, in a process of its own.

    python -m loadtests.s2frames '{"url": …, "seconds": 4}'

The frames are made beforehand and answers are not taken apart, so these rows measure the server and `h2`;
those of `s2sdk.py` measure what a user of the SDK gets. 500 records of 100 bytes a frame.
"""

from __future__ import annotations

import json
import socket
import sys
import time
import urllib.request
from typing import Any, Final
from urllib.parse import urlsplit

import h2.config
import h2.connection
import h2.events
import h2.settings

BASIN: Final = "bench-s2-basin"
RECORDS, BODY = 500, b"x" * 100
IN_FLIGHT: Final = 32
#: What the server may send before we have read it.
_WINDOW_BYTES: Final = 16 << 20


def _frame() -> bytes:
    """A batch: protobuf of records that are nothing but a body, all of them short."""
    record = b"\x1a%c" % len(BODY) + BODY
    given = (b"\x0a%c" % len(record) + record) * RECORDS
    return (len(given) + 1).to_bytes(3, "big") + b"\0" + given


class Session:
    """One stream of one connection. Blocking."""

    def __init__(self, url: str, method: str, path: str, *, ends: bool) -> None:
        host = urlsplit(url)
        self._sock = socket.create_connection((host.hostname or "", host.port or 80), timeout=60)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self.connection.initiate_connection()
        self.connection.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: _WINDOW_BYTES})
        self.connection.increment_flow_control_window(_WINDOW_BYTES)
        headers = [(":method", method), (":path", path), (":scheme", "http"), (":authority", host.netloc)]
        headers += [("content-type", "s2s/proto"), ("s2-basin", BASIN)]
        self.connection.send_headers(1, headers, end_stream=ends)
        self.bytes = self.frames = 0
        self.has_ended = False
        self._pending = b""
        self.flush()

    def __repr__(self) -> str:
        return f"<Session {self.frames} frames, {self.bytes} B>"

    def flush(self) -> None:
        self._sock.sendall(self.connection.data_to_send())

    def send(self, data: bytes) -> None:
        view = memoryview(data)
        while len(view):
            size = min(self.connection.local_flow_control_window(1), 16_384, len(view))
            if not size:
                self.flush()
                self.receive()
                continue
            self.connection.send_data(1, bytes(view[:size]))
            view = view[size:]
        self.flush()

    def receive(self) -> None:
        data = self._sock.recv(1 << 20)
        if not data:
            raise ConnectionError("the server has closed the connection")
        for event in self.connection.receive_data(data):
            if isinstance(event, h2.events.ResponseReceived):
                status = dict(event.headers or ())[":status"]
                assert status == "200", f"the session was refused with {status!r}"
            elif isinstance(event, h2.events.DataReceived):
                self._count(event.data or b"")
                self.connection.acknowledge_received_data(event.flow_controlled_length or 0, 1)
            elif isinstance(event, h2.events.StreamEnded):
                self.has_ended = True
        self.flush()

    def _count(self, data: bytes) -> None:
        self.bytes += len(data)
        found, at = self._pending + data, 0
        while len(found) - at >= 4:
            size = 3 + int.from_bytes(found[at : at + 3], "big")
            if len(found) - at < size:
                break
            assert found[at + 3] < 0x80, found[at + 4 : at + size]
            self.frames += 1
            at += size
        self._pending = found[at:]

    def close(self) -> None:
        self._sock.close()


def measure(url: str, path: str, seconds: float) -> dict[str, float]:
    given = _frame()
    writing = Session(url, "POST", path, ends=False)
    began = time.perf_counter()
    sent = 0
    while time.perf_counter() < began + seconds:
        writing.send(given)
        sent += 1
        while sent - writing.frames >= IN_FLIGHT:
            writing.receive()
    writing.connection.end_stream(1)
    writing.flush()
    while not writing.has_ended:
        writing.receive()
    assert writing.frames == sent, "every frame is acked"
    append_s = time.perf_counter() - began
    writing.close()
    reading = Session(url, "GET", f"{path}?seq_num=0&count={sent * RECORDS}", ends=True)
    began = time.perf_counter()
    while not reading.has_ended:
        reading.receive()
    read_s = time.perf_counter() - began
    assert reading.bytes > sent * RECORDS * len(BODY), "a read gets all that was acked"
    reading.close()
    return {"append-records": sent * RECORDS / append_s, "read-records": sent * RECORDS / read_s}


def main(plan: dict[str, Any]) -> dict[str, float]:
    url, stream = plan["url"], f"frames-{time.time_ns()}"

    def call(method: str, path: str) -> None:
        asked = urllib.request.Request(url + path, method=method, headers={"s2-basin": BASIN})
        urllib.request.urlopen(asked).close()

    call("PUT", f"/v1/basins/{BASIN}")
    call("PUT", f"/v1/streams/{stream}")
    try:
        return measure(url, f"/v1/streams/{stream}/records", plan["seconds"])
    finally:
        call("DELETE", f"/v1/streams/{stream}")


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
