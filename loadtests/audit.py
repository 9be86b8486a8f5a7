"""The audit of one load: its boxes, the observations of its users, and the final check of the server.

The users of a process share one `Audit`. With several processes, each sends its observations to the first
(`report`); the first merges them (`absorb`) and checks the server when all have stopped (`finish`). It uses
plain HTTP of the standard library and no locust, so that tests can use it directly.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator
from typing import Any, Final
from urllib.parse import urlsplit

import orjson
from pyroaring import BitMap

from loadtests.checking import Faults, Jobs, Ledger, Reader, settle

#: Longest time for the server to recover after a kill, and for routers to deliver their copies.
PATIENCE_S: Final = 60.0
PAUSE_S: Final = 0.1
PAGE_RECORDS: Final = 1000


class NoAnswer(Exception):
    """The server gave no successful response for `PATIENCE_S` seconds."""


class Audit:
    """Boxes and observations of a load.

    Memory is bounded by the number of producers and readers, not by records, except for a bitmap of done
    jobs.
    """

    def __init__(self, url: str, name: str, *, boxes: int, queues: int, may_return: bool = False) -> None:
        self.url = url
        self.name = name
        self.boxes = [f"{name}-{number}" for number in range(boxes)]
        self.queues = [f"{name}-jobs-{number}" for number in range(queues)]
        #: A router copies each box of the first half; readers of the copies check the router.
        self.copies = {box: f"{box}-copy" for box in self.boxes[: (boxes + 1) // 2]}
        self.faults = Faults()
        self.ledger = Ledger()
        self.jobs = {box: Jobs(box, self.faults, may_return=may_return) for box in self.queues}
        self.retries = 0
        #: Active readers, whose cursors hold back deletion; and readers of a whole box, which delete.
        self.reading: dict[str, list[Reader]] = {}
        self.keepers: dict[str, Reader] = {}
        #: Box -> records below this seq are deleted, or about to be.
        self.trim_seqs: dict[str, int] = {}
        #: Progress of the final check: records read, and approximately how many there are.
        self._report: Callable[[float], None] = lambda ratio: None
        self._read = self._total = 0

    def __repr__(self) -> str:
        return f"<Audit {self.name}: {self.ledger.acked_records()} acked, {self.faults}>"

    @property
    def readable(self) -> list[str]:
        return [*self.boxes, *self.copies.values()]

    # -- by one process, before and after --------------------------------------------------------------

    def prepare(self, durability: str) -> None:
        for box in self.boxes:
            self._call("PUT", f"/v0/boxes/{box}", {"durability": durability})
        for box in self.queues:
            self._call("PUT", f"/v0/boxes/{box}", {"durability": durability, "type": "queue"})
        for box, copy in self.copies.items():
            self._call("PUT", f"/v0/boxes/{copy}", {"durability": durability})
            self._call("PUT", f"/v0/routers/{box}->copy", {"source": box, "dest": copy})

    def finish(self, report: Callable[[float], None] = lambda ratio: None) -> None:
        """Read all boxes and compare them with the acked records, after all users have stopped.

        `report` gets the progress, from 0 to 1.
        """
        self._report, self._read = report, 0
        self._total = sum(self._to_read(box) for box in (*self.readable, *self.queues))
        for box in self.boxes:
            producers = self.ledger.boxes.get(box, {})
            settle(self._read_to_end(box, 0), producers, self.faults)
            if box in self.copies:
                head = self._state(box)["head_seq"]
                settle(self._read_to_end(self.copies[box], head), producers, self.faults)
        for box in self.queues:
            waiting: dict[str, BitMap] = {}
            for record in self._records(box, 0):
                waiting.setdefault(record["data"]["p"], BitMap()).add(record["data"]["n"])
            self.jobs[box].settle(waiting, self.ledger.boxes.get(box, {}))

    def _to_read(self, box: str) -> int:
        """Estimate how many records of a box the final check reads."""
        keeper = self.keepers.get(box)
        return max(0, int(self._state(box)["count"]) - (keeper.seq if keeper is not None else 0))

    def clean_up(self) -> None:
        for box in (*self.boxes, *self.queues, *self.copies.values()):
            self._call("DELETE", f"/v0/boxes/{box}")

    def _read_to_end(self, box: str, head: int) -> Reader:
        """Read a box from its keeper's cursor at least to `head`, and wait for routers that still copy."""
        reader = self.keepers.get(box) or Reader(box, self.faults)
        deadline = time.monotonic() + PATIENCE_S
        while True:
            before = reader.seq
            for page in self._pages(box, reader.seq):
                reader.page(page)
            if reader.seq >= head or (reader.seq == before and time.monotonic() > deadline):
                return reader
            time.sleep(PAUSE_S)

    def _records(self, box: str, from_seq: int) -> Iterator[dict[str, Any]]:
        for page in self._pages(box, from_seq):
            yield from page

    def _pages(self, box: str, from_seq: int) -> Iterator[list[dict[str, Any]]]:
        caught_up = False
        while not caught_up:
            answer = self._call(
                "POST", f"/v0/boxes/{box}/diff", {"from_seq": from_seq, "limit": PAGE_RECORDS}
            )
            from_seq, caught_up = answer["next_from_seq"], answer["caught_up"]
            if answer["tombstone"]:
                Reader(box, self.faults).add_gap(answer["tombstone"])
            self._read += len(answer["records"])
            self._report(min(1.0, self._read / max(1, self._total)))
            yield answer["records"]

    def _state(self, box: str) -> dict[str, Any]:
        state: dict[str, Any] = self._call("GET", f"/v0/boxes/{box}")
        return state

    # -- deletion of records that all readers have seen
    # ---------------------------------------------------------------

    def open(self, box: str) -> Reader:
        """Return a new reader, whose cursor holds back deletion from now on."""
        reader = Reader(box, self.faults, from_seq=self.trim_seqs.get(box, 0))
        self.reading.setdefault(box, []).append(reader)
        return reader

    def close(self, reader: Reader) -> None:
        self.reading[reader.box].remove(reader)

    def keep(self) -> Reader | None:
        """Return a reader of a whole box that has no such reader yet, or None."""
        free = [box for box in self.readable if box not in self.keepers]
        return self.keepers.setdefault(free[0], Reader(free[0], self.faults)) if free else None

    def seen_by_all(self, box: str) -> int:
        """Return the seq up to which every reader of this process has read a box and its copy.

        The copy has one source, so its seqs are those of the source.
        """
        boxes = [box, *([self.copies[box]] if box in self.copies else [])]
        cursors = [reader.seq for each in boxes for reader in self.reading.get(each, ())]
        return min([*cursors, *(self.keepers[each].seq if each in self.keepers else 0 for each in boxes)])

    # -- between processes -----------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """Return the observations of this process: the ledger in full, the rest since the last report."""
        counts, descriptions = dict(self.faults.counts), list(self.faults.descriptions)
        retries, self.retries = self.retries, 0
        self.faults.counts.clear()
        self.faults.descriptions.clear()
        return {
            "name": self.name,
            "ledger": self.ledger.as_json(),
            "jobs": {box: jobs.news() for box, jobs in self.jobs.items()},
            "faults": counts,
            "descriptions": descriptions,
            "retries": retries,
        }

    def absorb(self, report: dict[str, Any]) -> None:
        if report["name"] != self.name:
            return  # from an earlier run
        self.ledger.update(report["ledger"])
        for box, news in report["jobs"].items():
            self.jobs[box].update(news)
        self.faults.merge(report["faults"], report["descriptions"])
        self.retries += report["retries"]

    def verdict(self) -> dict[str, Any]:
        return {
            "boxes": len(self.boxes),
            "acked": self.ledger.acked_records(),
            "jobs_done": sum(jobs.jobs_done() for jobs in self.jobs.values()),
            "retried": self.retries,
            "faults": dict(self.faults.counts),
            "descriptions": self.faults.descriptions,
            "is_good": not self.faults,
        }

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        """Repeat a call until it succeeds. All calls here are idempotent."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            status, answer = once(self.url, method, path, body)
            if 200 <= status < 300:
                return orjson.loads(answer)
            if (status and status != 503) or time.monotonic() > deadline:
                raise NoAnswer(f"{method} {path} was answered {status}: {answer[:400]!r}")
            time.sleep(PAUSE_S)


def once(url: str, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
    """Return status and content; status 0, with the reason as content, if there is no response."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(
        parts.hostname or "127.0.0.1", parts.port or 80, timeout=PATIENCE_S
    )
    text = None if body is None else json.dumps(body)
    try:
        connection.request(method, path, text, {"Content-Type": "application/json"} if text else {})
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (OSError, http.client.HTTPException) as error:
        return 0, repr(error).encode()
    finally:
        connection.close()
