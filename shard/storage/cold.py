"""The cold store: files that never change again, kept by name where keeping is cheap.

    open_cold("/mnt/archive", disk)           a folder                  FolderCold, by way of the disk
    open_cold("file:///mnt/archive", disk)    the same
    open_cold("s3://bucket/prefix", disk)     an object store           ObjectCold, by way of obstore
    open_cold("gs://bucket/prefix", disk)     keys and endpoint are those of the environment
    open_cold("az://container/prefix", disk)  (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, …)

    name      shard-00/segments/7/00000000000000000001-000000000012.seg
              folders have no dot; a file has one, and does not end in `.tmp`

What goes wrong is one of three things, by whose move it is: `ColdUnavailable` (wait, then ask again),
`ColdMissing` and `ColdDamaged` (look for another copy). Trouble with the *local* file that is to be put is
none of them: it leaves as the `OSError` it is, or as `Corrupt` when its bytes are not those promised.

Rules of the file:
  1. Every call may come from any thread and blocks it. None may come from a thread that runs an event loop.
  2. A call on an object store ends within its deadline whatever the network or the library does, and a
     repeat is always safe. A folder can be no more patient than its disk: a hung mount hangs the call.
  3. No call holds more than a few pieces of `PIECE_BYTES` beside what it returns.
  4. After `ColdUnavailable` a put or a delete may still have happened, or may yet happen on the server.
  5. The library is asked for one range at a time: its own reading of many panics when an object has shrunk.

Invariants:
  whole-or-absent  under a name there is nothing or everything: a folder's file appears by rename after its
                   bytes are durable, an object by one request or by the completion of its upload; and
                   neither before size and checksum of what was read were found right.
  exact-read       a read returns as many bytes as were asked for, or raises.
  one-put-a-name   a folder's temporary file has one writer. A second put of that name is told to wait.
  one-kind         a name is never both a file and a folder: one has a dot, the other has none.
"""

from __future__ import annotations

import asyncio
import random
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import timedelta
from functools import partial
from typing import NamedTuple, Protocol, TypeVar
from urllib.parse import unquote, urlsplit

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

from shard.storage.files import Buffer, Corrupt, DiskLike, parent_of

#: What is read from or written to a disk at once.
CHUNK_BYTES = 1 << 20
#: What one request carries at most. S3 wants 5 MiB or more in each part but the last, and takes 10,000 parts.
PIECE_BYTES = 8 << 20
PIECES_MAX = 10_000
#: Parts that are sent at once: two fill a gigabit link and hold three pieces, one being filled, in memory.
UPLOADS_MAX = 2
#: Ranges that are asked for at once.
FETCHES_MAX = 4
#: Bytes between two ranges that are read for nothing rather than asked around: a round trip to an object
#: store takes some 20 ms, in which this much arrives at 12 MB/s.
GAP_BYTES_MAX = 256 << 10
#: Names in one page of a listing; no store gives more.
NAMES_PER_PAGE = 1000

#: Two lost SYNs cost three seconds, a TLS handshake well under one.
CONNECT_TIMEOUT_S = 5.0
#: All parts under way must fit at the least rate we put up with: two of 8 MiB take 16 s at 1 MiB/s.
REQUEST_TIMEOUT_S = 20.0
#: A request that hung can be given up and asked again once. More than a reader would wait for an answer.
DEADLINE_S = 30.0
#: Calls that move much are given a second more for each of these.
BYTES_PER_S_MIN = 1 << 20
#: Times the library repeats one request, and times we repeat all of a call. The library does not repeat
#: everything that may be: not a listing that breaks off, nor a delete whose answer was lost.
REQUEST_RETRIES_MAX = 4
ATTEMPTS_MAX = 3
#: The first pause between two tries; each is twice as long as the one before, up to the second figure.
BACKOFF_S = 0.1
BACKOFF_S_MAX = 2.0

_SCHEMES = ("s3", "gs", "az")
_LEGAL = (
    "Give the path of a folder that exists, file:///path, s3://bucket/prefix, gs://bucket/prefix or "
    "az://container/prefix"
)
_TEMPORARY = ".tmp"
#: With `.tmp` behind it a part still fits the 255 bytes a file system allows; S3 allows 1,024 in all.
_PART_BYTES_MAX = 200
_NAME_BYTES_MAX = 700
_FOLDER = re.compile(r"[A-Za-z0-9_-]+")
_FILE = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)+")
_STATUS = re.compile(r"status code: (\d{3})")

