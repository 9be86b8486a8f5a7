"""Shards over TCP: a key in the hello, then the scopes and prefixes of HTTP (§11).

Method: one real server that listens for remote clients on this machine; `ShardWriter` as users have it, and
the wire itself for peers that do not behave.
"""

from __future__ import annotations

import itertools
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.shards.unix_sockets import address_of
from shard.server.peers import HELLO_BYTES_MAX
from streams import Client
from streams.client.errors import Unreachable
from streams.client.retry import Retry
from streams.config import ConfigError, check_may_serve, load
from streams.direct import Shards, ShardWriter
from streams.protocol import wire
from streams.protocol.access.grants import ALL, READ, WRITE, Grant, words
from streams.protocol.errors import Forbidden, Unauthorized
from streams.protocol.messages import bulk, op_access
from streams.protocol.messages.requests import failure_decoder
from streams.protocol.messages.server_replies import Placement
from streams.protocol.model.slots import slot_of
from streams.protocol.payloads.packed import pack
from streams.protocol.payloads.scans import ScanHead
from streams.testing import Server, running_server
from tests.support.crashing import eventually

SHARDS = 2
WHOLE, WRITER, READER, CONFINED = (
    f"secret-of-the-{who}-0123456789" for who in ("whole", "writer", "reader", "confined")
)
JOB, ROTATED = "secret-of-the-job-0123456789", "rotated-secret-of-the-job-0123456789"
LOCAL, LOCAL_ROTATED = "secret-of-a-local-job-0123456789", "rotated-secret-of-a-local-job-0123456789"
HURRY = Retry(total_s=0.0)
WRITERS = itertools.count()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(
        f"{WHOLE}\n{WRITER}:w:in.\n{READER}:r\n{CONFINED}::in.\n"
        f"{JOB}:rw:in. id=job\n{ROTATED}:rw:in. id=job\n"
        f"{LOCAL}:rw id=local\n{LOCAL_ROTATED}:rw id=local\n"
    )
    keys.chmod(0o600)
    with running_server(
        shards=SHARDS, api_keys_file=keys, shard_host="127.0.0.1", shard_port=0, log="debug"
    ) as server:
        yield server, keys


@pytest.fixture
def server(running: tuple[Server, Path]) -> Server:
    return running[0]


class Wire:
    """A peer over TCP that says what it likes."""

    def __init__(self, server: Server, shard: int = 0) -> None:
        with Client(server.url, key=WHOLE) as client:
            self.placement = client.placement()
        host, _, port = self.placement.addresses[shard].rpartition(":")
        self._sock = socket.create_connection((host, int(port)), 30)
        self._receiver = wire.Receiver()
        self._ids = 0

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self._sock.close()

    def ask(self, op: int, head: object = None, body: bytes = b"") -> tuple[str, bytes]:
        """The code of the refusal, or "" and the answer; "closed" when there is none."""
        self._ids += 1
        text = b"" if head is None else wire.head_encoder.encode(head)
        try:
            self._sock.sendall(wire.frame(wire.REQUEST, 0, op, self._ids, text, len(body)) + body)
            while True:
                count = self._sock.recv_into(self._receiver.space())
                if not count:
                    return "closed", b""
                for message in self._receiver.parse(count):
                    failed = message.flags & wire.FAILED
                    code = failure_decoder.decode(message.body).code if failed else ""
                    return code, message.body
        except ConnectionError:
            return "closed", b""

    def hello(self, secret: str) -> str:
        return self.ask(wire.OP_HELLO, body=secret.encode())[0]

    def owned(self, start: str, *, by: int = 0) -> str:
        """A box name that starts so and belongs to this shard."""
        for number in range(1000):
            name = f"{start}{number}"
            for first, end, shard in self.placement.slots:
                if first <= slot_of(name) < end and shard == by:
                    return name
        raise AssertionError("no such name")


def test_a_writer_reaches_every_shard_over_tcp_and_reads_back(server: Server) -> None:
    boxes = [f"in.tcp-{n}" for n in range(8)]
    with ShardWriter(server.url, key=WHOLE, over_tcp=True) as writer:
        for box in boxes:
            assert writer.append(box, [{"n": 1}, {"n": 2}]).last_seq == 2
        assert writer.state(boxes[0]).head_seq == 2
        assert "2 of 2 shards" in repr(writer)
    with Client(server.url, key=READER) as client:
        assert [client.box(box).state().count for box in boxes] == [2] * 8


