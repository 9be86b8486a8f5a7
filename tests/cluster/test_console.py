"""The console as a person meets it: a key is asked for, boxes are found, records come as they are written.

Method: a real server with keys, and a real page in headless Chromium, which must not complain of anything
but what it was refused for its key.
"""

from __future__ import annotations

import json
from pathlib import Path

import httpx2

from streams.testing import running_server
from tests.support.browser import page
from tests.support.crashing import eventually

WHOLE, CONFINED = "the-whole-secret-0123456789", "the-confined-secret-0123456789"
MARKUP = "<img src=x onerror=document.title='run'>"


def test_a_person_with_a_key_sees_the_server_follows_a_box_and_writes_to_it(tmp_path: Path) -> None:
    """§13"""
    with (
        running_server(shards=1, api_keys=f"{WHOLE},{CONFINED}:rw:mine.") as server,
        httpx2.Client(base_url=server.url, trust_env=False, timeout=60) as client,
        page(tmp_path / "chromium") as console,
    ):
        client.headers["Authorization"] = f"Bearer {WHOLE}"
        for box in ("mine.log", "others"):
            records = [{"data": {"n": 1, "text": MARKUP}, "tag": "first"}]
            assert client.post(f"/v0/boxes/{box}", json={"records": records}).status_code == 201
        client.put("/v0/boxes/mine.jobs", json={"type": "queue", "dead_letter": "mine.dead"})
        client.post("/v0/boxes/mine.jobs", json={"records": [{"data": n} for n in range(17)]})
        client.put("/v0/routers/r", json={"source": "mine.log", "dest": "copy", "from_seq": 0})
        console.go(f"{server.url}/")
        console.wait_for("This server asks for a key")
        console.type("#key", WHOLE)
        console.click("#ask button")
        console.wait_for("Shards", "Gateways", "Forget key")
        assert console.run("Object.keys(localStorage).length + document.cookie.length") == 0
        assert WHOLE not in console.run("location.href + document.documentElement.outerHTML")

        console.run("location.hash = '#/queues'; null")
        console.wait_for("mine.jobs", "17", "mine.dead")
        console.run("location.hash = '#/routers'; null")
        console.wait_for("copy", "Forwarded")
        console.run("location.hash = '#/boxes'; null")
        console.wait_for("mine.log", "others")
        console.type("input[type=search]", "mine.l")
        console.click("main form button")
        eventually(lambda: None if "others" in console.text else console.wait_for("mine.log") or True)
        console.run("document.activeElement.blur(); location.hash = '#/boxes/mine.log'; null")
        console.wait_for("live", MARKUP, "first", '"durability": "disk"')

        said = {"records": [{"data": "written by another"}]}
        assert client.post("/v0/boxes/mine.log", json=said).status_code == 200
        console.wait_for("written by another")
        console.type("textarea", '{"big": 12345678901234567890, "one": 1.0}')
        console.type("main form input", "mine")
        console.click("main form button")
        console.wait_for("Written as 3", '{"big":12345678901234567890,"one":1.0}')
        assert console.run("document.title") == "streams", "markup of a record was run"

        console.click("#forget")
        console.wait_for("This server asks for a key")
        console.type("#key", CONFINED)
        console.click("#ask button")
        console.wait_for("mine.log", "live")
        console.run("location.hash = '#/'; null")
        console.wait_for("This key is for some boxes only")
        console.run("location.hash = '#/boxes'; null")
        console.wait_for("mine.log", "mine.jobs")
        assert "others" not in console.text
        complaints = [json.loads(each) for each in console.complaints]
        assert [each for each in complaints if each.get("source") != "network"] == []
