"""The how-to of the S2 API runs as it is written: its code in one program, against a real server.

Method: the ```python blocks are put together, and called in the order of the page.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from s2_sdk import S2, Endpoints

from streams.testing import running_server

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "s2.md"


def test_snapshot_and_follow_work_as_the_page_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    page: dict[str, Any] = {}
    exec(compile("\n".join(blocks), str(PAGE), "exec"), page)

    async def main(url: str) -> None:
        async with S2("ignored", endpoints=Endpoints(account=url, basin=url)) as s2:
            await page["first_steps"](s2)
            basin = s2.basin("my-first-basin")
            for name in ("single", "framed", "external"):
                await basin.create_stream(name)
            await page["single_record"](basin.stream("single"))
            await page["framed"](basin.stream("framed"))
            await page["external"](basin.stream("external"), tmp_path)

    with running_server(shards=2) as server:
        asyncio.run(main(server.url))
    assert capsys.readouterr().out.splitlines() == [
        "0 2 [b'one', b'two']",
        "next is 7",
        "state 110",
        "snapshot b'part-0part-1part-2part-3'",
        "pointer to snapshot-3",
    ]
