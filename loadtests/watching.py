"""Measures the time until all watchers of a box have an append, in the process of the load generator.

Closed loop: the next append follows when every watcher has the last one, so appends never queue. A latency
runs from the first byte of the append until this process has read the watcher's bytes. It reads one watcher
after the other: with many watchers, part of the figure is its own.

A stalled watcher requests the box from its start and never reads. The box must have more bytes (`first_seq`
records) than the kernel buffers (3 MB were seen), so that the watcher is stalled before the clock starts.
"""

from __future__ import annotations

import select
import socket
from time import monotonic_ns
from typing import Any

from loadtests.generator import DRAIN_S, SILENCE_S, LoadFailed, Tally, append_body, http_request

_RECEIVE_BYTES = 64 * 1024
_CAUGHT_UP = b"event: caught-up"
#: Last bytes of a watcher to keep, because a marker may be split; longer than any marker.
_TAIL_BYTES = 64


class WatchLoad:
    def __init__(self, plan: dict[str, Any]) -> None:
        self._tally = Tally(plan)
        self._port, self._box = plan["port"], plan["box"]
        self._epoll = select.epoll()
        self._tails: dict[int, bytes] = {}
        self._socks: dict[int, socket.socket] = {}
        self._first_seq = plan.get("first_seq", 0)
        self._stalled_sockets = [
            self._open("from_seq=0", receive_bytes=4096) for _ in range(plan.get("stalled", 0))
        ]
        for _ in range(plan["watchers"]):
            sock = self._open("tail=true")
            self._socks[sock.fileno()] = sock
            self._tails[sock.fileno()] = b""
            self._epoll.register(sock, select.EPOLLIN)
        self._writer = socket.create_connection(("127.0.0.1", self._port), timeout=SILENCE_S)
        self._writer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        body = append_body(1, 1, record_bytes=plan["record_bytes"])
        self._append = http_request(f"/v0/boxes/{self._box}", body)

    def _open(self, query: str, *, receive_bytes: int = 0) -> socket.socket:
        sock = socket.socket()
        if receive_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        sock.connect(("127.0.0.1", self._port))
        sock.sendall(f"GET /v0/boxes/{self._box}/watch?{query} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
        sock.setblocking(False)
        return sock

    def run(self) -> dict[str, Any]:
        tally = self._tally
        self._wait_for(_CAUGHT_UP, 0)
        seq = self._first_seq
        while not tally.is_over and tally.may_send(len(self._append)):
            seq += 1
            sent_ns = monotonic_ns()
            self._writer.sendall(self._append)
            self._wait_for(b'"to_seq":%d,' % seq, sent_ns)
            answer = self._writer.recv(_RECEIVE_BYTES)
            if not answer.startswith(b"HTTP/1.1 20"):
                tally.add_failure(answer)
        tally.end(monotonic_ns())
        return tally.result()

    def _wait_for(self, marker: bytes, sent_ns: int) -> None:
        """Wait until every watcher has received the marker."""
        missing = len(self._socks)
        notified_fds = {fd for fd, tail in self._tails.items() if marker in tail}
        missing -= len(notified_fds)
        while missing:
            events = self._epoll.poll(SILENCE_S if sent_ns == 0 else max(DRAIN_S, SILENCE_S))
            if not events:
                raise LoadFailed(f"{missing} watchers were not sent {marker!r}")
            for fd, _ in events:
                data = self._socks[fd].recv(_RECEIVE_BYTES)
                if not data:
                    raise LoadFailed("the server ended a stream")
                text = self._tails[fd] + data
                self._tails[fd] = text[-_TAIL_BYTES:]
                if fd not in notified_fds and marker in text:
                    notified_fds.add(fd)
                    missing -= 1
                    if sent_ns:
                        now_ns = monotonic_ns()
                        self._tally.add_answer(now_ns, now_ns - sent_ns, 1)
