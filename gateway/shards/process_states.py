"""The state of each process of a server, in a file: the supervisor writes it, gateways and tools read it.

Only the supervisor sees why a process ended. So it publishes one small file in the run directory and replaces
the file at each change. A gateway reads it when it has to explain why a shard does not answer: in a `503`, in
`/v0/ready`, in `/v0/status` and in the metrics.

`reason` is one of `REASONS` and is shown to every client. `detail` may name files of this machine and is
shown only to operators.

Bounds: one entry for each process. A reader reads the file again only after it was replaced; each check costs
one `stat`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import msgspec

FILE_NAME: Final = "processes.json"

#: By reason: what happened, and what an operator does next.
REASONS: Final[dict[str, tuple[str, str]]] = {
    "starting": (
        "it is starting and replays its log",
        "wait; `streams status` shows how far it is",
    ),
    "crashed": (
        "it ended unexpectedly and is being started again",
        "look at the server's log for `ended unexpectedly`; report a crash that repeats",
    ),
    "log_failed": (
        "its log could not be written or synced, so it is being started again",
        "check the disk: free space, `dmesg`, and the mount of the data directory",
    ),
    "cold_store": (
        "the folder of the cold store cannot be read, and the shard cannot start without it",
        "mount or restore the folder that STREAMS_COLD_DIR names; the shard then starts by itself",
    ),
    "silent": (
        "it sends no heartbeat",
        "wait: it is restarted after STREAMS_HANG_MS. If it repeats, check the disk and the machine's load",
    ),
    "hung": (
        "it sent no heartbeat for STREAMS_HANG_MS and was ended; it is being started again",
        "check the disk (`dmesg`, latency, a lost mount) and whether something stops its processes",
    ),
    "not_started": (
        "it could not be started",
        "check the limits on processes and memory of the server's user",
    ),
    "damaged": (
        "its data is damaged, so its boxes are not served",
        "stop the server, run `streams verify`, then `streams repair`, or restore a backup",
    ),
}

#: Reasons for which a process is restarted. Each has a counter that starts at 0.
RESTART_REASONS: Final = ("cold_store", "crashed", "hung", "log_failed", "not_started")


class ProcessState(msgspec.Struct, frozen=True, kw_only=True):
    """One process as the supervisor sees it."""

    state: str = "starting"
    pid: int = 0
    #: A key of `REASONS`, empty while it serves.
    reason: str = ""
    #: The last message of the process, or how it ended.
    detail: str = ""
    #: Restarts by reason.
    restarts: dict[str, int] = {}


class ProcessStates(msgspec.Struct, frozen=True, kw_only=True):
    shards: dict[int, ProcessState] = {}
    gateways: dict[int, ProcessState] = {}
    #: Why the key file cannot be read. Empty if it can be read, or if there is none. May name the file.
    keys_problem: str = ""


decode_states = msgspec.json.Decoder(ProcessStates).decode


class StatesReader:
    """Reads the newest published states. Without a file (a gateway in a test) there are no states."""

    def __init__(self, run_dir: Path | None) -> None:
        self._path = None if run_dir is None else run_dir / FILE_NAME
        self._states = ProcessStates()
        #: Inode and modification time of the file that was read last.
        self._version = (-1, -1)

    def __repr__(self) -> str:
        return f"<StatesReader of {self._path}>"

    def states(self) -> ProcessStates:
        if self._path is not None:
            try:
                stat = os.stat(self._path)
                version = stat.st_ino, stat.st_mtime_ns
                if version != self._version:
                    self._states = decode_states(self._path.read_bytes())
                    self._version = version
            except (OSError, msgspec.MsgspecError):
                pass  # not written yet, or the server is shutting down: keep the last states
        return self._states

    def of_shard(self, shard: int) -> ProcessState | None:
        return self.states().shards.get(shard)

    def why_away(self, shard: int) -> tuple[str, dict[str, str]]:
        """Return a sentence on why a shard does not answer, and the fields `reason` and `next_step`."""
        state = self.of_shard(shard)
        reason = state.reason if state is not None else ""
        if reason not in REASONS:
            return f"shard {shard} cannot be reached right now; nothing was done", {}
        cause, next_step = REASONS[reason]
        message = f"shard {shard} does not serve: {cause}; nothing was done. Operator: {next_step}"
        return message, {"reason": reason, "next_step": next_step}
