"""Straight to the shards: the same writes and errors as over HTTP, and never to a shard that does not own the
box."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import streams
from streams.client._sync.client import Client
from streams.client.errors import AnswerLost, Unreachable
from streams.client.retry import NEVER, Retry
from streams.direct import BoxMoved, pack
from streams.direct import Shards as BulkShards
from streams.protocol import wire
from streams.protocol.errors import BoxNotFound, InvalidRequest, SeqMismatch
from streams.protocol.messages.requests import encode_failure
from streams.protocol.messages.server_replies import Placement
from streams.protocol.model.slots import SLOTS, slot_of
from streams.testing import Server, running_server
from tests.support.crashing import eventually


@pytest.fixture
def writer(server: Server) -> Iterator[streams.ShardWriter]:
    with streams.ShardWriter(server.url) as found:
        yield found


def test_boxes_of_all_shards_are_written_where_readers_find_them(
    writer: streams.ShardWriter, client: streams.Client, name: str
) -> None:
    names = [f"{name}.{n}" for n in range(8)]
    placement = client.placement()
    owners = {
        shard for each in names for start, end, shard in placement.slots if start <= slot_of(each) < end
    }
    assert owners == {0, 1}
    for each in names:
        appended = writer.append(each, [1, streams.Entry(2, tag="t")])
        assert (appended.first_seq, appended.last_seq, appended.created) == (1, 2, True)
        assert [item.data for item in client.box(each).read()] == [1, 2]  # type: ignore[union-attr]
        assert writer.state(each).head_seq == 2


def test_errors_and_keys_are_those_of_http(writer: streams.ShardWriter, name: str) -> None:
    assert not writer.append(name, [1], idempotency_key="k").deduped
    assert writer.append(name, [1], idempotency_key="k").deduped
    with pytest.raises(SeqMismatch) as refused:
        writer.append(name, [2], match_seq=1)
    assert refused.value.detail["next_seq"] == 2
    with pytest.raises(BoxNotFound):
        writer.append(f"{name}.absent", [1], create=False)
    with pytest.raises(InvalidRequest, match="box"):
        writer.append("no/slash", [1])


def test_a_large_write_passes_in_one_piece(
    writer: streams.ShardWriter, client: streams.Client, name: str
) -> None:
    """More than a socket takes at once, both ways."""
    writer.append(name, ["x" * 900_000] * 20)
    assert client.box(name).state().count == 20


def test_threads_share_a_writer(writer: streams.ShardWriter, client: streams.Client, name: str) -> None:
    def write(number: int) -> None:
        for n in range(50):
            writer.append(f"{name}.{n % 4}", [(number, n)])

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    found = [item.data for box in range(4) for item in client.box(f"{name}.{box}").read()]  # type: ignore[union-attr]
    assert sorted(map(tuple, found)) == [(number, n) for number in range(4) for n in range(50)]


def test_a_shard_that_is_killed_is_written_to_again(tmp_path: Path) -> None:
    with running_server(tmp_path, shards=1) as server, streams.ShardWriter(server.url) as writer:
        writer.append("b", [1])
        os.kill(eventually(lambda: server.shard_pids().get(0)), signal.SIGKILL)
        writer.append("b", [2])
        with streams.Client(server.url) as client:
            assert [item.data for item in client.box("b").read()] == [1, 2]  # type: ignore[union-attr]


def test_a_long_path_is_reached_through_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 30)
    folder.mkdir()
    with running_server(folder, shards=1) as server, streams.ShardWriter(server.url) as writer:
        assert writer.append("b", [1]).first_seq == 1


def test_nobody_there_is_busy() -> None:
    with streams.ShardWriter("http://127.0.0.1:9", retry=NEVER) as writer, pytest.raises(Unreachable):
        writer.append("b", [1])


# -- a map that changes


class Shards:
    """Two sockets that speak the wire, and a map that says which of them owns everything. `answer` is what
    the next append gets: an error, or the shard's number as its seq."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.owner, self.version = 0, 1
        self.appends: list[int] = []
        self.answers: list[Any] = []
        self.asked = 0
        self.on_hello: Any = lambda shard: None
        self._paths = [str(folder / f"{n}.sock") for n in range(2)]
        self._listeners = []
        for shard, path in enumerate(self._paths):
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(path)
            listener.listen()
            self._listeners.append(listener)
            threading.Thread(target=self._serve, args=(shard, listener), daemon=True).start()
        monkeypatch.setattr(Client, "placement", lambda client: self.placement())

    def placement(self) -> Placement:
        self.asked += 1
        return Placement(2, [(0, SLOTS, self.owner)], self.version, self._paths, [])

    def move(self) -> None:
        self.owner, self.version = 1 - self.owner, self.version + 1

    def _serve(self, shard: int, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._talk, args=(shard, sock), daemon=True).start()

    def _talk(self, shard: int, sock: socket.socket) -> None:
        receiver = wire.Receiver()
        with sock:
            while count := sock.recv_into(receiver.space()):
                for message in receiver.parse(count):
                    if not self._answer(shard, sock, message):
                        return

    def _answer(self, shard: int, sock: socket.socket, message: wire.Message) -> bool:
        flags, body = 0, b"{}"
        if message.op == wire.OP_HELLO:
            self.on_hello(shard)
        else:
            self.appends.append(shard)
            answer = self.answers.pop(0) if self.answers else None
            if answer == "silence":
                return False
            if answer is not None:
                flags, body = wire.FAILED, encode_failure(answer)
            else:
                body = (
                    b'{"box":"b","first_seq":%d,"last_seq":1,"head_seq":1,"count":1,"created":false,"deduped":false}'
                    % shard
                )
        head = wire.head_encoder.encode(wire.ReplyHead())
        sock.sendall(wire.frame(wire.REPLY, flags, message.op, message.id, head, len(body)) + body)
        return True

    def close(self) -> None:
        for listener in self._listeners:
            listener.close()


