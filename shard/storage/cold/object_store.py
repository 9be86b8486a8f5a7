"""A cold store in an object store, through obstore.

Rules of the file:
  1. Every call ends within its deadline, whatever the network or the library does, and may be repeated.
  2. No call holds more than a few pieces of `PIECE_BYTES` in memory besides its result.
  3. The library is asked for one range at a time: its multi-range read panics when an object has shrunk.

Invariants:
  WHOLE_OR_ABSENT  a name has no object or a complete one: an object appears by one request or by the
                   completion of its upload, after the size and checksum of its source were verified.
  PIECES           an upload has no more parts than a store accepts.
  RUNS_COVER       the fetched ranges cover the requested ones, and do not overlap.
  DEADLINE         parts that are sent at once fit into a request's timeout, and a request into a call's.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import closing
from datetime import timedelta
from functools import partial
from typing import TypeVar
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    GenericError,
    NotSupportedError,
    PreconditionError,
)
from obstore.store import from_url
from xxhash import xxh3_64

from shard.storage.cold.base import (
    Chunks,
    ColdBase,
    ColdConfigError,
    ColdDamaged,
    ColdMissing,
    ColdUnavailable,
    Measure,
    check_name,
    check_prefix,
    compare,
    is_name,
    too_short,
)
from shard.storage.files import Buffer, DiskLike

#: The most bytes of one request. S3 requires 5 MiB or more in each part except the last, and accepts 10,000
#: parts.
PIECE_BYTES = 8 << 20
PIECES_MAX = 10_000
#: Parts that are sent at once: two fill a gigabit link and need three pieces in memory, one being filled.
UPLOADS_MAX = 2
#: Ranges that are requested at once.
FETCHES_MAX = 4
#: Two ranges with a smaller gap are fetched as one: a round trip to an object store takes about 20 ms, in
#: which this much arrives at 12 MB/s.
GAP_BYTES_MAX = 256 << 10
#: Names in one page of a listing; no store returns more.
NAMES_PER_PAGE = 1000

#: Two lost SYNs cost three seconds, a TLS handshake well under one.
CONNECT_TIMEOUT_S = 5.0
#: All parts in flight must fit at the minimum rate: two of 8 MiB take 16 s at 1 MiB/s.
REQUEST_TIMEOUT_S = 20.0
#: Long enough to give up a hung request and repeat it once. A reader would not wait longer.
DEADLINE_S = 30.0
#: The deadline grows by one second for each of these bytes.
BYTES_PER_S_MIN = 1 << 20
#: Retries of one request by the library, and attempts of a whole call. The library does not retry
#: everything: not a listing that breaks off, nor a delete whose response was lost.
REQUEST_RETRIES_MAX = 4
ATTEMPTS_MAX = 3
#: The first delay between two attempts; it doubles up to the maximum.
BACKOFF_S = 0.1
BACKOFF_S_MAX = 2.0

_STATUS = re.compile(r"status code: (\d{3})")

assert UPLOADS_MAX * PIECE_BYTES / BYTES_PER_S_MIN <= REQUEST_TIMEOUT_S <= DEADLINE_S, "DEADLINE"

T = TypeVar("T")


class ObjectCold(ColdBase):
    """A cold store whose objects are below one prefix of one bucket.

    obstore retries single requests and broken streams; this class repeats whole calls, which is safe, and
    applies one deadline to both. The deadline is the reason for its asynchronous API, in an event loop that
    lives as long as the call (a fraction of a millisecond): such a call can be cancelled, and then no thread
    goes on with it. The parts of a cancelled upload stay in the bucket, invisible, until the bucket's
    lifecycle rule for incomplete uploads removes them.
    """

    def __init__(
        self,
        url: str,
        disk: DiskLike,
        *,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        request_timeout_s: float = REQUEST_TIMEOUT_S,
        deadline_s: float = DEADLINE_S,
        backoff_s: float = BACKOFF_S,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        super().__init__(disk)
        _check_url(url)
        self._url = url.rstrip("/")
        self._deadline_s = deadline_s
        self._backoff_s = backoff_s
        self._piece_bytes = piece_bytes
        try:
            self._store = from_url(
                self._url,
                client_options={
                    # The endpoint's scheme decides about TLS. Any option here makes obstore ignore the
                    # environment's, AWS_ALLOW_HTTP among them.
                    "allow_http": True,
                    "connect_timeout": timedelta(seconds=connect_timeout_s),
                    "timeout": timedelta(seconds=request_timeout_s),
                },
                retry_config={
                    "max_retries": REQUEST_RETRIES_MAX,
                    "retry_timeout": timedelta(seconds=deadline_s),
                    "backoff": {
                        "init_backoff": timedelta(seconds=backoff_s),
                        "max_backoff": timedelta(seconds=max(backoff_s, BACKOFF_S_MAX)),
                        "base": 2,
                    },
                },
            )
        except (BaseError, ValueError) as error:
            raise ColdConfigError(url, _first_line(error)) from error

    def __repr__(self) -> str:
        return f"<ObjectCold {self._url}: {self._deadline_s:g} s>"

    def verify(self, name: str, *, size: int, checksum: int) -> None:
        check_name(name)

        async def attempt() -> Measure:
            digest = xxh3_64()
            stored_size = await self._head(name)
            if stored_size == size:
                for start in range(0, size, self._piece_bytes):
                    digest.update(await self._fetch(name, start, min(size, start + self._piece_bytes)))
            return Measure(stored_size, digest.intdigest())

        compare(name, self._call(name, attempt, moved_bytes=size), Measure(size, checksum))

    def size(self, name: str) -> int | None:
        check_name(name)
        try:
            return self._call(name, lambda: self._head(name))
        except ColdMissing:
            return None

    def names(self, prefix: str = "") -> Iterator[str]:
        check_prefix(prefix)
        last: str | None = None
        while True:
            page = self._call(prefix, partial(self._page, prefix, after=last))
            yield from filter(is_name, page)
            if len(page) < NAMES_PER_PAGE:
                return
            last = page[-1]

    def delete(self, name: str) -> None:
        check_name(name)

        async def attempt() -> None:
            await obstore.delete_async(self._store, name)

        try:
            self._call(name, attempt)
        except ColdMissing:
            pass

    def create(self, name: str, content: bytes) -> bool:
        check_name(name)
        put = partial(obstore.put_async, self._store, name, content, use_multipart=False)

        async def attempt() -> bool:
            try:
                await put(mode="create")
            except (AlreadyExistsError, PreconditionError):
                return False
            except NotSupportedError:  # this store cannot decide which call was first
                await put()
            return True

        return self._call(name, attempt)

    def _put(self, name: str, chunks: Chunks, size: int) -> None:
        assert size <= PIECES_MAX * self._piece_bytes, "PIECES: 80 GB; a segment is a thousandth"

        async def attempt() -> None:
            with closing(chunks()) as buffers:
                try:
                    if size <= self._piece_bytes:
                        await obstore.put_async(self._store, name, b"".join(buffers), use_multipart=False)
                    else:
                        await obstore.put_async(
                            self._store,
                            name,
                            _as_async(buffers),
                            chunk_size=self._piece_bytes,
                            max_concurrency=UPLOADS_MAX,
                        )
                except FileNotFoundError as error:
                    if _is_bucket_missing(error):
                        raise
                    # The completion took effect, its response was lost, and the retry found no upload.
                    raise ColdUnavailable(name, "the object store no longer knows the upload") from error

        self._call(name, attempt, moved_bytes=size)

    def _read(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        runs, run_of = _runs(ranges, piece_bytes=self._piece_bytes)
        limit = asyncio.Semaphore(FETCHES_MAX)

        async def fetch(start: int, end: int) -> bytes:
            pieces = []
            for at in range(start, end, self._piece_bytes):
                async with limit:
                    pieces.append(await self._fetch(name, at, min(end, at + self._piece_bytes)))
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)

        async def attempt() -> list[bytes]:
            return await asyncio.gather(*(fetch(start, end) for start, end in runs))

        contents = self._call(name, attempt, moved_bytes=sum(end - start for start, end in runs))
        parts = []
        for (offset, length), run in zip(ranges, run_of, strict=True):
            start = offset - runs[run][0]
            parts.append(contents[run][start : start + length])
        return parts

    async def _fetch(self, name: str, start: int, end: int) -> bytes:
        content = await obstore.get_range_async(self._store, name, start=start, end=end)
        if len(content) != end - start:
            raise too_short(name, end)
        return bytes(content)

    async def _head(self, name: str) -> int:
        try:
            return (await obstore.head_async(self._store, name))["size"]
        except FileNotFoundError:
            # A response to HEAD has no body, so a missing bucket looks like a missing object.
            await obstore.get_range_async(self._store, name, start=0, length=1)
            raise

    async def _page(self, prefix: str, *, after: str | None) -> list[str]:
        # The listing has no local variable: when the call is cancelled, the library's own thread must drop
        # the request. If this thread drops it, the library panics.
        listing = partial(obstore.list, self._store, prefix or None, offset=after, chunk_size=NAMES_PER_PAGE)
        try:
            page = await listing().__anext__()
        except StopAsyncIteration:
            return []
        return [entry["path"] for entry in page]

    def _call(self, name: str, attempt: Callable[[], Awaitable[T]], *, moved_bytes: int = 0) -> T:
        return asyncio.run(
            self._run_with_deadline(name, attempt, self._deadline_s + moved_bytes / BYTES_PER_S_MIN)
        )

    async def _run_with_deadline(
        self, name: str, attempt: Callable[[], Awaitable[T]], deadline_s: float
    ) -> T:
        """Run attempts until the deadline, and translate errors of the library."""
        try:
            async with asyncio.timeout(deadline_s):
                return await self._retry(attempt)
        except TimeoutError:
            raise ColdUnavailable(name, f"no response from {self._url} within {deadline_s:.3g} s") from None
        except FileNotFoundError as error:
            if _is_bucket_missing(error):
                raise ColdUnavailable(name, f"the bucket of {self._url} does not exist") from error
            raise ColdMissing(name) from None
        except BaseError as error:
            if _status(error) == 416:
                raise ColdDamaged(name, "the object ends before the requested bytes") from error
            raise ColdUnavailable(name, _first_line(error)) from error

    async def _retry(self, attempt: Callable[[], Awaitable[T]]) -> T:
        backoff_s = self._backoff_s
        for _ in range(ATTEMPTS_MAX - 1):
            try:
                return await attempt()
            except ColdUnavailable:
                pass
            except GenericError as error:
                if 400 <= _status(error) < 500:
                    raise  # a retry would get the same response
            # Jitter: shards that failed together should not retry together.
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(2 * backoff_s, BACKOFF_S_MAX)
        return await attempt()


async def _as_async(buffers: Iterable[Buffer]) -> AsyncIterator[Buffer]:
    """Yield the buffers asynchronously. They are read in this thread and loop, so reading ends with the
    call."""
    for buffer in buffers:
        yield buffer


def _runs(ranges: Sequence[tuple[int, int]], *, piece_bytes: int) -> tuple[list[tuple[int, int]], list[int]]:
    """Return the (start, end) to fetch for these ranges, and for each range the number of its run.

    ranges    |--a--|   |-b-|                          |--c--|
    runs      |------ 0 ----|                          |- 1 -|
                     gap <= GAP_BYTES_MAX, and a joined run is no longer than a piece
    """
    runs: list[tuple[int, int]] = []
    run_of = [0] * len(ranges)
    for number in sorted(range(len(ranges)), key=lambda number: ranges[number]):
        offset, length = ranges[number]
        start, end = runs[-1] if runs else (0, -1)
        joined_end = max(end, offset + length)
        if (
            runs
            and offset <= end + GAP_BYTES_MAX
            and (joined_end == end or joined_end - start <= piece_bytes)
        ):
            runs[-1] = (start, joined_end)
        else:
            runs.append((offset, offset + length))
        run_of[number] = len(runs) - 1
        assert runs[-1][0] <= offset and offset + length <= runs[-1][1], "RUNS_COVER"
    return runs, run_of


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ColdConfigError(url, str(error)) from error
    if "@" in parts.netloc:
        raise ColdConfigError(
            f"{parts.scheme}://…", "the URL contains credentials; put them into the environment"
        )
    if not parts.netloc or parts.query or parts.fragment:
        raise ColdConfigError(url, "the URL must be a bucket and a prefix, and nothing else")


def _status(error: BaseError) -> int:
    """Return the HTTP status in a message of the library, which has no field for it; 0 if there is none."""
    match = _STATUS.search(str(error))
    return int(match[1]) if match else 0


def _is_bucket_missing(error: FileNotFoundError) -> bool:
    return any(code in str(error) for code in ("NoSuchBucket", "ContainerNotFound"))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].strip()
