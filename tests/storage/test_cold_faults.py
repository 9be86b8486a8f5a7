"""Goal: whatever the network does, a call on an object store ends in time, with the right bytes or an error.

Method: a proxy between the store and a real S3 server answers with errors, resets, hangs, trickles, is gone.
Deadlines are short and handed in; a call that is bounded is timed, with a margin for a busy machine.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import pytest
from xxhash import xxh3_64_intdigest

from shard.storage.cold import (
    ColdMissing,
    ColdStore,
    ColdUnavailable,
)
from shard.storage.cold.object_store import ATTEMPTS_MAX, BYTES_PER_S_MIN, REQUEST_RETRIES_MAX, ObjectCold
from shard.storage.files import Disk

if TYPE_CHECKING:
    from tests.support.objectstore import Bucket, Proxy

pytest_plugins = ["tests.support.objectstore"]

NAME = "shard-00/segments/7/1.seg"
CONTENT = random.Random(1).randbytes(100_000)
#: Small pieces, so that a file of many requests is not a large one.
PIECE_BYTES = 120_000
LARGE = random.Random(2).randbytes(3 * PIECE_BYTES + 50_000)
DEADLINE_S = 0.12
#: What a call may take beyond its deadline on a machine that does much else: it ends, that is the point.
MARGIN_S = 60.0


@pytest.fixture(autouse=True)
def take_small_parts(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real least size of a part, 5 MiB, is kept to in `test_cold.py`."""
    monkeypatch.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", PIECE_BYTES)


def cold(bucket: Bucket, *, request_timeout_s: float, deadline_s: float) -> ColdStore:
    """Waits hardly at all between two tries."""
    return ObjectCold(
        bucket.url,
        Disk(),
        connect_timeout_s=request_timeout_s,
        request_timeout_s=request_timeout_s,
        deadline_s=deadline_s,
        backoff_s=0.001,
        piece_bytes=PIECE_BYTES,
    )


@pytest.fixture
def proxy(bucket: Bucket) -> Proxy:
    return bucket.proxy


@pytest.fixture
def store(bucket: Bucket) -> ColdStore:
    """A patient client: however slow the store is, the client does not give up."""
    return cold(bucket, request_timeout_s=30, deadline_s=90)


def put(store: ColdStore, content: bytes = CONTENT, name: str = NAME) -> None:
    store.put(name, [content], size=len(content), checksum=xxh3_64_intdigest(content))


def check(store: ColdStore, content: bytes = CONTENT, name: str = NAME) -> None:
    store.verify(name, size=len(content), checksum=xxh3_64_intdigest(content))


def read(store: ColdStore) -> None:
    assert store.read(NAME, 1000, 50_000) == CONTENT[1000:51_000]


def read_many(store: ColdStore) -> None:
    assert store.read_many(NAME, [(90_000, 10), (0, 10)]) == [CONTENT[90_000:90_010], CONTENT[:10]]


def size(store: ColdStore) -> None:
    assert store.size(NAME) == len(CONTENT)


def names(store: ColdStore) -> None:
    assert list(store.names("shard-00/")) == [NAME]


def delete(store: ColdStore) -> None:
    store.delete("shard-00/segments/9/9.seg")


def put_large(store: ColdStore) -> None:
    put(store, LARGE, "other/large.seg")
    check(store, LARGE, "other/large.seg")


CALLS = [put, put_large, check, read, read_many, size, names, delete]
FAULTS: dict[str, Callable[[Proxy], None]] = {
    "answers 500 twice": lambda proxy: proxy.answer_500(2),
    "says slow down": lambda proxy: proxy.answer(503, 1),
    "resets before the body": lambda proxy: proxy.reset_after(0, 2),
    "resets in the body": lambda proxy: proxy.reset_after(100, 2),
    "resets late in the body": lambda proxy: proxy.reset_after(40_000, 1),
    "resets an upload": lambda proxy: proxy.reset_upload_after(50_000, 2),
    "loses the answer": lambda proxy: proxy.lose_answer(2),
}


@contextmanager
def in_time(deadline_s: float = DEADLINE_S) -> Iterator[None]:
    start = time.monotonic()
    yield
    assert time.monotonic() - start < deadline_s + MARGIN_S


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("call", CALLS)
def test_a_fault_that_passes_is_not_noticed(
    store: ColdStore, proxy: Proxy, call: Callable[[ColdStore], None], fault: str
) -> None:
    put(store)
    FAULTS[fault](proxy)
    call(store)
    proxy.heal()
    check(store)


@pytest.mark.parametrize("call", [put, read, size, delete])
def test_a_request_that_hangs_is_given_up_and_asked_again(
    store: ColdStore, bucket: Bucket, proxy: Proxy, call: Callable[[ColdStore], None]
) -> None:
    put(store)
    proxy.hang(1)
    call(cold(bucket, request_timeout_s=0.5, deadline_s=90))
    assert len(proxy.requests) > 2


def test_an_upload_whose_completion_was_answered_to_nobody_is_whole(store: ColdStore, bucket: Bucket) -> None:
    put(store, LARGE)
    bucket.proxy.requests.clear()
    put(store, LARGE)
    posts = [request for request in bucket.proxy.requests if request.startswith("POST")]
    assert len(posts) == 2, "one request begins an upload and one completes it"
    bucket.proxy.lose_answer(2, method="POST")
    put(store, LARGE)
    check(store, LARGE)