assert UPLOADS_MAX * PIECE_BYTES / BYTES_PER_S_MIN <= REQUEST_TIMEOUT_S <= DEADLINE_S

T = TypeVar("T")


class ColdConfigError(ValueError):
    """The place that was configured cannot be a cold store."""

    def __init__(self, location: str, reason: str) -> None:
        self.location = location
        self.reason = reason
        super().__init__(f"{location!r} cannot be the cold store: {reason}. {_LEGAL}.")


class ColdError(Exception):
    """Something about one name in the cold store."""

    def __init__(self, name: str, reason: str) -> None:
        self.name = name
        self.reason = reason
        super().__init__(f"{name or 'the listing'} in the cold store: {reason}")


class ColdUnavailable(ColdError):
    """The store cannot be used now, or not with these rights. What is stored there is not in question."""


class ColdMissing(ColdError):
    """The store answers, and has nothing under this name."""

    def __init__(self, name: str) -> None:
        super().__init__(name, "there is nothing under this name")


class ColdDamaged(ColdError):
    """What is stored under the name is not what was put there."""


class ColdStore(Protocol):
    def put(self, name: str, source: str | Iterable[Buffer], *, size: int, checksum: int) -> None:
        """Store a local file, given by its path, or buffers that can be gone through more than once.

        Returns when the copy is durable. `checksum` is the `xxh3_64` of all bytes, without a seed. To put a
        name again with the same content is harmless; other content replaces it.
        """

    def create(self, name: str, content: bytes) -> bool:
        """Store a few bytes unless something has this name; False if something has. Of two calls at once one
        succeeds at most, if the store honours conditional writes. After `ColdUnavailable` look who did."""

    def verify(self, name: str, *, size: int, checksum: int) -> None:
        """Read all of it back; `ColdDamaged` unless size and checksum are these."""

    def read(self, name: str, offset: int, length: int) -> bytes:
        """Exactly these bytes; `ColdDamaged` if the file ends before."""

    def read_many(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """The bytes of each `(offset, length)`, in the order asked; near ones are fetched together."""

    def size(self, name: str) -> int | None: ...

    def names(self, prefix: str = "") -> Iterator[str]:
        """All names under a folder ("a/b/", or "" for all), sorted. Each page is a call of its own."""

    def delete(self, name: str) -> None:
        """After this the name is missing, whether or not it was before."""


class ColdSource:
    """One file in the cold store, in the shape in which the reader of segments takes a local one."""

    __slots__ = ("_size", "_store", "name")

    def __init__(self, store: ColdStore, name: str, size: int) -> None:
        self._store = store
        self._size = size
        self.name = name

    def __repr__(self) -> str:
        return f"<ColdSource {self.name}: {self._size} bytes>"

    def size(self) -> int:
        return self._size

    def read(self, offset: int, length: int) -> bytes:
        """Short only at the end, as it was when the file was put there."""
        return self._store.read(self.name, offset, max(0, min(length, self._size - offset)))


class Measure(NamedTuple):
    size: int
    checksum: int


def measure(disk: DiskLike, path: str) -> Measure:
    """What `put` and `verify` want to know of a local file."""
    digest = xxh3_64()
    size = 0
    handle = disk.open(path, writable=False)
    try:
        while chunk := disk.pread(handle, CHUNK_BYTES, size):
            digest.update(chunk)
            size += len(chunk)
    finally:
        disk.close(handle)
    return Measure(size, digest.intdigest())


def open_cold(location: str, disk: DiskLike) -> ColdStore:
    """The store at `location`. A folder is looked for; an object store is not asked anything yet."""
    scheme, separator, rest = location.partition("://")
    if separator and scheme in _SCHEMES:
        return ObjectCold(location, disk)
    if separator and scheme != "file":
        raise ColdConfigError(location, f"{scheme}:// is not a kind of store it can be")
    if separator and not rest.startswith("/"):
        raise ColdConfigError(location, "a file URL has three slashes and then an absolute path")
    folder = (unquote(rest) if separator else location).rstrip("/")
    if not folder:
        raise ColdConfigError(location, "it names no folder")
    try:
        disk.listdir(folder)
    except OSError as error:
        # The folder is never made: if it is where another disk should be mounted, it would hide that.
        raise ColdConfigError(location, f"the folder cannot be read ({error.strerror})") from error
    return FolderCold(folder, disk)


class _LocalFailure(Exception):
    """The local disk failed while the source was read. Carries the error past those who translate theirs."""

    def __init__(self, error: OSError) -> None:
        self.error = error


class _Cold:
    """What both kinds share: names are checked, sources are measured while they are read."""

    def __init__(self, disk: DiskLike) -> None:
        self._disk = disk

    def put(self, name: str, source: str | Iterable[Buffer], *, size: int, checksum: int) -> None:
        _check_name(name)
        assert isinstance(source, str) or iter(source) is not source, "an attempt may have to be repeated"
        try:
            self._put(name, lambda: self._chunks(name, source, Measure(size, checksum)), size)
        except _LocalFailure as failure:
            raise failure.error from None

    def read(self, name: str, offset: int, length: int) -> bytes:
        return self.read_many(name, [(offset, length)])[0]

    def read_many(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        _check_name(name)
        assert all(offset >= 0 and length >= 0 for offset, length in ranges)
        wanted = [(offset, length) for offset, length in ranges if length]
        found = iter(self._read(name, wanted) if wanted else ())
        parts = [next(found) if length else b"" for _, length in ranges]
        assert all(len(part) == length for part, (_, length) in zip(parts, ranges, strict=True)), "exact-read"
        return parts

    def _put(self, name: str, chunks: Callable[[], Generator[Buffer, None, None]], size: int) -> None:
        raise NotImplementedError

    def _read(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        raise NotImplementedError

    def _chunks(
        self, name: str, source: str | Iterable[Buffer], expected: Measure
    ) -> Generator[Buffer, None, None]:
        """The bytes of a source; after the last of them `Corrupt`, unless they are those expected."""
        where = source if isinstance(source, str) else name
        digest = xxh3_64()
        size = 0
        try:
            for chunk in self._file_chunks(source) if isinstance(source, str) else source:
                digest.update(chunk)
                size += len(chunk)
                yield chunk
        except OSError as error:
            raise _LocalFailure(error) from error
        if size != expected.size:
            raise Corrupt(where, size, f"it is {size} bytes long, not {expected.size}; it was not copied")
        if digest.intdigest() != expected.checksum:
            raise Corrupt(where, 0, "it does not match its checksum; it was not copied")

    def _file_chunks(self, path: str) -> Generator[Buffer, None, None]:
        handle = self._disk.open(path, writable=False)
        try:
            offset = 0
            while chunk := self._disk.pread(handle, CHUNK_BYTES, offset):
                offset += len(chunk)
                yield chunk
        finally:
            self._disk.close(handle)


# ---------------------------------------------------------------------------------------------------
# A folder


class FolderCold(_Cold):
    """Files below one folder, which must be there: it is often a mount, and its absence is not emptiness."""

    def __init__(self, folder: str, disk: DiskLike) -> None:
        super().__init__(disk)
        self._folder = folder
        #: name -> who is putting it; changed by single steps only.
        self._putting: dict[str, object] = {}
        #: Folders whose own names are known to be durable.
        self._durable_folders: set[str] = set()

    def __repr__(self) -> str:
        return f"<FolderCold {self._folder}: {len(self._putting)} being put>"

    def verify(self, name: str, *, size: int, checksum: int) -> None:
        with self._translated(name):
            found = measure(self._disk, self._path(name))
        _compare(name, found, Measure(size, checksum))

    def size(self, name: str) -> int | None:
        try:
            with self._translated(name):
                return self._disk.size(self._path(name))
        except ColdMissing:
            return None

    def names(self, prefix: str = "") -> Iterator[str]:
        _check_prefix(prefix)
        try:
            with self._translated(prefix):
                entries = self._disk.listdir(f"{self._folder}/{prefix}".rstrip("/"))
        except ColdMissing:
            return
        # A folder sorts as its names do, with the slash: "a-b.seg" comes before what is in "a".
        for entry in sorted(entry if "." in entry else f"{entry}/" for entry in entries):
            if entry.endswith("/"):
                if _FOLDER.fullmatch(entry[:-1]):
                    yield from self.names(prefix + entry)
            elif _is_name(prefix + entry):
                yield prefix + entry

    def delete(self, name: str) -> None:
        path = self._path(name)
        try:
            with self._translated(name):
                if self._disk.exists(path):
                    self._disk.unlink(path)
                # What a crash has left of a put.
                if name not in self._putting and self._disk.exists(path + _TEMPORARY):
                    self._disk.unlink(path + _TEMPORARY)
                # Also if it was gone: an earlier call may have failed between the two.
                self._disk.fsync_dir(parent_of(path))
                self._drop_empty_folders(parent_of(path))
        except ColdMissing:
            pass

    def _drop_empty_folders(self, folder: str) -> None:
        """Folders of which nothing is left, but for the topmost, which others share: between the making of a
        folder and of a file in it nobody else may remove it."""
        while parent_of(folder) != self._folder and folder != self._folder:
            try:
                self._disk.rmdir(folder)
            except OSError:  # there is something in it
                return
            self._durable_folders.discard(folder)
            folder = parent_of(folder)

    def _put(self, name: str, chunks: Callable[[], Generator[Buffer, None, None]], size: int) -> None:
        me = object()
        if self._putting.setdefault(name, me) is not me:
            raise ColdUnavailable(name, "another thread is putting it")
        path = self._path(name)
        try:
            self._make_folders(name)
            self._write(path + _TEMPORARY, chunks)
            self._disk.rename(path + _TEMPORARY, path)
            self._disk.fsync_dir(parent_of(path))
        except OSError as error:
            # Someone may have removed folders that we believe to be there; look again the next time.
            self._durable_folders.clear()
            raise ColdUnavailable(name, str(error)) from error
        finally:
            del self._putting[name]

    def create(self, name: str, content: bytes) -> bool:
        path = self._path(name)
        # Of this process and call alone: another server may be at the same at this moment.
        temporary = f"{path}.{uuid.uuid4().hex}{_TEMPORARY}"
        try:
            self._make_folders(name)
            self._write(temporary, lambda: (chunk for chunk in (content,)))
            try:
                self._disk.link(temporary, path)
            except FileExistsError:
                return False
            finally:
                self._drop_quietly(temporary)
            self._disk.fsync_dir(parent_of(path))
        except OSError as error:
            self._durable_folders.clear()
            raise ColdUnavailable(name, str(error)) from error
        return True

    def _write(self, path: str, chunks: Callable[[], Generator[Buffer, None, None]]) -> None:
        """Make a durable file of the chunks. What a crash leaves of it is overwritten by the next put."""
        disk = self._disk
        handle = disk.create(path)
        try:
            offset = 0
            with closing(chunks()) as buffers:
                for buffer in buffers:
                    offset += disk.pwritev(handle, [buffer], offset)
            disk.fsync(handle)
        except Exception:
            self._drop_quietly(path)
            raise
        finally:
            disk.close(handle)

    def _drop_quietly(self, path: str) -> None:
        """A full disk should not stay full of what failed. If even this fails, the first error tells more."""
        try:
            self._disk.unlink(path)
        except OSError:
            pass

    def _make_folders(self, name: str) -> None:
        """Make the folders of a name, from the top, so that each is durable before anything is in it."""
        path = self._folder
        for part in name.split("/")[:-1]:
            parent, path = path, f"{path}/{part}"
            if path not in self._durable_folders:
                self._disk.mkdir(path)
                self._disk.fsync_dir(parent)
                self._durable_folders.add(path)

    def _read(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        with self._translated(name):
            handle = self._disk.open(self._path(name), writable=False)
            try:
                parts = [self._disk.pread(handle, length, offset) for offset, length in ranges]
            finally:
                self._disk.close(handle)
        for part, (offset, length) in zip(parts, ranges, strict=True):
            if len(part) != length:
                raise _too_short(name, offset + length)
        return parts

    def _path(self, name: str) -> str:
        _check_name(name)
        return f"{self._folder}/{name}"

    @contextmanager
    def _translated(self, name: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, NotADirectoryError):
            if self._disk.exists(self._folder):
                raise ColdMissing(name) from None
            raise ColdUnavailable(name, f"the folder {self._folder} is not there") from None
        except OSError as error:
            raise ColdUnavailable(name, str(error)) from error


# ---------------------------------------------------------------------------------------------------
# An object store


class ObjectCold(_Cold):
    """Objects below one prefix of one bucket.

    obstore retries single requests and streams that break off; we repeat whole calls, which are safe to
    repeat, and hold both under one deadline. The deadline is why its asynchronous half is used, in an event
    loop that lives as long as the call (a fraction of a millisecond): a call there can be cancelled, and then
    nothing of it is left behind in a thread. What was uploaded of a file whose upload was cancelled stays in
    the bucket, unseen, until the bucket's own rule for unfinished uploads removes it.
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
                    # Whether to use TLS is said by the endpoint's scheme. To give any option here makes
                    # obstore ignore those of the environment, AWS_ALLOW_HTTP among them.
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
        _check_name(name)

        async def attempt() -> Measure:
            digest = xxh3_64()
            found_size = await self._head(name)
            if found_size == size:
                for start in range(0, size, self._piece_bytes):
                    digest.update(await self._fetch(name, start, min(size, start + self._piece_bytes)))
            return Measure(found_size, digest.intdigest())

        _compare(name, self._call(name, attempt, moved_bytes=size), Measure(size, checksum))

    def size(self, name: str) -> int | None:
        _check_name(name)
        try:
            return self._call(name, lambda: self._head(name))
        except ColdMissing:
            return None

    def names(self, prefix: str = "") -> Iterator[str]:
        _check_prefix(prefix)
        last: str | None = None
        while True:
            page = self._call(prefix, partial(self._page, prefix, after=last))
            yield from filter(_is_name, page)
            if len(page) < NAMES_PER_PAGE:
                return
            last = page[-1]

    def delete(self, name: str) -> None:
        _check_name(name)

        async def attempt() -> None:
            await obstore.delete_async(self._store, name)

        try:
            self._call(name, attempt)
        except ColdMissing:
            pass

    def create(self, name: str, content: bytes) -> bool:
        _check_name(name)
        put = partial(obstore.put_async, self._store, name, content, use_multipart=False)

        async def attempt() -> bool:
            try:
                await put(mode="create")
            except (AlreadyExistsError, PreconditionError):
                return False
            except NotSupportedError:  # such a store cannot tell who was first
                await put()
            return True

        return self._call(name, attempt)

    def _put(self, name: str, chunks: Callable[[], Generator[Buffer, None, None]], size: int) -> None:
        assert size <= PIECES_MAX * self._piece_bytes, "80 GB; a segment is a thousandth of that"

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
                    # The completion took effect, its answer was lost, and the repeat found no upload.
                    raise ColdUnavailable(name, "the server has lost the upload") from error

        self._call(name, attempt, moved_bytes=size)

    def _read(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        runs, run_of = _runs(ranges, piece_bytes=self._piece_bytes)
        gate = asyncio.Semaphore(FETCHES_MAX)

        async def fetch(start: int, end: int) -> bytes:
            pieces = []
            for at in range(start, end, self._piece_bytes):
                async with gate:
                    pieces.append(await self._fetch(name, at, min(end, at + self._piece_bytes)))
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)

        async def attempt() -> list[bytes]:
            return await asyncio.gather(*(fetch(start, end) for start, end in runs))

        found = self._call(name, attempt, moved_bytes=sum(end - start for start, end in runs))
        parts = []
        for (offset, length), run in zip(ranges, run_of, strict=True):
            start = offset - runs[run][0]
            parts.append(found[run][start : start + length])
        return parts

    async def _fetch(self, name: str, start: int, end: int) -> bytes:
        found = await obstore.get_range_async(self._store, name, start=start, end=end)
        if len(found) != end - start:
            raise _too_short(name, end)
        return bytes(found)

    async def _head(self, name: str) -> int:
        try:
            return (await obstore.head_async(self._store, name))["size"]
        except FileNotFoundError:
            # An answer to HEAD has no body, so it cannot tell a missing object from a missing bucket.
            await obstore.get_range_async(self._store, name, start=0, length=1)
            raise

    async def _page(self, prefix: str, *, after: str | None) -> list[str]:
        # No name is kept for the listing: a request that is under way must be dropped by the library's own
        # thread, when the call is cancelled. Dropped by ours it panics.
        listing = partial(obstore.list, self._store, prefix or None, offset=after, chunk_size=NAMES_PER_PAGE)
        try:
            page = await listing().__anext__()
        except StopAsyncIteration:
            return []
        return [found["path"] for found in page]

    def _call(self, name: str, attempt: Callable[[], Awaitable[T]], *, moved_bytes: int = 0) -> T:
        return asyncio.run(self._bounded(name, attempt, self._deadline_s + moved_bytes / BYTES_PER_S_MIN))

    async def _bounded(self, name: str, attempt: Callable[[], Awaitable[T]], deadline_s: float) -> T:
        """Try until the deadline, and say in our own words what went wrong."""
        try:
            async with asyncio.timeout(deadline_s):
                return await self._retried(attempt)
        except TimeoutError:
            raise ColdUnavailable(name, f"no answer from {self._url} within {deadline_s:.3g} s") from None
        except FileNotFoundError as error:
            if _is_bucket_missing(error):
                raise ColdUnavailable(name, f"the bucket of {self._url} is not there") from error
            raise ColdMissing(name) from None
        except BaseError as error:
            if _status(error) == 416:
                raise ColdDamaged(name, "it ends before the bytes that were asked for") from error
            raise ColdUnavailable(name, _first_line(error)) from error

    async def _retried(self, attempt: Callable[[], Awaitable[T]]) -> T:
        backoff_s = self._backoff_s
        for _ in range(ATTEMPTS_MAX - 1):
            try:
                return await attempt()
            except ColdUnavailable:
                pass
            except GenericError as error:
                if 400 <= _status(error) < 500:
                    raise  # The same question will get the same answer.
            # Shards that failed together should not come back together.
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(2 * backoff_s, BACKOFF_S_MAX)
        return await attempt()


async def _as_async(buffers: Iterable[Buffer]) -> AsyncIterator[Buffer]:
    """Read in our thread and our loop: when the call is over, so is the reading."""
    for buffer in buffers:
        yield buffer


def _runs(ranges: Sequence[tuple[int, int]], *, piece_bytes: int) -> tuple[list[tuple[int, int]], list[int]]:
    """What to fetch for these ranges as (start, end), and for each range the number of its run.

    ranges    |--a--|   |-b-|                          |--c--|
    runs      |------ 0 ----|                          |- 1 -|
                     gap <= GAP_BYTES_MAX, and a run that is joined is no longer than a piece
    """
    runs: list[tuple[int, int]] = []
    run_of = [0] * len(ranges)
    for number in sorted(range(len(ranges)), key=lambda number: ranges[number]):
        offset, length = ranges[number]
        start, end = runs[-1] if runs else (0, -1)
        joined = max(end, offset + length)
        if runs and offset <= end + GAP_BYTES_MAX and (joined == end or joined - start <= piece_bytes):
            runs[-1] = (start, joined)
        else:
            runs.append((offset, offset + length))
        run_of[number] = len(runs) - 1
    return runs, run_of


def _compare(name: str, found: Measure, expected: Measure) -> None:
    if found.size != expected.size:
        raise ColdDamaged(name, f"it is {found.size} bytes long, not {expected.size}")
    if found.checksum != expected.checksum:
        raise ColdDamaged(name, "it does not match its checksum")


def _too_short(name: str, end: int) -> ColdDamaged:
    return ColdDamaged(name, f"it ends before byte {end}")


def _check_name(name: str) -> None:
    """Names are made by us, so a bad one is our mistake; but this mistake could leave the folder."""
    if not _is_name(name):
        raise ValueError(f"{name!r} is not a name in the cold store")


def _check_prefix(prefix: str) -> None:
    if prefix and not (prefix.endswith("/") and _is_name(f"{prefix}x.x")):
        raise ValueError(f"{prefix!r} is not a folder in the cold store; it has to end in a slash")


def _is_name(name: str) -> bool:
    *folders, file = name.split("/")
    return (
        len(name) <= _NAME_BYTES_MAX
        and all(len(folder) <= _PART_BYTES_MAX and _FOLDER.fullmatch(folder) for folder in folders)
        and len(file) <= _PART_BYTES_MAX
        and _FILE.fullmatch(file) is not None
        and not file.endswith(_TEMPORARY)
    )


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ColdConfigError(url, str(error)) from error
    if "@" in parts.netloc:
        raise ColdConfigError(f"{parts.scheme}://…", "keys belong in the environment, not in the URL")
    if not parts.netloc or parts.query or parts.fragment:
        raise ColdConfigError(url, "it has to be a bucket and a prefix, and nothing else")


def _status(error: BaseError) -> int:
    """The HTTP status in a message of the library, which has no field for it; 0 if there is none."""
    found = _STATUS.search(str(error))
    return int(found[1]) if found else 0


def _is_bucket_missing(error: FileNotFoundError) -> bool:
    return any(code in str(error) for code in ("NoSuchBucket", "ContainerNotFound"))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].strip()
