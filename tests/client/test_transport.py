"""How a client of threads uses its connections, and what it says when they fail.

Method: a real socket on the other side, which sends the bytes that a test gives it.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

import streams
from streams.client import transport
from streams.client.errors import AnswerLost, Unreachable
from streams.client.transport import Transport
from streams.testing import Server

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


def read_request(sock: socket.socket) -> bytes:
    """The head of a request and its body; empty when the client has closed the connection."""
    text = b""
    while b"\r\n\r\n" not in text:
        piece = sock.recv(65536)
        if not piece:
            return text
        text += piece
    head, _, body = text.partition(b"\r\n\r\n")
    length = next(
        (int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), 0
    )
    while len(body) < length:
        body += sock.recv(65536)
    return head + b"\r\n\r\n" + body


@contextmanager
def serving(*talks: Callable[[socket.socket], object]) -> Iterator[str]:
    """Accept one connection for each talk, in order; the URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for talk in talks:
                sock = listener.accept()[0]
                with sock:
                    talk(sock)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join(10)
        assert not thread.is_alive(), "a connection that the test expects was not made"


@contextmanager
def opened(url: str) -> Iterator[Transport]:
    sender = Transport(url)
    try:
        yield sender
    finally:
        sender.close()


def answers(*contents: bytes) -> Callable[[socket.socket], None]:
    """Answer a request with each of these, then close the connection."""

    def talk(sock: socket.socket) -> None:
        for content in contents:
            assert read_request(sock)
            sock.sendall(content)

    return talk


def test_a_connection_is_used_again_and_one_that_was_closed_is_not() -> None:
    closed = threading.Event()

    def talk(sock: socket.socket) -> None:
        answers(OK, OK)(sock)
        sock.shutdown(socket.SHUT_RDWR)
        closed.set()

    with serving(talk, answers(OK)) as url, opened(url) as sender:
        assert [sender.send("GET", "/").body for _ in range(2)] == [b"{}", b"{}"]
        assert closed.wait(10)
        assert sender.send("POST", "/", b"[]").body == b"{}"


def test_the_path_and_the_password_of_the_address_are_sent() -> None:
    seen: list[bytes] = []

    def talk(sock: socket.socket) -> None:
        seen.append(read_request(sock))
        sock.sendall(OK)

    with serving(talk) as url, opened(url.replace("//", "//ann:s%20t@") + "/proxy") as sender:
        sender.send("GET", "/v0/health")
    assert seen[0].startswith(b"GET /proxy/v0/health HTTP/1.1\r\n")
    assert b"authorization: Basic YW5uOnMgdA==\r\n" in seen[0]


def test_the_answer_to_a_body_that_was_not_read_is_the_answer() -> None:
    """A server may refuse a body by its length and close the connection."""

    def talk(sock: socket.socket) -> None:
        while b"\r\n\r\n" not in sock.recv(65536, socket.MSG_PEEK):
            pass
        sock.sendall(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(65536):
            pass

    with serving(talk) as url, opened(url) as sender:
        assert sender.send("POST", "/", bytes(8 << 20)).status == 413


@pytest.mark.parametrize(
    "content",
    [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}", b"HTTP/1.1 200 OK\r\nCont", b"no HTTP\r\n"],
)
def test_an_answer_that_is_not_whole_is_lost(content: bytes) -> None:
    with serving(answers(content)) as url, opened(url) as sender, pytest.raises(AnswerLost, match=url):
        sender.send("GET", "/")


def test_a_stream_comes_in_pieces_and_ends_with_an_error_when_it_is_cut_off() -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    with (
        serving(answers(head + b"3\r\none\r\n3\r\ntwo\r\n")) as url,
        opened(url) as sender,
        pytest.raises(AnswerLost),
        sender.stream("GET", "/") as (answer, pieces),
    ):
        assert answer.status == 200
        assert b"".join(piece for _, piece in zip(range(2), pieces, strict=False)) == b"onetwo"
        next(pieces)


def test_a_client_that_is_closed_ends_the_streams_of_other_threads() -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n"
    reading, failures = threading.Event(), []

    def talk(sock: socket.socket) -> None:
        read_request(sock)
        sock.sendall(head)
        assert sock.recv(1) == b"", "the client closes the connection"

    def follow(sender: Transport) -> None:
        try:
            with sender.stream("GET", "/") as (_, pieces):
                for _ in pieces:
                    reading.set()
        except AnswerLost as error:
            failures.append(error)

    with serving(talk) as url:
        sender = Transport(url)
        thread = threading.Thread(target=follow, args=(sender,))
        thread.start()
        assert reading.wait(10)
        sender.close()
        thread.join(10)
    assert not thread.is_alive() and len(failures) == 1


def test_a_request_that_finds_all_connections_busy_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "CONNECTIONS_MAX", 1)
    done = threading.Event()

    def talk(sock: socket.socket) -> None:
        read_request(sock)
        sock.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert done.wait(10)

    with serving(talk) as url, opened(url) as sender, sender.stream("GET", "/"):
        monkeypatch.setattr(transport, "CONNECT_S", 0.01)
        with pytest.raises(Unreachable, match="all 1 connections are busy"):
            sender.send("GET", "/")
        done.set()


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x:99999", "http://x:0"])
def test_an_address_that_cannot_be_one_is_refused(url: str) -> None:
    for kind in (streams.Client, streams.AsyncClient):
        with pytest.raises(streams.InvalidRequest, match="url"):
            kind(url)


async def test_requests_write_no_log(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with streams.Client(server.url) as client:
        client.health()
    async with streams.AsyncClient(server.url) as tasks:
        await tasks.health()
    assert not caplog.records
