"""What the console is shown with: addresses of all its pages, and the boxes that they show."""

from __future__ import annotations

import random
from typing import Any, Final

import httpx2

ADDRESSES: Final = {
    "overview": "#/",
    "boxes": "#/boxes?sort=count",
    "records": "#/boxes/orders/records?from=500&open=503",
    "live": "#/boxes/clicks/live",
    "produce": "#/boxes/orders/produce",
    "groups": "#/boxes/orders/groups",
    "box-routers": "#/boxes/orders/routers",
    "settings": "#/boxes/orders/settings",
    "queues": "#/queues",
    "jobs": "#/boxes/emails/jobs",
    "delayed-jobs": "#/boxes/thumbnails/jobs?state=delayed",
    "dead-letters": "#/boxes/emails/dead",
    "routers": "#/routers",
    "schedules": "#/schedules",
    "streams": "#/s2?basin=my-first-basin",
    "stream-records": "#/boxes/my-first-basin%2Fsensors/records",
    "lag": "#/groups",
    "operations": "#/operations",
    "storage": "#/operations/storage",
    "processes": "#/operations/processes",
    "keys": "#/operations/keys",
    "server-settings": "#/operations/settings?q=wal",
}

ROUTERS: Final = (
    ("orders-to-audit", "orders", "audit.log"),
    ("payments-to-audit", "payments", "audit.log"),
    ("europe", "orders", "orders.eu"),
    ("america", "orders", "orders.us"),
    ("eu-invoices", "orders.eu", "invoices"),
    ("us-invoices", "orders.us", "invoices"),
)


def order(at: int, luck: random.Random) -> dict[str, Any]:
    data = {
        "id": at,
        "customer": f"c-{luck.randrange(900)}",
        "total": round(luck.random() * 200, 2),
        "items": [{"sku": f"A{luck.randrange(99)}", "n": luck.randrange(1, 5)}],
    }
    return {"data": data, "tag": f"user-{luck.randrange(40)}", "node": "web-1"}


def fill(client: httpx2.Client) -> None:
    """Makes boxes of each kind, dead letters, groups, routers with a cycle, a stream."""
    luck = random.Random(1)

    def call(method: str, path: str, body: Any, **headers: str) -> Any:
        response = client.request(method, path, json=body, headers=headers)
        assert response.status_code in (200, 201), (method, path, response.text)
        return response.json()

    for box, number in (("orders", 1200), ("payments", 800), ("clicks", 1500), ("audit.log", 30)):
        call("POST", f"/v0/boxes/{box}", {"records": [order(at, luck) for at in range(number)]})
    call("PUT", "/v0/boxes/emails", {"type": "queue", "dead_letter": "emails.dead", "max_deliveries": 1})
    call("PUT", "/v0/boxes/thumbnails", {"type": "queue"})
    jobs = [{"data": {"to": f"user{at}@example.com", "template": "welcome"}} for at in range(240)]
    call("POST", "/v0/boxes/emails", {"records": jobs})
    call("POST", "/v0/boxes/thumbnails", {"records": jobs[:37]})
    claimed = call("POST", "/v0/boxes/emails/claim", {"node": "worker-1", "max": 5})["claimed"]
    call(
        "POST",
        "/v0/boxes/emails/nack",
        {"node": "worker-1", "error": "550 no such mailbox", "seqs": [each["$seq"] for each in claimed]},
    )
    call("POST", "/v0/boxes/emails/claim", {"node": "worker-1", "max": 12, "lease_ms": 600_000})
    failed = call("POST", "/v0/boxes/thumbnails/claim", {"node": "resizer-2", "max": 3})["claimed"]
    seqs = [each["$seq"] for each in failed]
    error = {"error": "image is truncated (4 of 812 KiB)", "delay_ms": 900_000}
    call("POST", "/v0/boxes/thumbnails/nack", {"node": "resizer-2", "seqs": seqs, **error})
    for router, source, dest in ROUTERS:
        call("PUT", f"/v0/routers/{router}", {"source": source, "dest": dest})
    cycle = {"source": "invoices", "dest": "orders", "allow_cycle": True, "filter": "never"}
    call("PUT", "/v0/routers/loop", cycle)
    call("PUT", "/v0/boxes/orders/groups/billing", {"cursor": 1100})
    call("PUT", "/v0/boxes/orders/groups/search-index", {"cursor": 1200})
    call("POST", "/v0/boxes/clicks/delete", {"before_seq": 200})
    nightly = {
        "box": "emails",
        "record": {"data": "digest"},
        "cron": "0 3 * * *",
        "time_zone": "Europe/Berlin",
    }
    call("PUT", "/v0/schedules/nightly-digest", nightly)
    call("POST", "/v1/basins", {"basin": "my-first-basin"})
    inside = {"s2-basin": "my-first-basin"}
    call("POST", "/v1/streams", {"stream": "sensors"}, **inside)
    records = [{"body": f'{{"celsius": {20 + at / 10}}}'} for at in range(40)]
    call("POST", "/v1/streams/sensors/records", {"records": records}, **inside)
