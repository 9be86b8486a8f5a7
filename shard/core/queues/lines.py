"""The ready jobs of a queue that have a key or a priority, in the order of claims (v0 §23). Derived state.

    key "a"   priority 9  returned: 7         fresh: 12 31 …     a line: two heaps of seqs
              priority 0  returned:           fresh: 4 20 …
    key "b"   …
    turns[9]  the lines of priority 9 that have a claimable job: (order, order, key)

A line offers its first job: returned before fresh, each by seq. Without `fair`, lines are in the order of
their first jobs. With `fair` they are in turns: a key that was served goes to the end. At
`key_concurrency` 1 a key offers one job only, at its priority: a returned one, else that with the lowest seq.

Rules of the file
- Heaps are lazy: an item that is no longer true is dropped when it comes up, and a heap with more such items
  than others is rebuilt. So each step is O(log n), plus at most ten lines of a key.
- `pick` decides and changes nothing: it puts every item back that it takes out of a heap.
- Jobs without key and priority are not here. `pick` gets them as `PlainJobs`, one line of priority 0.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import Protocol

from shard.core.queues.job import INCOMING, LEASED, MOVING, READY, Job

PRIORITIES = range(9, -1, -1)
#: Stale items beyond twice the others before a heap is rebuilt.
_STALE_MIN = 64

Turn = tuple[int, int, str]


class PlainJobs(Protocol):
    """The jobs without key and priority, for one `pick`."""

    def head(self) -> tuple[int, int] | None:
        """(0 if it was returned else 1, seq) of the next one."""

    def take(self) -> None: ...


class _Key:
    __slots__ = ("count", "fresh_seqs", "leased_count", "offers", "returned_seqs", "returning_count")

    def __init__(self) -> None:
        #: Entries of any state, leased ones, and returned ones that wait for a time.
        self.count = self.leased_count = self.returning_count = 0
        #: Heaps of seqs, by priority.
        self.returned_seqs: dict[int, list[int]] = {}
        self.fresh_seqs: dict[int, list[int]] = {}
        #: The valid item in `turns`, by priority.
        self.offers: dict[int, Turn] = {}


class _Trial:
    """The jobs that a `pick` has taken so far, and the items to put back after it."""

    __slots__ = ("lease_counts", "offers", "popped_seqs", "popped_turns", "seqs", "turn")

    def __init__(self, turn: int) -> None:
        self.seqs: set[int] = set()
        self.lease_counts: dict[str, int] = {}
        #: Overrides the offers of a key at a priority; None = it has none.
        self.offers: dict[tuple[int, str], Turn | None] = {}
        self.popped_turns: list[tuple[int, Turn]] = []
        self.popped_seqs: list[tuple[list[int], int]] = []
        self.turn = turn


class Lines:
    __slots__ = (
        "_jobs",
        "_keys",
        "_turn",
        "_turns",
        "is_fair",
        "key_concurrency",
        "plain_turn",
        "ready_count",
    )

    def __init__(self, jobs: Mapping[int, Job]) -> None:
        self._jobs = jobs
        self._keys: dict[str, _Key] = {}
        self._turns: list[list[Turn]] = [[] for _ in range(10)]
        self._turn = 0
        #: The turn of the plain jobs.
        self.plain_turn = 0
        self.ready_count = 0
        self.key_concurrency = 0
        self.is_fair = False

    def __repr__(self) -> str:
        return f"<Lines {len(self._keys)} keys, {self.ready_count} ready>"

    def configure(self, key_concurrency: int, *, is_fair: bool) -> None:
        """Use these settings. A change rebuilds the turns: about a microsecond for each key."""
        if (key_concurrency, is_fair) == (self.key_concurrency, self.is_fair):
            return
        self.key_concurrency, self.is_fair = key_concurrency, is_fair
        for heap in self._turns:
            heap.clear()
        for key, state in self._keys.items():
            state.offers.clear()
            self._offer(key, state)

    # -- entries

    def add(self, job: Job) -> None:
        state = self._keys.get(job.key)
        if state is None:
            state = self._keys[job.key] = _Key()
        state.count += 1
        if job.state == READY:
            self.ready_count += 1
            heaps = state.returned_seqs if job.deliveries else state.fresh_seqs
            heap = heaps.setdefault(job.priority, [])
            heapq.heappush(heap, job.seq)
            if len(heap) > 2 * state.count + _STALE_MIN:
                heaps[job.priority] = heap = [seq for seq in set(heap) if self._is_valid(seq, job)]
                heapq.heapify(heap)
        elif job.state == LEASED:
            state.leased_count += 1
            state.offers.clear()  # it was served: its next turn comes behind all others
        elif job.state != MOVING and job.deliveries:
            state.returning_count += 1
        self._offer(job.key, state)

    def remove(self, job: Job) -> None:
        state = self._keys[job.key]
        state.count -= 1
        if job.state == READY:
            self.ready_count -= 1
        elif job.state == LEASED:
            state.leased_count -= 1
        elif job.state != MOVING and job.deliveries:
            state.returning_count -= 1
        if state.count:
            self._offer(job.key, state)
        else:
            del self._keys[job.key]

    def note_plain_turn(self) -> None:
        """A plain job was served: the next one comes behind all others."""
        self._turn += 1
        self.plain_turn = self._turn

    def clear(self) -> None:
        self._keys.clear()
        for heap in self._turns:
            heap.clear()
        self.ready_count = 0

    def _is_valid(self, seq: int, like: Job) -> bool:
        job = self._jobs.get(seq)
        return (
            job is not None
            and job.state == READY
            and job.key == like.key
            and job.priority == like.priority
            and (job.deliveries > 0) == (like.deliveries > 0)
        )

    def check(self) -> None:
        """Assert that counts and offers are those of the entries. For tests."""
        jobs = [
            job for job in self._jobs.values() if not job.is_plain and job.state not in (MOVING, INCOMING)
        ]
        assert self.ready_count == sum(job.state == READY for job in jobs), "LINES"
        assert set(self._keys) == {job.key for job in jobs}, "LINES"
        for key, state in self._keys.items():
            mine = [job for job in jobs if job.key == key]
            assert state.count == len(mine), "LINES"
            assert state.leased_count == sum(job.state == LEASED for job in mine), "LINES"
            heads = self._heads(key, state, None)
            assert heads.keys() == state.offers.keys(), "OFFERS"
            for priority, offer in state.offers.items():
                assert offer in self._turns[priority], "OFFERS"
                assert self.is_fair or offer == (*heads[priority], key), "OFFERS"

    # -- offers

    def _head(self, key: str, state: _Key, priority: int, taken_seqs: set[int]) -> tuple[int, int] | None:
        """(0 if it was returned else 1, seq) of the first job of a line."""
        for flag, heaps in enumerate((state.returned_seqs, state.fresh_seqs)):
            heap = heaps.get(priority)
            while heap:
                job = self._jobs.get(heap[0])
                if (
                    job is not None
                    and job.state == READY
                    and job.seq not in taken_seqs
                    and (job.key, job.priority, 0 if job.deliveries else 1) == (key, priority, flag)
                ):
                    return flag, job.seq
                heapq.heappop(heap)
        return None

    def _heads(self, key: str, state: _Key, trial: _Trial | None) -> dict[int, tuple[int, int]]:
        """The jobs that a key offers, by priority."""
        limit = self.key_concurrency if key else 0
        leased_count = state.leased_count + (trial.lease_counts.get(key, 0) if trial is not None else 0)
        if limit and (leased_count >= limit or (limit == 1 and state.returning_count)):
            return {}
        taken_seqs = trial.seqs if trial is not None else set()
        heads: dict[int, tuple[int, int]] = {}
        for priority in {*state.returned_seqs, *state.fresh_seqs}:
            head = self._head(key, state, priority, taken_seqs)
            if head is not None:
                heads[priority] = head
        if limit == 1 and len(heads) > 1:
            first = min(heads, key=heads.__getitem__)
            return {first: heads[first]}
        return heads

    def _offer(self, key: str, state: _Key) -> None:
        heads = self._heads(key, state, None)
        for priority in [each for each in state.offers if each not in heads]:
            del state.offers[priority]
        for priority, head in heads.items():
            offer = state.offers.get(priority)
            if self.is_fair:
                if offer is not None:
                    continue
                self._turn += 1
                turn: Turn = (self._turn, 0, key)
            else:
                turn = (*head, key)
                if turn == offer:
                    continue
            state.offers[priority] = turn
            self._push(priority, turn)

    def _push(self, priority: int, turn: Turn) -> None:
        heap = self._turns[priority]
        heapq.heappush(heap, turn)
        if len(heap) > 2 * len(self._keys) + _STALE_MIN:
            offers = (state.offers.get(priority) for state in self._keys.values())
            heap[:] = [offer for offer in offers if offer is not None]
            heapq.heapify(heap)

    # -- picking

    def pick(
        self, limit: int, plain: PlainJobs, *, deliveries_max: int, exhausted_max: int
    ) -> tuple[list[int], list[int]]:
        """Return the next jobs to deliver, up to `limit`, in the order of claims; and the jobs before them
        that were delivered `deliveries_max` times (0 = no limit), up to `exhausted_max`."""
        seqs: list[int] = []
        exhausted_seqs: list[int] = []
        trial = _Trial(self._turn)
        plain_turn = self.plain_turn
        while len(seqs) < limit and len(exhausted_seqs) < exhausted_max:
            priority, turn = self._first(trial)
            plain_head = plain.head() if priority <= 0 else None
            if plain_head is not None:
                plain_order = (plain_turn, 0) if self.is_fair else plain_head
                if turn is None or plain_order < turn[:2]:
                    seq = plain_head[1]
                    plain.take()
                    trial.turn += 1
                    plain_turn = trial.turn
                    is_exhausted = self._is_exhausted(seq, deliveries_max)
                    (exhausted_seqs if is_exhausted else seqs).append(seq)
                    continue
            if turn is None:
                break
            seq = self._take(trial, priority, turn)
            if self._is_exhausted(seq, deliveries_max):
                exhausted_seqs.append(seq)
            else:
                seqs.append(seq)
                trial.lease_counts[turn[2]] = trial.lease_counts.get(turn[2], 0) + 1
            self._offer_again(trial, turn[2])
        for heap, seq in trial.popped_seqs:
            heapq.heappush(heap, seq)
        for priority, turn in trial.popped_turns:
            heapq.heappush(self._turns[priority], turn)
        return seqs, exhausted_seqs

    def _is_exhausted(self, seq: int, deliveries_max: int) -> bool:
        job = self._jobs.get(seq) if deliveries_max else None
        return job is not None and job.deliveries >= deliveries_max

    def _first(self, trial: _Trial) -> tuple[int, Turn | None]:
        """The first valid turn, at its priority; (-1, None) if there is none."""
        for priority in PRIORITIES:
            heap = self._turns[priority]
            while heap:
                turn = heap[0]
                key = turn[2]
                if (priority, key) in trial.offers:
                    offer = trial.offers[priority, key]
                else:
                    state = self._keys.get(key)
                    offer = state.offers.get(priority) if state is not None else None
                if offer == turn:
                    return priority, turn
                heapq.heappop(heap)
        return -1, None

    def _take(self, trial: _Trial, priority: int, turn: Turn) -> int:
        """Take the first job of the line with this turn."""
        key = turn[2]
        state = self._keys[key]
        heapq.heappop(self._turns[priority])
        if (priority, key) not in trial.offers:
            trial.popped_turns.append((priority, turn))
        trial.offers[priority, key] = None
        head = self._head(key, state, priority, trial.seqs)
        assert head is not None, "OFFERS"
        flag, seq = head
        heap = (state.fresh_seqs if flag else state.returned_seqs)[priority]
        heapq.heappop(heap)
        trial.popped_seqs.append((heap, seq))
        trial.seqs.add(seq)
        return seq

    def _offer_again(self, trial: _Trial, key: str) -> None:
        """Offer the remaining jobs of a key."""
        state = self._keys[key]
        heads = self._heads(key, state, trial)
        for priority in state.offers:
            if priority not in heads and (priority, key) not in trial.offers:
                # Its item stays in the heap and is valid again after the trial.
                self._hide(trial, priority, key, state.offers[priority])
        for priority, head in heads.items():
            if self.is_fair:
                if trial.offers.get((priority, key), state.offers.get(priority)) is not None:
                    continue
                trial.turn += 1
                turn: Turn = (trial.turn, 0, key)
            else:
                turn = (*head, key)
            trial.offers[priority, key] = turn
            heapq.heappush(self._turns[priority], turn)

    @staticmethod
    def _hide(trial: _Trial, priority: int, key: str, turn: Turn) -> None:
        trial.offers[priority, key] = None
        trial.popped_turns.append((priority, turn))
