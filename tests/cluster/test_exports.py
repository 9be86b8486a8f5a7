"""Goal: while somebody reads an export, the files it names stay, whatever becomes of their records; then
they go.

Method: a real server that takes snapshots all the time, so that unneeded segments are dropped at once; the
shard's own socket.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from streams.cli.shardlinks import ShardExports, ShardLink
from streams.protocol import wire
from streams.protocol.errors import Busy, NotFound, ShardUnavailable
from streams.testing import Server, running_server
from tests.support.crashing import Client, eventually
from tests.support.sealed import wait_for_segments

SMALL = {"segment_max_events": 30, "snapshot_interval_ms": 100, "wal_file_bytes": 65536}


def wait_for_snapshots(server: Server, client: Client, count: int) -> None:
    """Each after something has changed."""
    for _ in range(count):
        newest = max(server.data_dir.glob("shard-00/snapshot/*.snap"), default=Path())
        client.append("other", 1)
        eventually(
            lambda seen=newest: max(server.data_dir.glob("shard-00/snapshot/*.snap"), default=Path()) > seen
        )


def test_segments_stay_while_an_export_names_them_and_go_when_it_ends(tmp_path: Path) -> None:
    with running_server(tmp_path / "data", shards=1, **SMALL) as server:
        client = Client(server.port)
        client.append("box", *range(40), config={"durability": "fsync"})
        socket = server.data_dir / "run" / "shard-00.sock"
        wait_for_segments(server.data_dir, 1)
        segments = list(server.data_dir.glob("shard-00/segments/*/*.seg"))
        with ShardExports([socket], "mine"):
            client.ok("POST", "/v0/boxes/box/delete", {"before_seq": 1000})
            wait_for_snapshots(server, client, 4)
            assert all(path.exists() for path in segments)
            other = ShardLink(socket)
            with pytest.raises(Busy, match="another backup or check"):
                other.ask(wire.OP_EXPORT, id="other")
            assert other.ask(wire.OP_EXPORT_RENEW, id="mine")["id"] == "mine"
            other.close()
        eventually(lambda: not any(path.exists() for path in segments))
        assert not (server.data_dir / "shard-00" / "export").exists()


def test_a_command_that_reads_an_export_is_told_how_long_acks_take(tmp_path: Path) -> None:
    with running_server(tmp_path / "data", shards=1, **SMALL) as server:
        client = Client(server.port)
        for number in range(5):
            client.append("box", number)
        with ShardExports([server.data_dir / "run" / "shard-00.sock"], "mine") as exported:
            assert sum(exported.servers[0]["recent_acks"]) <= 5
            for number in range(3):
                client.append("box", number)
            [load] = exported.loads()
            assert load is not None and sum(load["acks"]) == 8 and "level" in load
            os.kill(server.shard_pids()[0], signal.SIGKILL)
            eventually(lambda: exported.loads() == [None])  # the files are read on, at the pace of before


def test_a_shard_that_dies_takes_its_export_along_and_starts_without_it(tmp_path: Path) -> None:
    with running_server(tmp_path / "data", shards=1, **SMALL) as server:
        client = Client(server.port)
        client.append("box", *range(5), config={"durability": "fsync"})
        socket = server.data_dir / "run" / "shard-00.sock"
        link = ShardLink(socket)
        link.ask(wire.OP_EXPORT, id="mine")
        assert (server.data_dir / "shard-00" / "export").exists()
        os.kill(server.shard_pids()[0], signal.SIGKILL)
        with pytest.raises(ShardUnavailable):
            link.ask(wire.OP_EXPORT_RENEW, id="mine")
        link.close()

        def answers() -> bool:
            again = ShardLink(socket)
            try:
                again.ask(wire.OP_EXPORT_RENEW, id="mine")
            except NotFound:
                return True
            except Busy:  # it is replaying
                return False
            finally:
                again.close()
            raise AssertionError("an export outlived its shard")

        eventually(answers)
        assert not (server.data_dir / "shard-00" / "export").exists()
        eventually(
            lambda: client.send("GET", "/v0/ready").status == 200
        )  # the gateway knows it later than we
        assert len(client.read_all("box")[0]) == 5
