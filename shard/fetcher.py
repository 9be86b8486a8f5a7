"""Brings in what the machine needs and does not have in memory: payloads and tags of segments.

    engine --fetch(missing)--> backlog --> [segment-read threads] SegmentStore.read / find_tags
    engine <--done(error?)---- post        loaded into the segment, counted by the cache

Whoever needs a payload that somebody else is fetching waits for that one. Neighbours are read together, as
many as the reader is likely to want next.

Bounds: requests that wait are at most as many as are in flight, which the links bound; one read brings in at
most `bytes_max` (or one batch). Reads from the cold store have threads of their own, so that a slow store
does not hold up reads from this disk.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import structlog

from shard.cache import PayloadCache
from shard.committer import Post
from shard.core.machine import Machine, Missing
from shard.core.sealed import NotLoaded, Segment
from shard.storage.files import Corrupt
from shard.storage.store import Name, SegmentStore, Unreachable
from streams.protocol.commands import Match
from streams.protocol.errors import ColdStoreUnavailable, DataDamaged, StreamsError
from streams.protocol.records import Batch

log = structlog.get_logger()

#: One waits for the disk while the other decodes; more would only share the interpreter.
_HOT_THREADS = 2
#: They mostly wait for the network.
_COLD_THREADS = 4

#: What is brought in for whoever needs one batch and says no more.
READ_BYTES = 256 * 1024

Done = Callable[[StreamsError | None], None]


class Fetcher:
    def __init__(self, machine: Machine, store: SegmentStore, cache: PayloadCache, *, post: Post) -> None:
        self._machine = machine
        self._store = store
        self._cache = cache
        self._post = post
        self._waiting: dict[tuple[Name, int], list[Done]] = {}
        self._hot: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._cold: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self.reads = 0

    def __repr__(self) -> str:
        return f"<Fetcher {len(self._waiting)} under way, {self.reads} done>"

    def start(self) -> None:
        for number in range(_HOT_THREADS + _COLD_THREADS):
            backlog = self._hot if number < _HOT_THREADS else self._cold
            thread = threading.Thread(
                target=_run, args=(backlog,), name=f"segment-read-{number}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """Ends the threads when they have done what they are at."""
        for number in range(len(self._threads)):
            (self._hot if number < _HOT_THREADS else self._cold).put(None)

    def fetch(self, missing: Missing, bytes_max: int, done: Done) -> None:
        """Calls `done` in this thread when it is there, or with the error that says why it is not."""
        if isinstance(missing, NotLoaded):
            key = (Name.of(missing.segment), missing.at)
            waiting = self._waiting.get(key)
            if waiting is not None:
                waiting.append(done)
                return
            self._waiting[key] = [done]
            self._submit(missing.segment.is_cold, lambda: self._read(missing.segment, missing.at, bytes_max))
        else:
            is_cold = any(segment.is_cold for segment in missing.segments)
            self._submit(is_cold, lambda: self._find(missing.segments, missing.match, done))

    def _submit(self, is_cold: bool, work: Callable[[], None]) -> None:
        (self._cold if is_cold else self._hot).put(work)

    # -- in a thread

    def _read(self, segment: Segment, at: int, bytes_max: int) -> None:
        name = Name.of(segment)
        try:
            batches = self._store.read(name, at, bytes_max=bytes_max)
        except (Corrupt, OSError, Unreachable) as trouble:
            self._post(self._not_loaded, name, at, trouble)
            return
        self._post(self._loaded, segment, at, batches)

    def _find(self, segments: Sequence[Segment], match: Match, done: Done) -> None:
        found: list[tuple[Segment, tuple[Sequence[int], Sequence[int]]]] = []
        try:
            for segment in segments:
                found.append((segment, self._store.find_tags(Name.of(segment), match)))
        except (Corrupt, OSError, Unreachable) as trouble:
            self._post(self._not_found, trouble, done)
            return
        self._post(self._found, found, match, done)

    # -- in the engine's thread again

    def _loaded(self, segment: Segment, at: int, batches: Sequence[Batch]) -> None:
        self.reads += 1
        for offset, batch in enumerate(batches):
            self._cache.add(segment, at + offset, batch)
        self._tell(Name.of(segment), at, None)
        self._cache.shrink()  # after those who wait have had what they wanted

    def _not_loaded(self, name: Name, at: int, trouble: Exception) -> None:
        self._tell(name, at, _as_error(trouble))

    def _tell(self, name: Name, at: int, error: StreamsError | None) -> None:
        for done in self._waiting.pop((name, at)):
            done(error)

    def _found(
        self, found: list[tuple[Segment, tuple[Sequence[int], Sequence[int]]]], match: Match, done: Done
    ) -> None:
        self.reads += 1
        for segment, tagged in found:
            box = self._machine.generations.get(segment.generation)
            if box is not None:
                box.found_tags[segment.serial, match] = tagged
        done(None)

    def _not_found(self, trouble: Exception, done: Done) -> None:
        done(_as_error(trouble))


def _as_error(trouble: Exception) -> StreamsError:
    if isinstance(trouble, Unreachable):
        log.warning("the cold store could not be read", reason=str(trouble))
        return ColdStoreUnavailable(f"{trouble}; nothing is lost, try again later")
    log.error("a segment could not be read", reason=str(trouble))
    return DataDamaged(str(trouble))


def _run(backlog: SimpleQueue[Callable[[], None] | None]) -> None:
    while (work := backlog.get()) is not None:
        work()
