"""One load of one server: which boxes it uses, what its users have seen, and whether all is there in the end.

The users of a process share one `Audit`. When several processes load together, each tells the first what its
users saw (`report`), and the first adds it up (`absorb`) and looks at the server when all have stopped
(`finish`). Plain HTTP by the standard library; no locust here, so that tests can use it as it is.
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

#: How long the server may take to answer again after a kill, and routers to bring what is under way.
PATIENCE_S: Final = 60.0
PAUSE_S: Final = 0.1
PAGE_RECORDS: Final = 1000


class Unanswered(Exception):
    """The server has not answered well for `PATIENCE_S`."""


class Audit:
    """Names, and everything that was seen. Bounded by the number of producers and readers, not by records;
    but for jobs done, of which a bitmap is kept."""

    def __init__(self, url: str, name: str, *, boxes: int, queues: int, may_return: bool = False) -> None:
        self.url = url
        self.name = name
        self.boxes = [f"{name}-{number}" for number in range(boxes)]
        self.queues = [f"{name}-jobs-{number}" for number in range(queues)]
        #: Each box of the first half is copied by a router; readers of the copy check what the router did.
        self.copies = {box: f"{box}-copy" for box in self.boxes[: (boxes + 1) // 2]}
        self.faults = Faults()
        self.ledger = Ledger()
        self.jobs = {box: Jobs(box, self.faults, may_return=may_return) for box in self.queues}
        self.retries = 0
        #: Readers at work, whose cursors hold back deletion; those that go through a whole box and delete.
        self.reading: dict[str, list[Reader]] = {}
        self.keepers: dict[str, Reader] = {}
        #: By box: everything below this seq was deleted, or is about to be.
        self.deleted: dict[str, int] = {}
        #: How far the last check is: records read, and about how many there are to read.
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
        """Nobody sends any more: reads what is there and compares it with what was promised. `report` is
        called with how far that is, from 0 to 1."""
        self._report, self._read = report, 0
        self._total = sum(self._to_read(box) for box in (*self.readable, *self.queues))
        for box in self.boxes:
            sent = self.ledger.boxes.get(box, {})
            settle(self._read_to_end(box, 0), sent, self.faults)
            if box in self.copies:
                head = self._state(box)["head_seq"]
                settle(self._read_to_end(self.copies[box], head), sent, self.faults)
        for box in self.queues:
            waiting: dict[str, BitMap] = {}
            for record in self._records(box, 0):
                waiting.setdefault(record["data"]["p"], BitMap()).add(record["data"]["n"])
            self.jobs[box].settle(waiting, self.ledger.boxes.get(box, {}))

    def _to_read(self, box: str) -> int:
        """About how many records the last check reads of a box."""
        keeper = self.keepers.get(box)
        return max(0, int(self._state(box)["count"]) - (keeper.seq if keeper is not None else 0))

    def clean_up(self) -> None:
        for box in (*self.boxes, *self.queues, *self.copies.values()):
            self._call("DELETE", f"/v0/boxes/{box}")

    def _read_to_end(self, box: str, head: int) -> Reader:
        """Reads on where its keeper stopped, at least as far as `head`: a router may still be at work."""
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
                Reader(box, self.faults).told_of_a_gap(answer["tombstone"])
            self._read += len(answer["records"])
            self._report(min(1.0, self._read / max(1, self._total)))
            yield answer["records"]

    def _state(self, box: str) -> dict[str, Any]:
        found: dict[str, Any] = self._call("GET", f"/v0/boxes/{box}")
        return found

    # -- deleting what everyone has seen ---------------------------------------------------------------

    def open(self, box: str) -> Reader:
        """A new reader, whose cursor holds back deletion from now on."""
        reader = Reader(box, self.faults, from_seq=self.deleted.get(box, 0))
        self.reading.setdefault(box, []).append(reader)
        return reader

    def close(self, reader: Reader) -> None:
        self.reading[reader.box].remove(reader)

    def keep(self) -> Reader | None:
        """The reader that goes through a whole box, for one that has none yet."""
        free = [box for box in self.readable if box not in self.keepers]
        return self.keepers.setdefault(free[0], Reader(free[0], self.faults)) if free else None

    def seen_by_all(self, box: str) -> int:
        """The seq up to which every reader of this process has seen a box, and its copy: one source, so the
        seqs of the copy are those of the source."""
        related = [box, *([self.copies[box]] if box in self.copies else [])]
        cursors = [reader.seq for each in related for reader in self.reading.get(each, ())]
        return min([*cursors, *(self.keepers[each].seq if each in self.keepers else 0 for each in related)])

    # -- between processes -----------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """What this process has to tell. Ledgers and keepers in full, the rest since the last report."""
        counts, told = dict(self.faults.counts), list(self.faults.told)
        retries, self.retries = self.retries, 0
        self.faults.counts.clear()
        self.faults.told.clear()
        return {
            "name": self.name,
            "ledger": self.ledger.as_json(),
            "jobs": {box: jobs.news() for box, jobs in self.jobs.items()},
            "faults": counts,
            "told": told,
            "retries": retries,
        }

    def absorb(self, report: dict[str, Any]) -> None:
        if report["name"] != self.name:
            return  # of a run before this one
        self.ledger.update(report["ledger"])
        for box, news in report["jobs"].items():
            self.jobs[box].update(news)
        self.faults.merge(report["faults"], report["told"])
        self.retries += report["retries"]

    def verdict(self) -> dict[str, Any]:
        return {
            "boxes": len(self.boxes),
            "acked": self.ledger.acked_records(),
            "jobs_done": sum(jobs.jobs_done() for jobs in self.jobs.values()),
            "retried": self.retries,
            "faults": dict(self.faults.counts),
            "told": self.faults.told,
            "is_good": not self.faults,
        }

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        """Until it is answered well. All calls here may be made twice."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            status, answer = once(self.url, method, path, body)
            if 200 <= status < 300:
                return orjson.loads(answer)
            if (status and status != 503) or time.monotonic() > deadline:
                raise Unanswered(f"{method} {path} was answered {status}: {answer[:400]!r}")
            time.sleep(PAUSE_S)


def once(url: str, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
    """Status and content; status 0 when there was no answer, with the reason as content."""
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
