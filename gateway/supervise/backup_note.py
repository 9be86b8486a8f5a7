"""The time of the last backup, as a file in the data directory.

`streams backup` runs beside the server and writes the note when a backup is complete. Gateways read it for
the status and the metrics. It is a hint for operators: a restore does not use it, and a restored server
starts without one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from gateway.supervise.data_dir import write_atomically

FILE_NAME: Final = "last-backup.json"


class BackupNote(msgspec.Struct, frozen=True):
    id: str
    taken_ms: int


def write_note(data_dir: Path, note: BackupNote) -> None:
    """Write the note. Raises `OSError`."""
    write_atomically(data_dir / FILE_NAME, msgspec.to_builtins(note))


def read_note(data_dir: Path) -> BackupNote | None:
    """Return the note, or None if there is none that can be read."""
    try:
        return msgspec.json.decode((data_dir / FILE_NAME).read_bytes(), type=BackupNote)
    except (OSError, msgspec.MsgspecError):
        return None
