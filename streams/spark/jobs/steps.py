"""Steps of a job: each is planned in the ledger, written as one transaction, and noted in the ledger as done.

    plan   {"step": 4, "cut": 0, ...}   appended before the step begins, unless another run has appended since
    done   {"done": 4, "cut": 0, ...}   appended when the transaction of the step is committed

The ledger decides which steps are done. The server's marks decide one case only: the last plan has no done
entry because its run was stopped.

- No shard has committed the step: it never happened. The rows that are held for it are dropped, and the job
  may plan the same step differently (`cut` 1, 2 ...): smaller, or up to where the boxes are now.
- Some shards have committed it: it is finished exactly as planned.

Two runs at the same time: the second one to append a plan is refused. A run that was replaced while it wrote
finds its rows dropped. If both get as far as the commit, the later commit is refused (`txnIfDone=fail`) and
the ledger says that the step is disputed, because it is not known which of the two plans was written.

Ledgers of version 0.1 have plans without `cut` and no done entries: for those the marks decide.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from streams.direct import Shards, Txn
from streams.spark.jobs.job_context import JobRefused, Ledger
from streams.spark.sink import AlreadyCommitted

#: Version 0.1 forgot the last epoch of a writer after 90 days. A plan that is older cannot be looked up.
_OLD_MARK_MS = 90 * 86_400_000

#: Bytes of one step. Large enough that the second or two that Spark needs for a step hardly count, and small
#: enough that little is repeated when a run is stopped.
STEP_BYTES = 64 << 20


class Steps:
    def __init__(self, ledger: Ledger, shards: Shards, writer: str, *, is_dry: bool = False) -> None:
        """A dry one only reads the ledger."""
        self._ledger = ledger
        self._shards = shards
        self._writer = writer
        self._is_dry = is_dry
        #: Plans of the steps that are done, in their order.
        self.done: list[dict[str, Any]] = []
        #: The plan that some shards have committed: it must be carried out as it is before anything else.
        self.unfinished: dict[str, Any] | None = None
        self._next, self._cut = 0, 0
        self._load()

    def __repr__(self) -> str:
        return f"<Steps of {self._writer}, {len(self.done)} done, next {self._next} cut {self._cut}>"

    @property
    def begun(self) -> list[dict[str, Any]]:
        """Plans that cannot be changed any more: of steps that are done, and of the unfinished one."""
        return self.done if self.unfinished is None else [*self.done, self.unfinished]

    def _load(self) -> None:
        plans: dict[int, list[dict[str, Any]]] = {}
        cuts: dict[int, int] = {}
        for entry in self._ledger.entries:
            if "disputed" in entry:
                raise JobRefused(
                    f"two runs of {self._writer} wrote step {entry['disputed']} at the same time, and it "
                    f"is not "
                    f"known which records were written. Compare source and target (streams pipeline audit "
                    f"--against), and go on under another name"
                )
            if "done" in entry:
                cuts[entry["done"]] = entry["cut"]
            else:
                plans.setdefault(_number(entry), []).append(entry)
        newest = max(cuts, default=-1)
        if plans and newest < 0 and all("cut" not in entry for entry in self._ledger.entries):
            newest = self._newest_of_old(plans)
            if newest >= 0:
                self._write_note({"done": newest, "cut": 0})
        for number in sorted(plans):
            if number <= newest:
                cut = cuts.get(number, 0)
                self.done += [plan for plan in plans[number] if plan.get("cut", 0) == cut]
        self._next = newest + 1
        waiting = plans.get(self._next, [])
        if not waiting:
            return
        # The last plan: an earlier one was dropped before the last was made.
        plan = waiting[-1]
        self._cut = plan.get("cut", 0) + 1
        if not self._is_dry:
            # A process that the stopped run has left behind may be about to commit. Without its rows it
            # cannot, so the marks that are read next stay as they are.
            self._drop_held()
        epochs = self._epochs()
        if min(epochs) >= self._next:
            self._note(plan)
        elif max(epochs) >= self._next:
            self.unfinished = plan

    def _newest_of_old(self, plans: Mapping[int, Any]) -> int:
        epochs = self._epochs()
        if max(epochs) < 0 and time.time() * 1000 - self._ledger.last_ms > _OLD_MARK_MS:
            raise JobRefused(
                f"the ledger of {self._writer} was written by an older version more than 90 days ago, "
                f"and the "
                f"server has forgotten which of its steps were committed. Compare source and target, and "
                f"go on "
                f"under another name"
            )
        # A replay planned a step only when the one before it was done.
        last = max(plans)
        return max(min(epochs), last - 1) if "step" in plans[last][0] else min(epochs)

    def _epochs(self) -> list[int]:
        """The last epoch that each shard has committed; -1 where there is none."""
        found = []
        for shard in range(self._shards.count):
            marks = self._shards.txn_list(shard, prefix=self._writer).marks
            found.append(max((mark.epoch for mark in marks if mark.writer == self._writer), default=-1))
        return found

    def plan(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Decides on the next step. What a stopped run has left of it is dropped first."""
        assert self.unfinished is None, "a step that was begun is finished first"
        if self._cut:
            self._drop_held()
        plan = {"step": self._next, "cut": self._cut, **facts}
        self._ledger.append([plan])
        self._cut += 1
        return plan

    def _drop_held(self) -> None:
        for shard in range(self._shards.count):
            self._shards.txn_abort(shard, Txn(self._writer, self._next))

    def run(self, plan: dict[str, Any], write: Callable[..., int]) -> int:
        """Writes a step and notes that it is done. `write` gets the epoch and the options of the transaction,
        and returns how many rows it has sent."""
        options: dict[str, Any] = {"epoch": _number(plan)}
        if plan is not self.unfinished:
            options["txnIfDone"] = "fail"
        try:
            rows = write(**options)
        except AlreadyCommitted as error:
            self._write_note({"disputed": _number(plan)})
            raise JobRefused(
                f"another run of {self._writer} has committed step {_number(plan)} meanwhile "
                f"({error.message})"
            ) from error
        self._note(plan, records=rows)
        return rows

    def _note(self, plan: dict[str, Any], **facts: Any) -> None:
        self._write_note({"done": _number(plan), "cut": plan.get("cut", 0), **facts})
        self.done.append(plan)
        self.unfinished = None
        self._next, self._cut = _number(plan) + 1, 0

    def _write_note(self, entry: dict[str, Any]) -> None:
        if not self._is_dry:
            self._ledger.note(entry)


def _number(plan: Mapping[str, Any]) -> int:
    """Backfills of version 0.1 called a step a group."""
    return int(plan["step"] if "step" in plan else plan["group"])