def test_left_to_itself_a_writer_uses_the_unix_socket_where_it_can_see_it(server: Server) -> None:
    with ShardWriter(server.url, key=READER) as writer:
        # The socket's own mode lets this user in, whatever the key: it is the server's own user.
        assert writer.append("out.of-prefix", [1]).last_seq == 1
    with ShardWriter(server.url, key=READER, over_tcp=True, retry=HURRY) as writer, pytest.raises(Forbidden):
        writer.append("out.of-prefix", [1])


def test_a_transaction_is_for_the_key_that_began_it_whatever_its_secret_is(server: Server) -> None:
    with Wire(server) as job, Wire(server) as rotated, Wire(server) as other:
        secrets = ((job, JOB), (rotated, ROTATED), (other, WRITER))
        assert [peer.hello(secret) for peer, secret in secrets] == ["", "", ""]
        box = job.owned("in.txn-")
        packed, txn = pack([box], [1], [b"1"]), bulk.Txn("a-job", 1)
        columns = b"".join(map(bytes, packed.buffers()))

        def put(peer: Wire, chunk: int) -> str:
            return peer.ask(wire.OP_TXN_PUT, bulk.TxnPutHead(txn, "p", chunk, packed.head()), columns)[0]

        commit = bulk.TxnCommitHead(txn, [("p", 2)])
        assert put(job, 0) == ""
        assert put(other, 1) == "forbidden"
        assert other.ask(wire.OP_TXN_COMMIT, commit)[0] == "forbidden"
        assert other.ask(wire.OP_TXN_ABORT, bulk.TxnAbortHead(txn))[0] == "forbidden"
        # A peer cannot say whose it is: what it puts behind the head is not looked at.
        forged = bulk.TxnCommit(txn, [("p", 1)], False, bulk.Caller("job"))
        assert other.ask(wire.OP_TXN_COMMIT, forged)[0] == "forbidden"
        assert put(rotated, 1) == ""
        assert rotated.ask(wire.OP_TXN_COMMIT, commit)[0] == ""
    with Client(server.url, key=READER) as client:
        assert client.box(box).state().count == 2


def test_over_the_unix_socket_a_transaction_belongs_to_the_key_that_the_process_has(server: Server) -> None:
    txn = bulk.Txn("a-local-job", 1)
    with (
        Shards(server.url, key=LOCAL, over_tcp=False) as local,
        Shards(server.url, key=WRITER, over_tcp=True) as other,
    ):
        for shard in range(SHARDS):
            assert not local.txn_commit(shard, txn, []).is_done
            with pytest.raises(Forbidden):
                other.txn_commit(shard, txn, [])
    with Shards(server.url, key=LOCAL_ROTATED, over_tcp=True) as rotated:
        assert rotated.txn_commit(0, txn, []).is_done


_JOBS = b'{"node":"w","seqs":[1],"lease_ms":1000}'
#: op -> (query, body) of a good request, for ops whose head is that of a request over HTTP.
PLAIN: dict[int, tuple[str, bytes]] = {
    wire.OP_PUT_BOX: ("", b"{}"),
    wire.OP_GET_STATE: ("", b""),
    wire.OP_APPEND: ("", b'{"records":[{"data":1}]}'),
    wire.OP_DIFF: ("", b"{}"),
    wire.OP_GET_RECORD: ("seq=1", b""),
    wire.OP_GET_TAIL: ("", b""),
    wire.OP_DELETE_RECORDS: ("", b'{"before_seq":1}'),
    wire.OP_SET_FENCE: ("", b'{"token":""}'),
    wire.OP_CLAIM: ("", b'{"node":"w"}'),
    wire.OP_ACK: ("", b'{"node":"w","seqs":[1]}'),
    wire.OP_NACK: ("", b'{"node":"w","seqs":[1]}'),
    wire.OP_EXTEND: ("", _JOBS),
    wire.OP_WORK: ("node=w", b""),
    wire.OP_WORK_END: ("node=w", b""),
    wire.OP_LIST_JOBS: ("state=ready", b""),
    wire.OP_SET_PAUSED: ("paused=true", b""),
    wire.OP_RESCHEDULE: ("", b'{"seqs":[1],"delay_ms":1}'),
    wire.OP_REPRIORITIZE: ("", b'{"seqs":[1],"job_priority":1}'),
    wire.OP_COMMIT_GROUP: ("group=g", b'{"cursor":0}'),
    wire.OP_GET_GROUP: ("group=g", b""),
    wire.OP_LIST_GROUPS: ("", b""),
    wire.OP_DELETE_GROUP: ("group=g", b""),
    wire.OP_DELETE_BOX: ("", b""),
}


