"""Goal: one request has one reading. Method: the pure parsers, fed whole and byte by byte, no sockets."""

from __future__ import annotations

import pytest

from gateway.http.edge_rules import CHUNKED, FrontLimits, split_target
from gateway.http.h1 import (
    LINES_PER_FEED_MAX,
    ChunkedBody,
    HeadMemory,
    HeadWriter,
    check_partial_head_untrusted,
    parse_head_untrusted,
)
from streams.protocol.errors import InvalidRequest, PayloadTooLarge
from tests.gateway.edge_harness import head_and

LIMITS = FrontLimits(head_bytes_max=2048, header_count_max=16, url_bytes_max=256, body_bytes_max=1000)


def parse(raw: bytes):
    return parse_head_untrusted(raw, LIMITS)


def unchunk(wire: bytes, *, step: int | None = None) -> ChunkedBody:
    body = ChunkedBody(LIMITS)
    for at in range(0, len(wire), step or len(wire)):
        if body.is_complete:
            body.rest += wire[at : at + (step or len(wire))]
        else:
            body.feed_untrusted(wire[at : at + (step or len(wire))])
    return body


def test_a_head_is_read_as_it_came():
    head = parse(head_and(line="POST /v0/boxes/a%2Fb?x=%20&y HTTP/1.1", Content_Length="5", X_Tab="a \t "))
    assert (head.method, head.path, head.query, head.length) == ("POST", "/v0/boxes/a%2Fb", "x=%20&y", 5)
    assert head.headers == {"host": "x", "content-length": "5", "x-tab": "a"}
    assert head.keep_alive and not head.upgrades and not head.expects_continue


def test_a_header_sent_twice_is_joined():
    assert parse(b"GET / HTTP/1.1\r\nHost: x\r\nA: 1\r\na: 2\r\n\r\n").headers["a"] == "1, 2"


@pytest.mark.parametrize(
    ("version", "connection", "keeps"),
    [
        ("1.1", None, True),
        ("1.1", "close", False),
        ("1.1", "Foo, CLOSE", False),
        ("1.1", "keep-alive, close", False),
        ("1.0", None, False),
        ("1.0", "Keep-Alive", True),
        ("1.0", "keep-alive, close", False),
    ],
)
def test_keep_alive_follows_version_and_connection(version, connection, keeps):
    fields = {} if connection is None else {"Connection": connection}
    assert parse(head_and(line=f"GET / HTTP/{version}", **fields)).keep_alive is keeps


@pytest.mark.parametrize("line", ["GET / HTTP/1.1", "GET /?a HTTP/1.1", "M-SEARCH / HTTP/1.0"])
def test_good_request_lines(line):
    assert parse(head_and(line=line)).path == "/"


@pytest.mark.parametrize(
    "line",
    [
        "GET  / HTTP/1.1",
        "GET /  HTTP/1.1",
        "GET / HTTP/1.1 ",
        " GET / HTTP/1.1",
        "\nGET / HTTP/1.1",
        "\rGET / HTTP/1.1",
        "GET\t/ HTTP/1.1",
        "get / HTTP/1.1",
        "GET / http/1.1",
        "GET / HTTP/0.9",
        "GET / HTTP/1.2",
        "GET / HTTP/2.0",
        "GET / HTTP/11",
        "GET / RTSP/1.0",
        "GET / ICE/1.0",
        "GET /",
        "GET",
        "FOO / HTTP/1.1",
        "GET abc HTTP/1.1",
        "GET * HTTP/1.1",
        "GET /a#b HTTP/1.1",
        "GET /a\x00b HTTP/1.1",
        "GET /a\x7f HTTP/1.1",
        "GET /\xe9 HTTP/1.1",
        "GET ftp://h/ HTTP/1.1",
        "GET http:///a HTTP/1.1",
        "GET http://user@h/a HTTP/1.1",
        "CONNECT h:1 HTTP/1.1",
        "CONNECT http://h/ HTTP/1.1",
        "PRI * HTTP/2.0",
    ],
)
def test_bad_request_lines_are_refused(line):
    with pytest.raises(InvalidRequest):
        parse(head_and(line=line))


