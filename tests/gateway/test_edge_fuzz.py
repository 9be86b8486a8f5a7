"""Goal: no bytes make the edge crash, hang, answer nonsense, or see a request that a strict reader does not.

Method: valid conversations are built from a grammar, mutated, cut at random points and sent over sockets.
A second, deliberately naive parser in this file says which requests those bytes contain. Everything the
handler saw must be a prefix of that list, equal in every part: a request smuggled past the edge, or made up
by it, is in one list only. The edge may be stricter than the reference, never laxer; bytes that were not
mutated it must serve in full.

`STREAMS_FUZZ_SECONDS` (25) says for how long, `STREAMS_FUZZ_SEED` repeats a run, and with it
`STREAMS_FUZZ_CASE` repeats one case. It runs in a process of its own that is nice to the tests beside it:
they must end, and this would take a whole core for as long as it may.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import structlog
import trio

from gateway.http.edge import FrontLimits
from gateway.http.h1 import ChunkedBody
from streams.protocol.errors import StreamsError
from tests.gateway.edge_harness import (
    Malformed,
    Recorder,
    Running,
    no_connections,
    parse_answers,
    read_to_end,
    running_front,
)

SECONDS = float(os.environ.get("STREAMS_FUZZ_SECONDS", "25"))
SEED = int(os.environ.get("STREAMS_FUZZ_SEED") or random.SystemRandom().randrange(10**9))
ONE_CASE = os.environ.get("STREAMS_FUZZ_CASE")
NICE = 5

LIMITS = FrontLimits(
    head_bytes_max=2048,
    header_count_max=20,
    url_bytes_max=256,
    body_bytes_max=4096,
    head_timeout_s=2,
    body_timeout_s=2,
    keep_alive_s=2,
    linger_s=2,
)


# The reference: what requests are in these bytes? Slow, plain, and sharing nothing with the server.

METHODS = frozenset(
    b"DELETE GET HEAD POST PUT OPTIONS TRACE COPY LOCK MKCOL MOVE PROPFIND PROPPATCH SEARCH UNLOCK BIND "
    b"REBIND UNBIND ACL REPORT MKACTIVITY CHECKOUT MERGE M-SEARCH NOTIFY SUBSCRIBE UNSUBSCRIBE PATCH PURGE "
    b"MKCALENDAR LINK UNLINK SOURCE QUERY".split()
)
TOKEN = frozenset(b"!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
VALUE = frozenset([9, *range(32, 127), *range(128, 256)])
TARGET = frozenset(range(33, 127)) - {ord("#")}
HEX = frozenset(b"0123456789abcdefABCDEF")


class Bad(Exception):
    pass


@dataclass
class Seen:
    method: str
    target: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Reading:
    requests: list[Seen] = field(default_factory=list)
    #: How it ended: every byte used, the client asked to close, refused, or passed to Hypercorn.
    end: str = "used up"


def read_reference(wire: bytes) -> Reading:
    reading = Reading()
    try:
        while True:
            if wire[:2] == b"\r\n":
                wire = wire[2:]
            if not wire:
                return reading
            at = wire.find(b"\r\n\r\n")
            if at < 0:
                raise Bad("no end of head")
            head, wire = wire[: at + 4], wire[at + 4 :]
            if head == b"PRI * HTTP/2.0\r\n\r\n" and not reading.requests:
                reading.end = "passed on"
                return reading
            request, version, length = read_head(head)
            connection = request.headers.get("connection", "").lower()
            if "upgrade" in connection and "upgrade" in request.headers:
                reading.end = "passed on"
                return reading
            if length is None:
                request.body, wire = read_chunks(wire)
            else:
                if length > LIMITS.body_bytes_max or length > len(wire):
                    raise Bad("body too long or cut short")
                request.body, wire = wire[:length], wire[length:]
            reading.requests.append(request)
            options = [option.strip() for option in connection.split(",")]
            if "close" in options or (version == b"HTTP/1.0" and "keep-alive" not in options):
                reading.end = "closed"
                return reading
    except Bad:
        reading.end = "refused"
        return reading


def read_head(head: bytes) -> tuple[Seen, bytes, int | None]:
    if len(head) > LIMITS.head_bytes_max:
        raise Bad("head too long")
    first, *lines = head[:-4].split(b"\r\n")
    words = first.split(b" ")
    if len(words) != 3:
        raise Bad("request line")
    method, target, version = words
    if method not in METHODS or not target or not set(target) <= TARGET or len(target) > LIMITS.url_bytes_max:
        raise Bad("method or target")
    if version not in (b"HTTP/1.1", b"HTTP/1.0"):
        raise Bad("version")
    headers: dict[str, str] = {}
    if len(lines) > LIMITS.header_count_max:
        raise Bad("too many headers")
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon or not name or not set(name) <= TOKEN or not set(value) <= VALUE:
            raise Bad("header")
        key, text = name.decode().lower(), value.strip(b" \t").decode("latin-1")
        if key in headers and key in ("content-length", "transfer-encoding", "host"):
            raise Bad("sent twice")
        headers[key] = f"{headers[key]}, {text}" if key in headers else text
    if version == b"HTTP/1.1" and "host" not in headers:
        raise Bad("no host")
    request = Seen(method.decode(), target.decode(), headers, b"")
    coding, length = headers.get("transfer-encoding"), headers.get("content-length")
    if coding is not None:
        if coding.lower() != "chunked" or length is not None or version == b"HTTP/1.0":
            raise Bad("framing")
        return request, version, None
    if length is None:
        return request, version, 0
    if not length or not set(length) <= set("0123456789"):
        raise Bad("length")
    return request, version, int(length)


def read_target(target: str) -> tuple[str, str]:
    path, _, query = target.partition("?")
    if target[0] not in "/*":
        scheme, _, rest = path.partition("://")
        assert scheme.lower() in ("http", "https")
        path = "/" + rest.partition("/")[2]
    return path, query


def read_chunks(wire: bytes) -> tuple[bytes, bytes]:
    body = b""
    while True:
        line, wire = cut_line(wire)
        size, semicolon, extension = line.partition(b";")
        if not size or not set(size) <= HEX or (semicolon and not set(extension) <= VALUE):
            raise Bad("chunk size")
        count = int(size, 16)
        if count == 0:
            break
        if len(body) + count > LIMITS.body_bytes_max or count > len(wire):
            raise Bad("chunk too long or cut short")
        body, wire = body + wire[:count], wire[count:]
        nothing, wire = cut_line(wire)
        if nothing:
            raise Bad("chunk longer than it says")
    while True:
        line, wire = cut_line(wire)
        if not line:
            return body, wire
        name, colon, value = line.partition(b":")
        if not colon or not name or not set(name) <= TOKEN or not set(value) <= VALUE:
            raise Bad("trailer")


def cut_line(wire: bytes) -> tuple[bytes, bytes]:
    line, end, rest = wire.partition(b"\r\n")
    if not end:
        raise Bad("cut short")
    return line, rest


# The grammar.


def build_request(rng: random.Random, number: int) -> bytes:
    method = rng.choice(["GET", "POST", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"])
    path = rng.choice(["/", "/v0/boxes/a", "/v0/boxes/a%2Fb?x=1", f"/{number}", "//", "/?", "http://h/x?y"])
    version = rng.choice(["1.1"] * 9 + ["1.0"])
    fields = [("Host", rng.choice(["x", "127.0.0.1:80", "[::1]", ""]))]
    for _ in range(rng.randrange(4)):
        fields.append(
            rng.choice(
                [
                    ("User-Agent", "fuzz/1 (a; b)"),
                    ("Accept", "*/*"),
                    ("X-Empty", ""),
                    ("X-Latin", "\xe9\xff"),
                    ("X-Spaces", " \t a  b \t"),
                    ("Content-Type", "application/json"),
                    ("Connection", rng.choice(["keep-alive", "foo", "Keep-Alive, foo"])),
                ]
            )
        )
    framing = rng.choice(["none", "length", "length", "chunked"])
    if version == "1.0" and framing == "chunked":
        framing = "length"
    body = bytes(rng.choice(b"abc\r\n0GET /:") for _ in range(rng.choice([0, 1, 5, 17, 300])))
    if framing == "length":
        fields.append((rng.choice(["Content-Length", "content-length"]), str(len(body))))
    elif framing == "chunked":
        fields.append(("Transfer-Encoding", rng.choice(["chunked", "Chunked"])))
        body = build_chunks(rng, body)
    else:
        body = b""
    if framing != "none" and rng.random() < 0.1:
        fields.append(("Expect", "100-continue"))
    if rng.random() < 0.05:
        fields.append(("Connection", "close"))
    if rng.random() < 0.02:
        fields += [("Connection", "Upgrade, HTTP2-Settings"), ("HTTP2-Settings", "AAMAAABkAAQAAP__")]
        fields.append(("Upgrade", rng.choice(["h2c", "websocket", "other"])))
    rng.shuffle(fields)
    lines = [
        f"{method} {path} HTTP/{version}",
        *(f"{name}:{rng.choice(['', ' '])}{value}" for name, value in fields),
    ]
    empty = b"\r\n" if rng.random() < 0.05 else b""
    return empty + ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + body


def build_chunks(rng: random.Random, body: bytes) -> bytes:
    wire = b""
    while body:
        size = rng.randint(1, len(body))
        text = rng.choice(["%x", "%X", "0%x"]) % size
        extension = rng.choice(["", "", ";a", ';a=b;c="d e"'])
        wire += f"{text}{extension}\r\n".encode() + body[:size] + b"\r\n"
        body = body[size:]
    trailers = rng.choice([b"", b"", b"T: v\r\n", b"T: v\r\nU:\r\n"])
    return wire + rng.choice([b"0", b"000", b"0;x"]) + b"\r\n" + trailers + b"\r\n"


SNIPPETS = [
    *(
        b"\r\n",
        b"\n",
        b"\r",
        b"\0",
        b" ",
        b"\t",
        b"\x0b",
        b":",
        b",",
        b";",
        b"+",
        b"-",
        b"0x",
        b"#",
        b"\xff",
        b"\x7f",
    ),
    *(
        b"\r\n\r\n",
        b"\r\n ",
        b"\r\n\t",
        b"\n\n",
        b"\r\r\n",
        b"0\r\n\r\n",
        b"5\r\n",
        b"ffffffffffffffff\r\n",
        b"1e1",
    ),
    *(
        b"Content-Length: 5\r\n",
        b"Content-Length: 0\r\n",
        b"Content-Length : 5\r\n",
        b"Content-Length: 5, 5\r\n",
    ),
    *(
        b"Content-Length: +5\r\n",
        b"Content-Length:\r\n",
        b"content-length:\t5\r\n",
        b"Content-Length: 99999999999\r\n",
    ),
    *(
        b"Transfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: identity\r\n",
        b"Transfer-Encoding : chunked\r\n",
    ),
    *(
        b"Transfer-Encoding:\x0bchunked\r\n",
        b"Transfer-Encoding: xchunked\r\n",
        b"transfer-encoding: gzip, chunked\r\n",
    ),
    *(
        b"Transfer-Encoding:\r\n chunked\r\n",
        b"Transfer-Encoding: chunked, chunked\r\n",
        b"\rTransfer-Encoding: chunked\r\n",
    ),
    *(
        b"Host: y\r\n",
        b"Connection: close\r\n",
        b"Connection: keep-alive\r\n",
        b"Expect: 100-continue\r\n",
        b"Expect: x\r\n",
    ),
    *(
        b"Upgrade: h2c\r\n",
        b"Connection: upgrade\r\n",
        b"HTTP2-Settings: AAMAAABk\r\n",
        b"X: " + b"a" * 3000 + b"\r\n",
    ),
    *(
        b"X: y\r\n" * 30,
        b"a" * 300,
        b"GET /smuggled HTTP/1.1\r\nHost: x\r\n\r\n",
        b"HTTP/1.0",
        b"HTTP/2.0",
        b"RTSP/1.0",
    ),
    *(
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"CONNECT",
        b"TRACE",
        b"\x16\x03\x01",
        b"0",
        b"00000000000000000",
        b"G",
        b"%",
    ),
]


def mutate(rng: random.Random, wire: bytes) -> bytes:
    kind = rng.randrange(8)
    at = rng.randrange(len(wire) + 1)
    if rng.random() < 0.5:  # Aim at the borders of lines, where framing lives.
        borders = [i for i in range(len(wire)) if wire[i] in b"\r\n: "]
        at = rng.choice(borders) + rng.randrange(-1, 2) if borders else at
        at = max(0, min(at, len(wire)))
    end = min(len(wire), at + rng.choice([1, 1, 2, 4, 40]))
    if kind <= 2:
        return wire[:at] + rng.choice(SNIPPETS) + wire[at:]
    if kind == 3:
        return wire[:at] + rng.choice(SNIPPETS) + wire[end:]
    if kind == 4:
        return wire[:at] + wire[end:]
    if kind == 5:
        return wire[:end] + wire[at:]
    if kind == 6:
        return wire[:at] + bytes([rng.randrange(256)]) + wire[at + 1 :]
    return wire[:at] if rng.random() < 0.3 else wire[:at] + wire[at : at + 1].swapcase() + wire[at + 1 :]


@dataclass
class Case:
    wire: bytes
    pieces: list[bytes]
    is_mutated: bool


def build_case(index: int) -> Case:
    rng = random.Random(f"{SEED}:{index}")
    if rng.random() < 0.02:
        wire, is_mutated = rng.randbytes(rng.randrange(1, 200)), True
    else:
        wire = b"".join(build_request(rng, number) for number in range(rng.choice([1, 1, 2, 3])))
        count = rng.choice([0, 1, 1, 1, 2, 2, 3, 5])
        is_mutated = count > 0
        for _ in range(count):
            wire = mutate(rng, wire)
    cuts = sorted(rng.randrange(len(wire) + 1) for _ in range(rng.choice([0, 0, 1, 2, 6])))
    pieces = [wire[a:b] for a, b in zip([0, *cuts], [*cuts, len(wire)], strict=True) if a < b]
    return Case(wire, pieces, is_mutated)


# The check.


async def send(running: Running, case: Case) -> bytes:
    async with await running.connect() as stream:
        try:
            for piece in case.pieces:
                await stream.send_all(piece)
                # Two turns of the loop let the server read this piece before the next one comes.
                await trio.lowlevel.checkpoint()
                await trio.lowlevel.checkpoint()
            await stream.send_eof()
        except trio.BrokenResourceError:
            pass  # It has closed on us, as it may. What it said is still to be read.
        return await read_to_end(stream)


def check(case: Case, raw: bytes, recorder: Recorder) -> str:
    reading = read_reference(case.wire)
    seen = recorder.requests
    common = seen[: len(reading.requests)] if reading.end == "passed on" else seen
    assert len(common) <= len(reading.requests), "the handler saw a request that is not there"
    for request, wanted in zip(common, reading.requests, strict=False):
        assert (request.method, request.path, request.query) == (wanted.method, *read_target(wanted.target))
        assert request.headers == wanted.headers
        assert bytes(request.body) == wanted.body
    if reading.end == "passed on":
        return reading.end
    methods = [request.method for request in seen]
    if raw.endswith(b"connection: close\r\n\r\n"):
        methods.append("HEAD")  # The one that was refused.
    answers = parse_answers(raw, methods=methods)
    served = [answer for answer in answers if answer.status == 200]
    assert len(served) == len(seen), "answers and requests do not match"
    refused = answers[len(served) :]
    if len(seen) == len(reading.requests) and reading.end != "refused" and not refused:
        return reading.end
    assert case.is_mutated, "a good request was refused"
    [last] = refused
    assert last.status in (400, 413)
    assert last.headers["connection"] == "close"
    return "refused" if reading.end == "refused" else "stricter"


def check_chunks(case: Case) -> None:
    """However chunked bytes are cut, they are the same body or the same refusal."""
    _, found, wire = case.wire.partition(b"\r\n\r\n")
    if not found or not wire:
        return
    results = []
    for pieces in ([wire], [wire[at : at + 1] for at in range(len(wire))]):
        body = ChunkedBody(LIMITS)
        try:
            while pieces and not body.is_complete:
                body.feed_untrusted(pieces.pop(0))
            results.append(
                (
                    body.is_complete,
                    bytes(body.body),
                    body.rest + b"".join(pieces) if body.is_complete else b"",
                )
            )
        except StreamsError as error:
            results.append((error.code,))
    assert results[0] == results[1]


async def assert_serves(running: Running, recorder: Recorder) -> None:
    recorder.requests.clear()
    good = Case(b"", [b"GET /good HTTP/1.1\r\nHost: x\r\n\r\n"], is_mutated=False)
    assert [answer.status for answer in parse_answers(await send(running, good))] == [200]
    assert recorder.lines == ["GET /good"]


async def fuzz() -> None:
    recorder = Recorder()
    tally: dict[str, int] = {}
    ends = time.monotonic() + SECONDS
    index = int(ONE_CASE or 0)
    with structlog.testing.capture_logs() as logs:
        async with running_front(recorder, limits=LIMITS, patience_s=SECONDS + 60) as running:
            while time.monotonic() < ends:
                case = build_case(index)
                recorder.requests.clear()
                raw = b""
                try:
                    raw = await send(running, case)
                    verdict = check(case, raw, recorder)
                    if (
                        verdict == "passed on"
                    ):  # Hypercorn may still serve it, and the next case must not see it.
                        await no_connections(running)
                    check_chunks(case)
                    assert not [line for line in logs if line["log_level"] == "error"], logs
                except (AssertionError, Malformed, ValueError, trio.TooSlowError) as error:
                    raise AssertionError(
                        f"STREAMS_FUZZ_SEED={SEED} STREAMS_FUZZ_CASE={index}: {error!r}\n"
                        f"sent {case.pieces!r}\nreceived {raw!r}\nhandler saw {recorder.requests!r}\n"
                        f"reference {read_reference(case.wire)!r}"
                    ) from error
                logs.clear()
                tally[verdict] = tally.get(verdict, 0) + 1
                if index % 25 == 0:
                    await assert_serves(running, recorder)
                index += 1
                if ONE_CASE:
                    break
            await assert_serves(running, recorder)
            await no_connections(running)
            assert running.front.statistics().body_bytes_in_flight == 0
    print(f"fuzz: {sum(tally.values())} cases, {tally}", flush=True)


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 240)
def test_no_bytes_confuse_the_edge(capsys):
    with capsys.disabled():
        print(f"\nfuzz: STREAMS_FUZZ_SEED={SEED} STREAMS_FUZZ_SECONDS={SECONDS:g}", flush=True)
    ran = subprocess.run(
        [sys.executable, "-m", "tests.gateway.test_edge_fuzz"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "STREAMS_FUZZ_SEED": str(SEED)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS + 200,
    )
    assert ran.returncode == 0, ran.stdout
    with capsys.disabled():
        print(ran.stdout, end="", flush=True)
    served = int(re.fullmatch(r"fuzz: (\d+) cases, .*\n", ran.stdout)[1])
    assert served > 0


def test_the_reference_reads_what_the_grammar_writes():
    for index in range(2000):
        case = build_case(index)
        if not case.is_mutated:
            assert read_reference(case.wire).end in ("used up", "closed", "passed on")


def test_same_seed_same_cases():
    assert [build_case(index) for index in range(200)] == [build_case(index) for index in range(200)]


if __name__ == "__main__":
    os.nice(NICE)
    trio.run(fuzz)