def request_of(op: int, box: str) -> tuple[object, bytes]:
    """A good request of this kind. A new op is missed here until somebody says what one looks like."""
    if op in PLAIN:
        query, body = PLAIN[op]
        return wire.RequestHead(box, query), body
    packed, txn = pack([box], [1], [b"1"]), bulk.Txn(f"writer-{next(WRITERS)}", 1)  # one that is nobody's
    columns = b"".join(map(bytes, packed.buffers()))
    requests: dict[int, tuple[object, bytes]] = {
        wire.OP_FOLLOW: (wire.FollowHead(box), b""),
        wire.OP_SCAN: (ScanHead(box), b""),
        wire.OP_STATES: (bulk.States(prefix=box), b""),
        wire.OP_LOCATE: (bulk.Locate([(box, 0)]), b""),
        wire.OP_PUT_COLUMNS: (packed.head(), columns),
        wire.OP_TXN_PUT: (bulk.TxnPutHead(txn, "parcel", 0, packed.head()), columns),
        wire.OP_TXN_COMMIT: (bulk.TxnCommit(txn, []), b""),
        wire.OP_TXN_ABORT: (bulk.TxnAbort(txn), b""),
        wire.OP_TXN_LIST: (bulk.TxnList(), b""),
    }
    return requests[op]


def test_keys_bound_a_writer_as_over_http(server: Server) -> None:
    with ShardWriter(server.url, key=WRITER, over_tcp=True, retry=HURRY) as writer:
        assert writer.append("in.bound", [1]).last_seq == 1
        for fields in ({"config": {"cap_records": 1}}, {"trim_before_seq": 0}):
            with pytest.raises(Forbidden):
                writer.append("in.bound", [1], **fields)
        with pytest.raises(Forbidden):
            writer.state("in.bound")
    with ShardWriter(server.url, key=READER, over_tcp=True, retry=HURRY) as reader:
        assert reader.state("in.bound").head_seq == 1
        with pytest.raises(Forbidden):
            reader.append("in.bound", [1])


def test_a_stranger_hears_that_a_key_is_needed_and_nothing_else(server: Server) -> None:
    for op, body in [(wire.OP_HELLO, b""), (wire.OP_HELLO, b"no-such-secret"), (wire.OP_STATS, b"")]:
        with Wire(server) as peer:
            assert peer.ask(op, body=body)[0] == "unauthorized"
            assert peer.ask(wire.OP_HELLO, body=WHOLE.encode())[0] == "closed"
    with Wire(server) as peer:
        assert peer.ask(wire.OP_HELLO, body=b"x" * HELLO_BYTES_MAX)[0] == "closed"
    with pytest.raises(Unauthorized):
        ShardWriter(server.url, key="no-such-secret", retry=HURRY).append("in.x", [1])
    assert "no-such-secret" not in server.log_text() and WHOLE not in server.log_text()


def test_every_op_takes_its_scopes_and_the_ops_of_gateways_are_closed(server: Server) -> None:
    with Wire(server) as reader, Wire(server) as writer, Wire(server) as whole:
        assert (reader.hello(READER), writer.hello(WRITER), whole.hello(WHOLE)) == ("", "", "")
        box = whole.owned("in.op-")
        for op in sorted(op_access.INTERNAL | {wire.OP_HELLO, 9999}):
            for head in (wire.RequestHead(box), None):
                assert whole.ask(op, head)[0] == "forbidden", op
        for op, need in op_access.OPS.items():
            for peer, grant in ((reader, Grant(READ)), (writer, Grant(WRITE, ("in.",))), (whole, Grant(ALL))):
                head, body = request_of(op, box)
                is_closed = bool(words(need.scopes & ~grant.scopes)) or (
                    need.is_whole and bool(grant.prefixes)
                )
                code = peer.ask(op, head, body)[0]
                assert (code == "forbidden") == is_closed and code != "invalid_request", (op, grant, code)


