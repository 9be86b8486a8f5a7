"""Takes pictures of every page of the console and measures its live tail: `make shots`.

The pictures go into `docs/images`. The live tail is fed 10,000 records/s for ten seconds. The page measures
the time between animation frames; goals: no frame over 50 ms, and Pause answers within 100 ms.
"""

from __future__ import annotations

import json
import random
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import httpx2

from streams.testing import running_server
from tests.support.browser import Page, page
from tests.support.console_data import ADDRESSES, fill, order

IMAGES: Final = Path(__file__).parents[2] / "docs" / "images"
RATE, SECONDS, BATCH = 10_000, 10, 500
#: Also taken in the dark theme, and as a phone shows it.
DARK, PHONE = ("records", "routers"), ("overview",)

_MEASURE = """(() => {
  const frames = window.__frames = []; let last = performance.now();
  const step = (now) => {
    frames.push(now - last); last = now; if (!window.__stop) requestAnimationFrame(step); };
  requestAnimationFrame(step); return null; })()"""
_PAUSE = """new Promise((resolve) => { const began = performance.now();
  document.querySelector('#pause').click();
  const look = () => document.querySelector('#pause').textContent.startsWith('Resume')
    ? resolve(performance.now() - began) : requestAnimationFrame(look); look(); })"""


def open_page(console: Page, address: str) -> None:
    console.run(f"location.hash = {json.dumps(address)}; null")
    console.until("document.querySelector('main h1') && !document.body.innerText.includes('Loading …')")
    time.sleep(3)  # rates need two looks, charts some seconds


def load(url: str, stop: threading.Event) -> None:
    """A little load, so that charts and rates have something to show."""
    luck = random.Random(2)
    with httpx2.Client(base_url=url, trust_env=False, timeout=60) as client:
        while not stop.is_set():
            for box in ("clicks", "orders", "payments"):
                records = [order(at, luck) for at in range(luck.randrange(5, 60))]
                client.post(f"/v0/boxes/{box}", json={"records": records})
            client.post("/v0/boxes/orders/diff", json={"limit": 100, "touch": False})
            time.sleep(0.1)


def take_pictures(console: Page, url: str) -> None:
    IMAGES.mkdir(exist_ok=True)
    console.go(f"{url}/")
    console.until("Boolean(document.querySelector('main h1'))")
    # The overview comes last: by then its charts have a minute to show.
    for name in [*list(ADDRESSES)[1:], "overview"]:
        address = ADDRESSES[name]
        console.use_screen(1280, 800)
        console.use_theme("light")
        open_page(console, address)
        console.picture(IMAGES / f"console-{name}.png")
        if name in DARK:
            console.use_theme("dark")
            time.sleep(1)
            console.picture(IMAGES / f"console-{name}-dark.png")
        if name in PHONE:
            console.use_theme("light")
            console.use_screen(390, 844, is_phone=True)
            time.sleep(1)
            console.picture(IMAGES / f"console-{name}-phone.png")
    console.use_screen(1280, 800)
    console.use_theme("light")
    console.go(f"{url}/docs")
    console.wait_for("/v1/basins")
    console.picture(IMAGES / "console-api.png")


def measure_tail(console: Page, url: str, client: httpx2.Client) -> dict[str, object]:
    client.put("/v0/boxes/firehose", json={}).raise_for_status()
    console.go(f"{url}/#/boxes/firehose/live")
    console.until("Boolean(document.querySelector('#tail'))")
    body = json.dumps({"records": [{"data": {"n": at, "text": "x" * 60}} for at in range(BATCH)]})
    console.run(_MEASURE)
    sent, began, pause_ms = 0, time.monotonic(), 0.0
    while time.monotonic() - began < SECONDS:
        client.post("/v0/boxes/firehose", content=body, headers={"Content-Type": "application/json"})
        sent += BATCH
        time.sleep(max(0.0, sent / RATE - (time.monotonic() - began)))
    rate = sent / (time.monotonic() - began)
    pause_ms = console.run(_PAUSE)
    console.run("window.__stop = true; document.querySelector('#pause').click(); null")
    console.until(f"Number(document.querySelector('#tail').dataset.received) >= {sent}")
    frames = sorted(console.run("window.__frames"))
    return {
        "records_per_s": round(rate),
        "frames": len(frames),
        "frame_p50_ms": round(frames[len(frames) // 2], 1),
        "frame_p99_ms": round(frames[int(len(frames) * 0.99)], 1),
        "frame_max_ms": round(frames[-1], 1),
        "frames_over_50_ms": sum(each > 50 for each in frames),
        "pause_ms": round(pause_ms, 1),
        "counts": console.run("({...document.querySelector('#tail').dataset})"),
    }


def main() -> None:
    with (
        TemporaryDirectory() as folder,
        running_server(shards=2) as server,
        httpx2.Client(base_url=server.url, trust_env=False, timeout=60) as client,
        page(Path(folder)) as console,
    ):
        fill(client)
        stop = threading.Event()
        loading = threading.Thread(target=load, args=(server.url, stop))
        loading.start()
        try:
            take_pictures(console, server.url)
        finally:
            stop.set()
            loading.join()
        print(json.dumps(measure_tail(console, server.url, client), indent=2))


if __name__ == "__main__":
    main()
