"""One attack in a separate process: `python -m loadtests.abuse.attacks NAME < plan.json > result.json`.

Each attack repeats one finding of a security review for `seconds`. If the server closes a connection, the
attack opens another one, as an attacker would: defence must cost less than the attack. Attacks use loopback
only, and only the port of the plan.

Plan: `port`, `seconds`, `scale` (number of connections, 1.0 = as in the review), `keys` with `writer` and
`reader` (both of one tenant, whose names begin with `evil.`). The result has counters of requests and
responses, and the CPU time of the attack.
"""

from __future__ import annotations

import json
import os
import re
import resource
import selectors
import socket
import struct
import sys
from collections import Counter
from collections.abc import Callable
from time import monotonic, sleep
from typing import Any

import zstandard

#: Simulates an attacker on another machine: the server and the well-behaved clients have priority, and the
#: attack gets the remaining CPU time.
NICENESS = 5
#: Delay before a reconnect, and the limit of all waits.
_REOPEN_S, _WAIT_S = 0.02, 0.05
_PAGE_BYTES = 8 << 20
_BODY_BYTES = 60 << 20
_content_length = re.compile(rb"\r\ncontent-length: (\d+)\r\n", re.IGNORECASE).search

H2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_SETTINGS, _PING, _RST_STREAM, _PRIORITY, _WINDOW_UPDATE, _HEADERS, _CONTINUATION = 4, 6, 3, 2, 8, 1, 9


class Plan:
    def __init__(self, fields: dict[str, Any]) -> None:
        self.port = int(fields["port"])
        self.ends_s = monotonic() + float(fields["seconds"])
        self.scale = float(fields["scale"])
        self.writer: str = fields["keys"]["writer"]
        self.reader: str = fields["keys"]["reader"]
        self.counts: Counter[str] = Counter()

    @property
    def is_over(self) -> bool:
        return monotonic() >= self.ends_s

    def many(self, count: int) -> int:
        return max(1, round(count * self.scale))

    def connect(self, *, receive_bytes: int = 0) -> socket.socket | None:
        """Open a connection; return None if the server refuses it."""
        sock = socket.socket()
        if receive_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        sock.settimeout(2.0)
        try:
            sock.connect(("127.0.0.1", self.port))
        except OSError:
            self.counts["not connected"] += 1
            sock.close()
            return None
        self.counts["connected"] += 1
        return sock


def _head(method: str, path: str, key: str, length: int = 0, *more: str) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", *more]
    if key:
        lines.append(f"Authorization: Bearer {key}")
    if length:
        lines += ["Content-Type: application/json", f"Content-Length: {length}"]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def _keep_open(plan: Plan, count: int, begin: Callable[[int], socket.socket | None]) -> None:
    """Keep `count` connections open, each opened by `begin`, and replace each that closes."""
    open_now: dict[int, socket.socket] = {}
    poll = selectors.DefaultSelector()
    number = 0
    while not plan.is_over:
        missing = count - len(open_now)
        for _ in range(min(missing, 64)):
            sock = begin(number)
            number += 1
            if sock is None:
                break
            open_now[sock.fileno()] = sock
            poll.register(sock, selectors.EVENT_READ)
        for key, _ in poll.select(0 if missing and len(open_now) < count else _WAIT_S):
            sock = open_now.pop(key.fd)
            try:
                answer = sock.recv(4096)
            except OSError:
                answer = b""
            plan.counts[f"answered {answer[9:12].decode(errors='replace')}" if answer else "closed"] += 1
            poll.unregister(sock)
            sock.close()
        if missing:
            sleep(_REOPEN_S)
    plan.counts["open at the end"] = len(open_now)


# -- 1: readers of large pages