@pytest.mark.parametrize(
    ("target", "path", "query"),
    [
        ("/", "/", ""),
        ("/a?b?c", "/a", "b?c"),
        ("//a", "//a", ""),
        ("http://h", "/", ""),
        ("HTTP://h:1/a?b", "/a", "b"),
        ("https://h?b", "/", "b"),
    ],
)
def test_targets_in_origin_and_absolute_form(target, path, query):
    assert split_target("GET", target) == (path, query)


def test_the_asterisk_is_for_options():
    assert split_target("OPTIONS", "*") == ("*", "")


BAD_FIELDS = [
    b"Content-Length: 1\r\nTransfer-Encoding: chunked",
    b"Transfer-Encoding: chunked\r\nContent-Length: 1",
    b"Content-Length: 1\r\nContent-Length: 1",
    b"Content-Length: 1\r\nContent-Length: 2",
    b"Content-Length: 1, 1",
    b"Content-Length: 1,1",
    b"Content-Length: +1",
    b"Content-Length: -1",
    b"Content-Length: 1 1",
    b"Content-Length: 0x1",
    b"Content-Length: 1e3",
    b"Content-Length: 1.0",
    b"Content-Length: \x0b1",
    b"Content-Length:",
    b"Content-Length: \xb2",
    b"Content-Length: 18446744073709551617",
    b"Content-Length: 99999999999999999999999",
    b"Content-Length : 1",
    b"Transfer-Encoding: gzip, chunked",
    b"Transfer-Encoding: chunked, gzip",
    b"Transfer-Encoding: chunked, chunked",
    b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
    b"Transfer-Encoding: identity\r\nTransfer-Encoding: chunked",
    b"Transfer-Encoding: identity",
    b"Transfer-Encoding: xchunked",
    b"Transfer-Encoding: chunked;q=1",
    b'Transfer-Encoding: "chunked"',
    b"Transfer-Encoding: \x0bchunked",
    b"Transfer-Encoding: chunked\x0b",
    b"Transfer-Encoding : chunked",
    b"Transfer-Encoding\t: chunked",
    b"Transfer-Encoding:\r\n chunked",
    b"Transfer-Encoding:",
    b"X: y\r\nTransfer-Encoding: chunke",
    b" Transfer-Encoding: chunked",
    b"X: a\r\n b",
    b"X: a\r\n\tb",
    b"X: a\nY: b",
    b"X: a\rY: b",
    b"X: a\r\r\nY: b",
    b"X: a\x00b",
    b"X: a\x01b",
    b"X: a\x7fb",
    b"X(Y: a",
    b"X Y: a",
    b"X\x00: a",
    b"X\xc3: a",
    b": a",
    b"no colon",
    b"Host: y",
    b"Expect: 200-ok",
    b"Expect: 100-continue, 100-continue",
]


@pytest.mark.parametrize("fields", BAD_FIELDS)
def test_bad_fields_are_refused(fields):
    with pytest.raises(InvalidRequest):
        parse(b"POST / HTTP/1.1\r\nHost: x\r\n" + fields + b"\r\n\r\n")


@pytest.mark.parametrize("host", ["", "a", "a:1", "[::1]:80", "EXAMPLE.com."])
def test_good_hosts(host):
    assert parse(b"GET / HTTP/1.1\r\nHost: %b\r\n\r\n" % host.encode()).headers["host"] == host


@pytest.mark.parametrize("host", ["a b", "a,b", "a/b", "user@a", "a?b", "a#b", "\xe9"])
def test_bad_hosts_are_refused(host):
    with pytest.raises(InvalidRequest):
        parse(b"GET / HTTP/1.1\r\nHost: %b\r\n\r\n" % host.encode("latin-1"))


def test_host_is_required_since_1_1():
    assert parse(b"GET / HTTP/1.0\r\n\r\n").headers == {}
    with pytest.raises(InvalidRequest, match="Host"):
        parse(b"GET / HTTP/1.1\r\n\r\n")


