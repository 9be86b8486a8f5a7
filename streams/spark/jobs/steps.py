"""Steps of a job: each step is planned in the ledger, written as one transaction, and recorded as done.

    plan   {"step": 4, "cut": 0, ...}   appended before the step starts, unless another run has appended since
    done   {"done": 4, "cut": 0, ...}   appended when the transaction of the step is committed

The ledger decides which steps are done. The committed epochs on the server decide one case only: the last
plan has no done entry because its run was stopped.

- No shard has committed the step: it never happened. Its uncommitted rows are dropped, and the job may plan
the
  same step differently (`cut` 1, 2 ...): smaller, or up to the current heads.
- Some shards have committed it: it is finished exactly as planned.

Concurrent runs: the second run to append a plan is refused. A run that was replaced while it wrote finds its
rows dropped. If both reach the commit, the later commit is refused (`txnIfDone=fail`) and the ledger records
the step as disputed, because it is unknown which of the two plans was written.

Ledgers of version 0.1 have plans without `cut` and no done entries: for those the committed epochs decide.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from streams.direct import Shards, Txn
from streams.spark.jobs.job_context import JobRefused, Ledger
from streams.spark.sink import AlreadyCommitted

#: Servers of version 0.1 dropped the last epoch of a writer after 90 days: older plans cannot be verified.
_OLD_EPOCH_RETENTION_MS = 90 * 86_400_000

#: Bytes of one step. Large enough to outweigh the one or two seconds that Spark needs for a step, and small
#: enough that a stopped run repeats little.
STEP_BYTES = 64 << 20


class Steps:
    """The steps of one job, as its ledger and the committed epochs define them."""

    def __init__(self, ledger: Ledger, shards: Shards, writer: str, *, is_dry: bool = False) -> None:
        """Load the steps. With `is_dry`, nothing is written."""
        self._ledger = ledger
        self._shards = shards
        self._writer = writer
        self._is_dry = is_dry
        #: Plans of the steps that are done, in order.
        self.completed_plans: list[dict[str, Any]] = []
        #: A plan that some shards have committed: it must run unchanged before anything else.
        self.unfinished_plan: dict[str, Any] | None = None
        self._next, self._cut = 0, 0
        self._load()

    def __repr__(self) -> str:
        return (
            f"<Steps of {self._writer}, {len(self.completed_plans)} done, next {self._next} cut {self._cut}>"
        )

    @property
    def fixed_plans(self) -> list[dict[str, Any]]:
        """Plans that cannot change: those of steps that are done, and the unfinished one."""
        return (
            self.completed_plans
            if self.unfinished_plan is None
            else [*self.completed_plans, self.unfinished_plan]
        )

    def _load(self) -> None:
        plans: dict[int, list[dict[str, Any]]] = {}
        cuts: dict[int, int] = {}
        for entry in self._ledger.entries:
            if "disputed" in entry:
                raise JobRefused(
                    f"two runs of {self._writer} wrote step {entry['disputed']} at the same time, and it is "
                    f"unknown which records were written. Compare source and target (streams pipeline audit "
                    f"--against), and continue under another name"
                )
            if "done" in entry:
                cuts[entry["done"]] = entry["cut"]
            else:
                plans.setdefault(_step_number(entry), []).append(entry)
        last_done = max(cuts, default=-1)
        if plans and last_done < 0 and all("cut" not in entry for entry in self._ledger.entries):
            last_done = self._last_done_step_of_old_ledger(plans)
            if last_done >= 0:
                self._append_entry({"done": last_done, "cut": 0})
        for number in sorted(plans):
            if number <= last_done:
                cut = cuts.get(number, 0)
                self.completed_plans += [plan for plan in plans[number] if plan.get("cut", 0) == cut]
        self._next = last_done + 1
        next_plans = plans.get(self._next, [])
        if not next_plans:
            return
        # Only the last plan counts: it was appended after the earlier ones were dropped.
        plan = next_plans[-1]
        self._cut = plan.get("cut", 0) + 1
        if not self._is_dry:
            # A process left over from the stopped run may be about to commit. Without its rows it cannot, so
            # the epochs read next do not change.
            self._drop_uncommitted_rows()
        epochs = self._committed_epochs()
        if min(epochs) >= self._next:
            self._mark_done(plan)
        elif max(epochs) >= self._next:
            self.unfinished_plan = plan

    def _last_done_step_of_old_ledger(self, plans: Mapping[int, Any]) -> int:
        epochs = self._committed_epochs()
        if max(epochs) < 0 and time.time() * 1000 - self._ledger.last_ms > _OLD_EPOCH_RETENTION_MS:
            raise JobRefused(
                f"the ledger of {self._writer} was written by an older version more than 90 days ago, and "
                f"the server no longer knows which of its steps were committed. Compare source and target, "
                f"and continue under another name"
            )
        # A replay planned a step only after the step before it was done.
        last = max(plans)
        return max(min(epochs), last - 1) if "step" in plans[last][0] else min(epochs)

    def _committed_epochs(self) -> list[int]:
        """Return the last epoch that each shard has committed; -1 if there is none."""
        epochs = []
        for shard in range(self._shards.count):
            marks = self._shards.txn_list(shard, prefix=self._writer).marks
            epochs.append(max((mark.epoch for mark in marks if mark.writer == self._writer), default=-1))
        return epochs

    def plan(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Append the plan of the next step. Drops uncommitted rows of a stopped run first."""
        assert self.unfinished_plan is None, "the unfinished step runs first"
        if self._cut:
            self._drop_uncommitted_rows()
        plan = {"step": self._next, "cut": self._cut, **fields}
        self._ledger.append([plan])
        self._cut += 1
        return plan

    def _drop_uncommitted_rows(self) -> None:
        for shard in range(self._shards.count):
            self._shards.txn_abort(shard, Txn(self._writer, self._next))

    def run(self, plan: dict[str, Any], write: Callable[..., int]) -> int:
        """Write a step and record it as done.

        `write` gets the epoch and the options of the transaction, and returns how many rows it has sent.
        """
        options: dict[str, Any] = {"epoch": _step_number(plan)}
        if plan is not self.unfinished_plan:
            options["txnIfDone"] = "fail"
        try:
            rows = write(**options)
        except AlreadyCommitted as error:
            self._append_entry({"disputed": _step_number(plan)})
            raise JobRefused(
                f"another run of {self._writer} has committed step {_step_number(plan)} in the meantime "
                f"({error.message}); run only one at a time"
            ) from error
        self._mark_done(plan, records=rows)
        return rows

    def _mark_done(self, plan: dict[str, Any], **fields: Any) -> None:
        self._append_entry({"done": _step_number(plan), "cut": plan.get("cut", 0), **fields})
        self.completed_plans.append(plan)
        self.unfinished_plan = None
        self._next, self._cut = _step_number(plan) + 1, 0

    def _append_entry(self, entry: dict[str, Any]) -> None:
        if not self._is_dry:
            self._ledger.note(entry)


def _step_number(plan: Mapping[str, Any]) -> int:
    """Return the number of a plan's step. Backfills of version 0.1 called a step a group."""
    return int(plan["step"] if "step" in plan else plan["group"])