def greedy_readers(plan: Plan) -> None:
    """Sixteen clients read pages of 8 MiB and a hundred read pages of the default size, all of it, again."""
    large = json.dumps({"from_seq": 0, "limit": 1_000_000, "max_bytes": _PAGE_BYTES}).encode()
    usual = json.dumps({"from_seq": 0}).encode()
    poll = selectors.DefaultSelector()
    states: dict[int, list[Any]] = {}  # socket, request, bytes still to come

    def ask(state: list[Any]) -> None:
        state[2] = -1
        state[0].sendall(_head("POST", "/v0/boxes/evil.big/diff", plan.reader, len(state[1])) + state[1])

    def open_one(body: bytes) -> None:
        sock = plan.connect()
        if sock is not None:
            states[sock.fileno()] = state = [sock, body, -1]
            poll.register(sock, selectors.EVENT_READ)
            ask(state)

    for body, count in ((large, plan.many(16)), (usual, plan.many(100))):
        for _ in range(count):
            open_one(body)
    while not plan.is_over:
        for key, _ in poll.select(_WAIT_S):
            state = states[key.fd]
            try:
                data = state[0].recv(1 << 20)
            except OSError:
                data = b""
            if not data:
                plan.counts["closed"] += 1
                poll.unregister(state[0])
                del states[key.fd]
                state[0].close()
                open_one(state[1])
                continue
            if state[2] < 0:
                end, length = data.find(b"\r\n\r\n"), _content_length(data)
                if end < 0 or length is None:
                    continue
                plan.counts[f"answered {data[9:12].decode()}"] += 1
                state[2] = int(length[1]) + end + 4
            state[2] -= len(data)
            if state[2] <= 0:
                ask(state)


# -- 2 and 3: bodies


def silent_bodies(plan: Plan) -> None:
    """Clients with and without a key announce bodies of 60 MiB and send nothing, or all but the last byte."""
    almost = bytes(_BODY_BYTES - 1)

    def begin(number: int) -> socket.socket | None:
        path = "/v0/boxes/evil.body" if number % 2 else "/v1/streams/evil/records"
        sock = plan.connect()
        if sock is not None:
            sock.sendall(_head("POST", path, plan.writer if number % 4 < 2 else "", _BODY_BYTES))
            if number % 16 == 1:
                try:
                    sock.sendall(almost)
                except OSError:
                    plan.counts["cut while sending"] += 1
        return sock

    _keep_open(plan, plan.many(64), begin)


def compressed_bombs(plan: Plan) -> None:
    """Appends of a few kilobytes of zstd become 60 MiB each, sixty at a time."""
    inner = b'{"records":[{"data":"' + b"a" * (_BODY_BYTES - 64) + b'"}]}'
    bomb = zstandard.ZstdCompressor(level=3).compress(inner)
    request = _head("POST", "/v0/boxes/evil.bomb", plan.writer, len(bomb), "Content-Encoding: zstd") + bomb
    plan.counts["bytes of one"] = len(bomb)

    def begin(number: int) -> socket.socket | None:
        sock = plan.connect()
        if sock is not None:
            sock.sendall(request)
        return sock

    _keep_open(plan, plan.many(60), begin)


# -- 4: frames


def _h2_frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


#: The kinds of control frames to flood with.
_H2_FLOODS: tuple[tuple[str, bytes], ...] = (
    ("WINDOW_UPDATE", _h2_frame(_WINDOW_UPDATE, 0, 0, struct.pack(">I", 1))),
    ("PING", _h2_frame(_PING, 0, 0, bytes(8))),
    ("SETTINGS", _h2_frame(_SETTINGS, 0, 0, b"")),
    ("PRIORITY", _h2_frame(_PRIORITY, 0, 5, struct.pack(">IB", 0, 1))),
    ("unknown", _h2_frame(0x77, 0, 0, b"")),
)