def test_chunks_do_not_exist_in_1_0():
    with pytest.raises(InvalidRequest):
        parse(b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n")


def test_head_limits():
    parse(head_and(line="GET / HTTP/1.1", **{f"X{i}": "" for i in range(15)}))
    with pytest.raises(InvalidRequest, match="16 headers"):
        parse(head_and(line="GET / HTTP/1.1", **{f"X{i}": "" for i in range(16)}))
    parse(head_and(line="GET /%s HTTP/1.1" % ("a" * 255)))
    with pytest.raises(InvalidRequest, match="256 bytes"):
        parse(head_and(line="GET /%s HTTP/1.1" % ("a" * 256)))
    with pytest.raises(InvalidRequest, match="2048 bytes"):
        parse(head_and(line="GET / HTTP/1.1", X="a" * 2048))


@pytest.mark.parametrize("partial", [b"G", b"GET / HTTP/1.1\r\nHo", b"GET / HTTP/1.1\r", b"\r", b"PRI"])
def test_a_good_beginning_is_waited_for(partial):
    check_partial_head_untrusted(partial, LIMITS)


@pytest.mark.parametrize(
    "partial",
    [
        b"\x16\x03\x01\x02\x00\x01",
        b"\x00",
        b"\n",
        b"\rX",
        b" G",
        b"get / HTTP/1.1",
        b"GET / HTTP/1.1\n",
        b"GET / HTTP/1.1\r\nA: b\nC",
        b"SSH-2.0-x\r\n",
        b"GET /\r\n",
        b"A" * 2048,
    ],
)
def test_what_cannot_become_a_head_is_refused_early(partial):
    with pytest.raises(InvalidRequest):
        check_partial_head_untrusted(partial, LIMITS)


def test_remembered_heads_are_the_parsed_ones_and_bounded(monkeypatch):
    monkeypatch.setattr(HeadMemory, "COUNT_MAX", 4)
    memory = HeadMemory(LIMITS)
    raw = head_and(Content_Length="5")
    assert memory.parse_untrusted(raw) is memory.parse_untrusted(bytes(bytearray(raw)))
    for length in range(20):
        assert memory.parse_untrusted(head_and(Content_Length=str(length))).length == length
        assert len(memory._heads) <= 4
    for _ in range(2):
        with pytest.raises(InvalidRequest):
            memory.parse_untrusted(b"bad\r\n\r\n")
    long = head_and(X="a" * 1500)
    assert memory.parse_untrusted(long) is not memory.parse_untrusted(long)


GOOD_CHUNKS = [
    (b"0\r\n\r\n", b""),
    (b"1\r\na\r\n0\r\n\r\n", b"a"),
    (b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n", b"abcde"),
    (b"A\r\n0123456789\r\n0\r\n\r\n", b"0123456789"),
    (b"00000a\r\n0123456789\r\n000\r\n\r\n", b"0123456789"),
    (b'1;a=b;c="d e"\r\na\r\n0;x\r\n\r\n', b"a"),
    (b"1\r\na\r\n0\r\nT: v\r\nU:\r\n\r\n", b"a"),
    (b"4\r\n\r\n\r\n\r\n0\r\n\r\n", b"\r\n\r\n"),
]


@pytest.mark.parametrize("step", [None, 1, 2, 3])
@pytest.mark.parametrize(("wire", "body"), GOOD_CHUNKS)
def test_chunked_bodies_and_what_follows(wire, body, step):
    read = unchunk(wire + b"GET /next", step=step)
    assert read.is_complete
    assert bytes(read.body) == body
    assert read.rest == b"GET /next"


@pytest.mark.parametrize("step", [None, 1, 2, 3])
@pytest.mark.parametrize(
    "wire",
    [
        b"1 \r\na\r\n0\r\n\r\n",
        b" 1\r\na\r\n0\r\n\r\n",
        b"1 ;a\r\na\r\n0\r\n\r\n",
        b"0x1\r\na\r\n0\r\n\r\n",
        b"+1\r\na\r\n0\r\n\r\n",
        b"-1\r\na\r\n0\r\n\r\n",
        b"1_0\r\na\r\n0\r\n\r\n",
        b"\r\na\r\n0\r\n\r\n",
        b";a\r\na\r\n0\r\n\r\n",
        b"g\r\na\r\n0\r\n\r\n",
        b"\xd9\xa1\r\na\r\n0\r\n\r\n",
        b"10000000000000001\r\na\r\n0\r\n\r\n",
        b"0000000000000001\r\na\r\n0\r\n\r\n",
        b"1\na\r\n0\r\n\r\n",
        b"1\r\na\n0\r\n\r\n",
        b"1\r\na\r\n0\n\r\n",
        b"1\r\na\r\n0\r\n\n\r\n",
        b"1\ra\r\n0\r\n\r\n",
        b"1\r\naXX\r\n0\r\n\r\n",
        b"2\r\na\r\n0\r\n\r\n",
        b"1;a\nb\r\na\r\n0\r\n\r\n",
        b"1;a\rb\r\na\r\n0\r\n\r\n",
        b"1;a\x00b\r\na\r\n0\r\n\r\n",
        b"1;" + b"a" * 2000 + b"\r\na\r\n0\r\n\r\n",
        b"0\r\nContent-Length: 5\r\n\r\n",
        b"0\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"0\r\n folded: x\r\n\r\n",
        b"0\r\nX y: z\r\n\r\n",
        b"0\r\nno colon\r\n\r\n",
        b"0\r\nX: a\nY: b\r\n\r\n",
        b"0\r\n" + b"X: y\r\n" * 17 + b"\r\n",
        b"0\r\n" + b"X: %b\r\n" % (b"y" * 500) * 5 + b"\r\n",
    ],
)
def test_bad_chunks_are_refused(wire, step):
    with pytest.raises(InvalidRequest):
        unchunk(wire, step=step)


def test_a_chunked_body_is_bounded_before_it_is_read():
    unchunk(b"3e8\r\n" + b"a" * 1000 + b"\r\n0\r\n\r\n")
    with pytest.raises(PayloadTooLarge):
        unchunk(b"3e9\r\n")
    with pytest.raises(PayloadTooLarge):
        unchunk(b"3e8\r\n" + b"a" * 1000 + b"\r\n1\r\n")
    with pytest.raises(PayloadTooLarge):
        unchunk(b"fffffffffffffff\r\n")


def test_a_body_of_mostly_framing_is_refused():
    unchunk(b"1\r\na\r\n" * 1000 + b"0\r\n\r\n")
    with pytest.raises(InvalidRequest, match="framing"):
        unchunk(b"1;%b\r\na\r\n" % (b"x" * 100) * 1000 + b"0\r\n\r\n", step=500)


def test_an_unfinished_chunked_body_is_not_done():
    assert not unchunk(b"5\r\nabc").is_complete
    assert parse(head_and(Transfer_Encoding="CHUNKED")).length == CHUNKED


def test_a_response_header_cannot_carry_a_line_break():
    writer = HeadWriter()
    assert writer.render(200, [(b"x-a", b"b")], b"").endswith(b"GMT\r\nx-a: b\r\n\r\n")
    for value in (b"a\r\nb", b"a\nb", b"a\rb"):
        with pytest.raises(ValueError, match="line break"):
            writer.render(200, [(b"x-a", value)], b"")


def test_a_flood_of_tiny_chunks_is_parsed_a_part_at_a_time() -> None:
    chunked = ChunkedBody(FrontLimits())
    chunked.feed_untrusted(b"1\r\nx\r\n" * 10_000 + b"0\r\n\r\nrest")
    feeds = 1
    while chunked.is_behind:
        before = len(chunked.body)
        chunked.feed_untrusted(b"")
        feeds += 1
        assert len(chunked.body) - before <= LINES_PER_FEED_MAX
    assert chunked.is_complete and chunked.body == b"x" * 10_000 and chunked.rest == b"rest"
    assert feeds > 20_000 // LINES_PER_FEED_MAX