@pytest.fixture
def shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shards]:
    found = Shards(tmp_path, monkeypatch)
    yield found
    found.close()


def test_a_box_that_moved_is_followed(shards: Shards) -> None:
    with streams.ShardWriter("http://unused") as writer:
        assert writer.append("b", [1]).first_seq == 0
        asked = shards.asked
        assert writer.append("b", [1]).first_seq == 0
        assert shards.asked == asked, "a map that holds is not asked for again"
        shards.move()
        shards.answers = [BoxMoved()]
        assert writer.append("b", [1]).first_seq == 1
        assert shards.appends == [0, 0, 0, 1]


def test_the_map_is_looked_at_after_connecting_and_before_writing(shards: Shards) -> None:
    """The map changes while the writer connects: it must not write to the shard that it chose by the old
    one."""
    shards.on_hello = lambda shard: shards.move() if shards.version == 1 else None
    with streams.ShardWriter("http://unused") as writer:
        assert writer.append("b", [1]).first_seq == 1
        assert shards.appends == [1]


def test_after_a_lost_connection_the_map_is_asked_for_again(shards: Shards) -> None:
    with streams.ShardWriter("http://unused") as writer:
        writer.append("b", [1])
        shards.answers = ["silence"]
        asked = shards.asked
        writer.append("b", [1])
        assert shards.asked > asked


def test_a_map_that_keeps_changing_is_busy_and_nothing_is_written(shards: Shards) -> None:
    shards.on_hello = lambda shard: shards.move()
    with (
        streams.ShardWriter("http://unused", retry=NEVER) as writer,
        pytest.raises(streams.Busy, match="changing"),
    ):
        writer.append("b", [1])
    assert shards.appends == []


def test_a_lost_answer_is_uncertain_whatever_comes_after(shards: Shards) -> None:
    shards.answers = ["silence", *[BoxMoved()] * 1000]
    with streams.ShardWriter("http://unused", retry=Retry(total_s=0.3)) as writer, pytest.raises(AnswerLost):
        writer.append("b", [1])


def test_rows_whose_boxes_moved_are_given_back_at_once(shards: Shards) -> None:
    """They have to be sorted anew, which only the caller can do. After a lost answer nobody knows what became
    of them."""
    packed = pack(["b"], [1], [b"1"])
    hellos: list[int] = []

    def move_at_the_second(shard: int) -> None:
        hellos.append(shard)
        if len(hellos) == 2:
            shards.move()

    shards.on_hello = move_at_the_second
    shards.answers = [BoxMoved()]
    with BulkShards("http://unused") as bulk:
        with pytest.raises(BoxMoved):
            bulk.put_columns(packed)
        shards.answers = ["silence"]
        with pytest.raises(AnswerLost, match="belongs to shard 1"):
            bulk.put_columns(packed)
    assert shards.appends == [0, 0]