def control_frames(plan: Plan) -> None:
    """Connections without a key send HTTP/2 control frames as fast as the server takes them."""
    poll = selectors.DefaultSelector()
    floods: dict[int, tuple[socket.socket, str, bytes]] = {}
    number = 0
    while not plan.is_over:
        while len(floods) < plan.many(8):
            sock = plan.connect()
            if sock is None:
                break
            kind, frame = _H2_FLOODS[number % len(_H2_FLOODS)]
            number += 1
            sock.sendall(H2_PREFACE + _h2_frame(_SETTINGS, 0, 0, b""))
            sock.setblocking(False)
            floods[sock.fileno()] = (sock, kind, frame * (65_536 // len(frame)))
            poll.register(sock, selectors.EVENT_READ | selectors.EVENT_WRITE)
        for key, events in poll.select(_WAIT_S):
            sock, kind, data = floods[key.fd]
            try:
                if events & selectors.EVENT_READ and not sock.recv(65_536):
                    raise ConnectionError
                if events & selectors.EVENT_WRITE:
                    plan.counts[f"bytes of {kind}"] += sock.send(data)
            except BlockingIOError:
                pass
            except OSError:
                plan.counts[f"closed for {kind}"] += 1
                poll.unregister(sock)
                sock.close()
                del floods[key.fd]
        sleep(0)


def _websocket(plan: Plan, *, receive_bytes: int = 0) -> socket.socket | None:
    sock = plan.connect(receive_bytes=receive_bytes)
    if sock is None:
        return None
    upgrade = ("Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13")
    key = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="
    try:
        sock.sendall(_head("GET", "/v0/ws", plan.reader, 0, *upgrade, key))
        answer = sock.recv(4096)
    except OSError:
        answer = b""
    if answer[9:12] == b"101":
        return sock
    plan.counts[f"socket answered {answer[9:12].decode(errors='replace')}"] += 1
    sock.close()
    return None


def _socket_frame(opcode: int, payload: bytes) -> bytes:
    """A masked frame, with a mask of zeros."""
    if len(payload) < 126:
        return bytes((opcode, 0x80 | len(payload))) + bytes(4) + payload
    return bytes((opcode, 0x80 | 126)) + struct.pack(">H", len(payload)) + bytes(4) + payload


def socket_frames(plan: Plan) -> None:
    """WebSockets send pings, and messages in fragments of nothing."""
    frames = (_socket_frame(0x89, b""), _socket_frame(0x00, b""))
    floods: dict[int, tuple[socket.socket, bytes]] = {}
    poll = selectors.DefaultSelector()
    number = 0
    while not plan.is_over:
        while len(floods) < plan.many(8):
            sock = _websocket(plan)
            if sock is None:
                break
            frame = frames[number % 2]
            number += 1
            if frame is frames[1]:
                sock.sendall(_socket_frame(0x01, b"{"))
            sock.setblocking(False)
            floods[sock.fileno()] = (sock, frame * (65_536 // len(frame)))
            poll.register(sock, selectors.EVENT_READ | selectors.EVENT_WRITE)
        for key, events in poll.select(_WAIT_S):
            sock, data = floods[key.fd]
            try:
                if events & selectors.EVENT_READ and not sock.recv(65_536):
                    raise ConnectionError
                if events & selectors.EVENT_WRITE:
                    plan.counts["bytes of frames"] += sock.send(data)
            except BlockingIOError:
                pass
            except OSError:
                plan.counts["closed"] += 1
                poll.unregister(sock)
                sock.close()
                del floods[key.fd]
        sleep(_REOPEN_S if len(floods) < plan.many(8) else 0)


# -- 5: responses that are never read


def deaf_readers(plan: Plan) -> None:
    """Three hundred clients ask for pages of 8 MiB and read nothing."""
    body = json.dumps({"from_seq": 0, "limit": 1_000_000, "max_bytes": _PAGE_BYTES}).encode()
    request = _head("POST", "/v0/boxes/evil.big/diff", plan.reader, len(body)) + body
    _hold_deaf(plan, plan.many(300), request)


def _hold_deaf(plan: Plan, count: int, request: bytes) -> None:
    """Keep `count` connections that never read. A closed one is noticed by its error, not by reading."""
    deaf: list[socket.socket] = []
    poll = selectors.PollSelector()
    while not plan.is_over:
        for _ in range(min(32, count - len(deaf))):
            sock = plan.connect(receive_bytes=4096)
            if sock is None:
                break
            sock.sendall(request)
            deaf.append(sock)
            poll.register(sock, selectors.EVENT_WRITE)
        for key, _ in poll.select(_WAIT_S):
            sock = key.fileobj  # type: ignore[assignment]
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) or _is_cut(sock):
                plan.counts["cut off"] += 1
                poll.unregister(sock)
                deaf.remove(sock)
                sock.close()
        sleep(_WAIT_S)
    plan.counts["open at the end"] = len(deaf)


def _is_cut(sock: socket.socket) -> bool:
    """True when the connection is not established any more (tcpi_state)."""
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != 1


def deaf_sockets(plan: Plan) -> None:
    """Two hundred WebSockets watch a large box from its start and read nothing."""
    watch = _socket_frame(
        0x81, json.dumps({"op": "subscribe", "boxes": {"evil.big": {"from_seq": 0}}}).encode()
    )
    deaf: list[socket.socket] = []
    while not plan.is_over:
        for _ in range(min(8, plan.many(200) - len(deaf))):
            sock = _websocket(plan, receive_bytes=4096)
            if sock is None:
                break
            sock.sendall(watch)
            deaf.append(sock)
        for sock in [each for each in deaf if _is_cut(each)]:
            plan.counts["cut off"] += 1
            deaf.remove(sock)
            sock.close()
        sleep(_WAIT_S)
    plan.counts["open at the end"] = len(deaf)


# -- 6 and 7: connections and boxes


def idle_connections(plan: Plan) -> None:
    """More connections than a gateway has room for are opened and say nothing."""
    _keep_open(plan, plan.many(10_050), lambda number: plan.connect())


def box_hoarder(plan: Plan) -> None:
    """One key makes boxes as fast as it can."""
    number = 0
    while not plan.is_over:
        sock = plan.connect()
        if sock is None:
            sleep(_REOPEN_S)
            continue
        with sock:
            try:
                while not plan.is_over:
                    heads = [
                        _head("PUT", f"/v0/boxes/evil.h{number + each}", plan.writer, 2) for each in range(16)
                    ]
                    number += 16
                    sock.sendall(b"".join(head + b"{}" for head in heads))
                    answers = b""
                    while answers.count(b"HTTP/1.1 ") < 16 or not answers.endswith(b"}"):
                        data = sock.recv(65_536)
                        if not data:
                            raise ConnectionError
                        answers += data
                    for status in re.findall(rb"HTTP/1\.1 (\d{3})", answers):
                        plan.counts[f"answered {status.decode()}"] += 1
            except OSError:
                plan.counts["closed"] += 1


# -- 8: the disk


def disk_filler(plan: Plan) -> None:
    """One key appends a megabyte at a time as fast as it can, on eight connections."""
    body = b'{"records":[{"data":"' + b"d" * 1_000_000 + b'"}]}'

    def begin(number: int) -> socket.socket | None:
        sock = plan.connect()
        if sock is not None:
            try:
                sock.sendall(
                    _head("POST", f"/v0/boxes/evil.fill-{number % 8}", plan.writer, len(body)) + body
                )
            except OSError:
                plan.counts["cut while sending"] += 1
        return sock

    _keep_open(plan, plan.many(8), begin)


ATTACKS: dict[str, Callable[[Plan], None]] = {
    "greedy-readers": greedy_readers,
    "silent-bodies": silent_bodies,
    "compressed-bombs": compressed_bombs,
    "control-frames": control_frames,
    "socket-frames": socket_frames,
    "deaf-readers": deaf_readers,
    "deaf-sockets": deaf_sockets,
    "idle-connections": idle_connections,
    "box-hoarder": box_hoarder,
    "disk-filler": disk_filler,
}


def main() -> None:
    os.nice(NICENESS)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    plan = Plan(json.loads(sys.stdin.read()))
    ATTACKS[sys.argv[1]](plan)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    json.dump({"counts": dict(plan.counts), "cpu_s": round(usage.ru_utime + usage.ru_stime, 2)}, sys.stdout)


if __name__ == "__main__":
    main()
