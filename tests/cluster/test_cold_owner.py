"""Goal: two servers never write to one cold store: the second one is refused, with the owner's name and the
next step, and a take-over makes it the owner.

Method: real servers and the real command line on a folder.
"""

from __future__ import annotations

from pathlib import Path

from streams.testing import running_server
from tests.cluster.test_backup import done, streams
from tests.support.crashing import Client

SMALL = {"shards": 1, "gateways": 1}


def test_a_second_server_on_a_cold_store_is_refused_until_it_takes_the_store_over(tmp_path: Path) -> None:
    cold, first, second = tmp_path / "cold", tmp_path / "first", tmp_path / "second"
    cold.mkdir()

    def start(data_dir: Path) -> tuple[int, str]:
        flags = ("--data-dir", str(data_dir), "--cold-dir", str(cold), "--port", "0", "--shards", "1")
        ran = streams("serve", *flags)
        return ran.returncode, " ".join(ran.stderr.split())

    with running_server(first, cold_dir=str(cold), **SMALL) as server:
        client = Client(server.port)
        client.put("box", durability="object")
        client.append("box", "kept")
        code, refusal = start(second)
        assert code == 2
        for fact in (str(first), str(cold), "another server", "STREAMS_COLD_DIR"):
            assert fact in refusal
        takeover = ("takeover", "--data-dir", str(second), "--cold-dir", str(cold))
        assert f"`streams {' '.join(takeover)}`" in refusal
        unsure = streams(*takeover)
        assert unsure.returncode == 2 and str(first) in unsure.stderr and "--yes" in unsure.stderr
    assert str(first) in done(*takeover, "--yes")["before"]
    code, refusal = start(first)
    assert code == 2 and str(second) in refusal
    done("takeover", "--data-dir", str(first), "--cold-dir", str(cold), "--yes")
    with running_server(first, cold_dir=str(cold), **SMALL) as server:
        assert list(Client(server.port).read_all("box")[0].values()) == ["kept"]


def test_a_cold_store_that_cannot_be_one_is_refused_before_anything_starts(tmp_path: Path) -> None:
    ran = streams(
        "serve", "--data-dir", str(tmp_path / "data"), "--cold-dir", str(tmp_path / "no"), "--port", "0"
    )
    assert ran.returncode == 2 and str(tmp_path / "no") in ran.stderr and "STREAMS_COLD_DIR" in ran.stderr
    assert "Traceback" not in ran.stderr