def test_every_op_that_is_for_boxes_is_for_those_of_the_key(server: Server) -> None:
    """Method: the same good request for a box inside and for one outside; only their names differ."""
    with Wire(server) as confined:
        assert confined.hello(CONFINED) == ""
        inside, outside = confined.owned("in.name-"), confined.owned("out.name-")
        for op, need in op_access.OPS.items():
            if need.names_boxes and not need.is_whole:
                assert confined.ask(op, *request_of(op, outside))[0] == "forbidden", op
                code = confined.ask(op, *request_of(op, inside))[0]
                assert code not in ("forbidden", "invalid_request"), (op, code)
            elif need.is_whole:
                assert confined.ask(op, *request_of(op, inside))[0] == "forbidden", op


def test_a_peer_cannot_bring_its_own_grant(server: Server) -> None:
    with Wire(server) as writer:
        assert writer.hello(WRITER) == ""
        head = wire.RequestHead(writer.owned("in.grant-"), grant=Grant(ALL))
        body = b'{"records":[{"data":1}],"config":{"cap_records":1}}'
        assert writer.ask(wire.OP_APPEND, head, body)[0] == "forbidden"


def test_a_box_of_another_shard_is_not_made_here(server: Server) -> None:
    with Wire(server) as peer:
        assert peer.hello(WHOLE) == ""
        head = wire.RequestHead(peer.owned("in.elsewhere-", by=1))
        assert peer.ask(wire.OP_APPEND, head, b'{"records":[{"data":1}]}')[0] == "moved"


def test_a_key_that_is_taken_out_loses_its_connections(running: tuple[Server, Path]) -> None:
    server, keys = running
    before = keys.read_text()
    with Wire(server) as kept, Wire(server) as gone:
        keys.write_text(f"{before}to-be-taken-out-0123456789\n")
        os.kill(server.pid, signal.SIGHUP)

        def is_known() -> bool:
            with Wire(server) as trying:
                return trying.hello("to-be-taken-out-0123456789") == ""

        eventually(is_known)
        assert (kept.hello(WHOLE), gone.hello("to-be-taken-out-0123456789")) == ("", "")
        keys.write_text(before)
        os.kill(server.pid, signal.SIGHUP)
        head = wire.RequestHead(kept.owned("in.key-"))
        eventually(lambda: gone.ask(wire.OP_GET_TAIL, head)[0] == "closed")
        assert kept.ask(wire.OP_GET_TAIL, head)[0] == "box_not_found"


def test_without_addresses_a_remote_writer_says_what_is_missing() -> None:
    writer = ShardWriter("http://127.0.0.1:1")
    placement = Placement(1, [(0, 4096, 0)], 1, ["/not/on/this/machine.sock"], [])
    with writer, pytest.raises(Unreachable, match="STREAMS_SHARD_HOST"):
        writer.shards.connections._address_of(placement, 0)
    with writer, pytest.raises(Unreachable, match="this key has prefixes"):
        writer.shards.connections._address_of(Placement(1, [(0, 4096, 0)], 1, [""], []), 0)


def test_a_key_with_prefixes_goes_over_tcp_also_on_the_machine_of_the_server(server: Server) -> None:
    """Where nothing else is said; over a Unix socket its prefixes would not hold."""
    with ShardWriter(server.url, key=CONFINED, retry=HURRY) as writer:
        assert writer.append("in.confined", [1]).last_seq == 1
        with pytest.raises(Forbidden):
            writer.append("out.confined", [1])
    with (
        ShardWriter(server.url, key=CONFINED, retry=HURRY, over_tcp=False) as writer,
        pytest.raises(Unreachable, match="this key has prefixes"),
    ):
        writer.append("in.confined", [1])


def test_a_listener_on_every_address_is_reached_where_the_gateway_is() -> None:
    assert [address_of(host, 7) for host in ("0.0.0.0", "::", "::1", "10.0.0.1")] == [
        ":7",
        ":7",
        "[::1]:7",
        "10.0.0.1:7",
    ]
    writer = ShardWriter("http://streams.example:4000", key="k", over_tcp=True)
    placement = Placement(1, [(0, 4096, 0)], 1, ["/a.sock"], [":4100"])
    with writer:
        assert writer.shards.connections._address_of(placement, 0) == ("streams.example:4100", "k")


def test_shards_do_not_listen_for_strangers_without_keys() -> None:
    with pytest.raises(ConfigError, match="STREAMS_SHARD_HOST"):
        check_may_serve(load({"STREAMS_SHARD_HOST": "127.0.0.1"}))
