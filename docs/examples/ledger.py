"""A ledger: transfers that never overdraw an account, whoever writes, and a quick start from a snapshot.

    python ledger.py deposit ada 500
    python ledger.py transfer ada bob 200
    python ledger.py balances

Each transfer is one record. A writer decides from the balances up to some seq, and appends with `match_seq`:
if another writer was faster, nothing is written, and it decides again.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import streams

BOX = "ledger"
#: Save a snapshot after this many transfers since the last one.
SNAPSHOT_EVERY = 100


class Overdrawn(Exception):
    """An account has less than a transfer takes."""


class Ledger:
    """Balances in cents by account, current up to `seq`."""

    def __init__(self, client: streams.Client, snapshots: Path) -> None:
        self._box = client.box(BOX)
        self._box.create(durability="fsync")
        self._snapshots = self._box.stored_snapshots(snapshots)
        self.balances: dict[str, int] = {}
        self.seq = self._saved_seq = 0
        for item in self._snapshots.restore_and_read():
            if isinstance(item, streams.Restored):
                self.balances, self.seq = dict(item.state or {}), item.seq
                self._saved_seq = item.seq
            else:
                self._take(item)

    def deposit(self, account: str, cents: int) -> None:
        self._append({"to": account, "cents": cents})

    def transfer(self, source: str, dest: str, cents: int) -> None:
        """Move money, or raise `Overdrawn`."""
        self._append({"from": source, "to": dest, "cents": cents})

    def _append(self, transfer: dict[str, object]) -> None:
        source, cents = str(transfer.get("from", "")), int(str(transfer["cents"]))
        while True:
            if source and self.balances.get(source, 0) < cents:
                raise Overdrawn(f"{source} has {self.balances.get(source, 0)} cents, not {cents}")
            try:
                self._box.append(transfer, match_seq=self.seq + 1)
            except streams.SeqMismatch:
                self.refresh()  # another writer was faster: decide again
                continue
            self.refresh()
            return

    def refresh(self) -> None:
        """Take what all writers have appended since, and save a snapshot now and then."""
        for item in self._box.read(self.seq):
            self._take(item)
        if self.seq - self._saved_seq >= SNAPSHOT_EVERY:
            self._snapshots.save(self.balances, self.seq)
            self._saved_seq = self.seq

    def _take(self, item: streams.Record | streams.Tombstone) -> None:
        if isinstance(item, streams.Tombstone):
            raise RuntimeError(f"transfers {item.gap_from} to {item.gap_to} are lost ({item.reason})")
        for account, sign in ((item.data.get("from"), -1), (item.data.get("to"), 1)):
            if account is not None:
                self.balances[account] = self.balances.get(account, 0) + sign * int(item.data["cents"])
        self.seq = item.seq


def main(arguments: Sequence[str]) -> None:
    with streams.Client(node="ledger.py") as client:
        ledger = Ledger(client, Path("ledger-snapshots"))
        match list(arguments):
            case ["deposit", account, cents]:
                ledger.deposit(account, int(cents))
            case ["transfer", source, dest, cents]:
                ledger.transfer(source, dest, int(cents))
            case ["balances"]:
                pass
            case _:
                raise SystemExit(__doc__)
        for account, balance in sorted(ledger.balances.items()):
            print(f"{account}: {balance}")


if __name__ == "__main__":
    main(sys.argv[1:])
