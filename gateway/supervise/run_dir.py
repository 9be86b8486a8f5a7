"""The run directory of a server: sockets of shards, and status files. Empty after a stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import structlog

from gateway.supervise.data_dir import write_atomically

log: Any = structlog.get_logger()


class RunDir:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __repr__(self) -> str:
        return f"<RunDir {self._path}>"

    def open(self) -> None:
        self._path.mkdir(mode=0o700, exist_ok=True)
        self._path.chmod(0o700)
        self.close()

    def close(self) -> None:
        for path in self._path.iterdir():
            if path.suffix in (".sock", ".json", ".new"):
                path.unlink(missing_ok=True)

    def publish(self, name: str, facts: dict[str, Any]) -> None:
        """Write a status file for people and tools. An error is only logged: the server goes on."""
        try:
            write_atomically(self._path / name, facts)
        except OSError as error:
            log.warning("status file not written; check the disk", name=name, error=str(error))