LASTING: dict[str, Callable[[Proxy], None]] = {
    "hangs": lambda proxy: proxy.hang(),
    "trickles": lambda proxy: proxy.slow(300),
    "answers 500": lambda proxy: proxy.answer_500(),
    "loses every answer": lambda proxy: proxy.lose_answer(),
    "is gone": lambda proxy: proxy.vanish(),
}


#: To a call without a body in its answer, a trickle is a hang.
LASTING_FOR = [
    (call, fault) for call in CALLS for fault in LASTING if fault != "trickles" or call in (read, names)
]


@pytest.mark.parametrize(("call", "fault"), LASTING_FOR)
def test_a_fault_that_stays_is_unavailable_in_time(
    store: ColdStore, bucket: Bucket, call: Callable[[ColdStore], None], fault: str
) -> None:
    put(store)
    LASTING[fault](bucket.proxy)
    # One request may take all the time there is, so it is the deadline that ends the call.
    hasty = cold(bucket, request_timeout_s=10, deadline_s=DEADLINE_S)
    with in_time(DEADLINE_S + len(LARGE) / BYTES_PER_S_MIN), pytest.raises(ColdUnavailable):
        call(hasty)
    bucket.proxy.heal()
    call(store)
    check(store)


def test_a_slow_server_is_waited_for_and_a_slower_one_is_not(
    store: ColdStore, bucket: Bucket, proxy: Proxy
) -> None:
    put(store)
    proxy.slow(400_000, method="GET")
    assert store.read(NAME, 0, len(CONTENT)) == CONTENT
    proxy.heal()
    proxy.slow(20_000, method="GET")
    hasty = cold(bucket, request_timeout_s=10, deadline_s=0.6)
    with pytest.raises(ColdUnavailable, match="no response from s3://"):
        hasty.read(NAME, 0, len(CONTENT))


def test_a_read_that_is_cut_short_by_time_goes_on_where_it_was(
    store: ColdStore, bucket: Bucket, proxy: Proxy
) -> None:
    put(store)
    proxy.requests.clear()
    proxy.slow(60_000, method="GET")  # nearly two seconds in all, and one of them at a time
    hasty = cold(bucket, request_timeout_s=1.0, deadline_s=90)
    assert hasty.read(NAME, 0, len(CONTENT)) == CONTENT
    assert len(proxy.requests) > 1


def test_a_listing_that_is_cut_short_by_time_is_dropped_without_a_panic(
    bucket: Bucket, proxy: Proxy, capfd: pytest.CaptureFixture[str]
) -> None:
    for number in range(20):
        bucket.put(f"a/{number}.seg", b"x")
    proxy.slow(30_000)
    for number in range(40):
        with suppress(ColdUnavailable):
            list(cold(bucket, request_timeout_s=10, deadline_s=0.005 + number * 0.0003).names())
    gc.collect()
    assert "panicked" not in capfd.readouterr().err


def test_tries_are_counted(store: ColdStore, proxy: Proxy) -> None:
    proxy.answer_500()
    with pytest.raises(ColdUnavailable):
        store.size(NAME)
    assert len(proxy.requests) == ATTEMPTS_MAX * (1 + REQUEST_RETRIES_MAX)


@pytest.mark.parametrize("status", [400, 401, 403])
@pytest.mark.parametrize("call", [put, read, size, names, delete])
def test_a_refusal_is_unavailable_at_once_and_never_missing(
    store: ColdStore, proxy: Proxy, call: Callable[[ColdStore], None], status: int
) -> None:
    proxy.answer(status)
    with pytest.raises(ColdUnavailable):
        call(store)
    assert len(proxy.requests) == 1


def test_missing_is_said_at_once(store: ColdStore, proxy: Proxy) -> None:
    with pytest.raises(ColdMissing):
        store.read(NAME, 0, 10)
    assert len(proxy.requests) == 1


@pytest.mark.parametrize("seed", range(2))
def test_whatever_the_network_does_bytes_are_right_or_there_is_an_error(
    store: ColdStore, bucket: Bucket, seed: int
) -> None:
    rng = random.Random(seed)
    print(f"seed {seed}")
    hasty = cold(bucket, request_timeout_s=0.1, deadline_s=0.2)
    stored = {"a/0.seg": CONTENT}
    put(store, CONTENT, "a/0.seg")
    proxy = bucket.proxy
    for number in range(20):
        fault = rng.choice([*FAULTS.values(), *LASTING.values()])
        fault(proxy)
        name = f"a/{rng.randrange(5)}.seg"
        # A put that was given up may yet happen: so a name has one content, as segments have.
        content = stored.get(name) or random.Random(name).randbytes(10_000 * (1 + int(name[2])))
        try:
            if name not in stored:
                put(hasty, content, name)
                stored[name] = content
            offset = rng.randrange(len(content))
            assert hasty.read(name, offset, len(content) - offset) == content[offset:]
            check(hasty, content, name)
            assert hasty.size(name) == len(content)
        except ColdUnavailable:
            pass
        if number % 2:
            proxy.heal()
    proxy.heal()
    for name, content in stored.items():
        check(store, content, name)
        assert bucket.get(name) == content
