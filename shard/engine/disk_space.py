"""Measures the free space of a shard's disk, and decides which commands are still accepted.

    free space      level    commands
    ──────────────  ───────  ────────────────────────────────────────────────────────────────────────────
    enough          ok       all
    below the low   low      those that add data are refused (`507 disk_full`): appends, new boxes, groups,
    watermark                routers, schedules and their records, streams and tokens, rows of
                             transactions, copies of routers. Reads,
                             claims, acks, nacks, extends, deletes, trims, fences, dead letters go on
    below the full  full     everything that must be logged is refused; reads, and boxes in memory, go on
    watermark

Commands that are accepted at level low have space in the log: it writes only into allocated files
(`wal/log.py`, ROOM_BEFORE_FRAMES). If the next log file cannot be allocated, the level is at least low,
however much space the file system reports. It is full if the current file is nearly full too, or the log
waits for space.

Hysteresis: a level ends when there is an eighth more space than its watermark, but at most
`_MARGIN_BYTES_MAX` more.

Rules of the file
- It decides before the machine handles a command (`refusal`); nothing here undoes anything.
- The decision depends on the type of the command and on its box, never on its content.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any

import structlog

from shard.core.boxes.box import Box
from shard.core.queues.move_queue import is_move
from shard.storage.files import DiskLike
from streams.protocol.access import key_limits
from streams.protocol.errors import DiskFull
from streams.protocol.messages import bulk, commands, forwards, queues, routers, s2, schedules
from streams.protocol.telemetry.reports import DiskReport

log = structlog.get_logger()

#: Default watermarks: this many bytes, or this part (1/20, 1/80) of the file system if that is less.
LOW_BYTES, LOW_PART = 1 << 30, 20
FULL_BYTES, FULL_PART = 256 << 20, 80

_MARGIN_BYTES_MAX = 64 << 20

#: `Retry-After` of a refusal: space seldom becomes free in less.
RETRY_AFTER_MS = 5_000

#: Time between two measurements; the second applies while space is short, or nearly so.
MEASURE_S, MEASURE_SHORT_S = 1.0, 0.25

#: Without a next log file, the level is full when the current one has less than 1/8 of its size left.
_LOG_ROOM_PART = 8


class Level(IntEnum):
    OK = 0
    LOW = 1
    FULL = 2


def _always(command: Any, box: Box | None) -> bool:
    return True


def _adds_records(command: Any, box: Box | None) -> bool:
    return box is None or not box.is_memory


def _creates_box(command: Any, box: Box | None) -> bool:
    return box is None


def _creates_group(command: queues.CommitGroup, box: Box | None) -> bool:
    return box is not None and box.groups.find(command.group) is None


def _copies_records(command: forwards.Forward, box: Box | None) -> bool:
    return not is_move(command.head.origin) and _adds_records(command, box)


def _appends_to_stream(command: s2.AppendStream, box: Box | None) -> bool:
    """Return False for an append that only trims or fences its stream: it is accepted."""
    only_commands = len(command.trims) + (command.fence is not None) >= len(command.tails)
    return not only_commands and _adds_records(command, box)


#: Commands that may add data, and a check whether a given command does.
ADDING_COMMANDS: Mapping[type, Callable[[Any, Box | None], bool]] = {
    commands.Append: _adds_records,
    commands.PutBox: _creates_box,
    forwards.Forward: _copies_records,
    forwards.AttachEndpoint: _always,
    routers.PutRouter: _always,
    schedules.PutSchedule: _always,
    schedules.RunSchedule: _adds_records,
    queues.PlanRequeue: _always,
    queues.AckWithOutputs: _always,
    queues.CommitGroup: _creates_group,
    bulk.TxnPut: _always,
    s2.AppendStream: _appends_to_stream,
    s2.PutStream: _always,
    s2.PutBasin: _always,
    s2.IssueToken: _always,
}

#: Commands that log little and free space, or complete work that has begun.
LOGGED_COMMANDS = frozenset(
    (
        commands.DeleteBox,
        commands.DeleteRecords,
        commands.SetFence,
        forwards.ReportDelivery,
        forwards.DetachEndpoint,
        routers.SettleRouter,
        routers.DropRouter,
        schedules.DropSchedule,
        queues.Claim,
        queues.BatchClaim,
        queues.Ack,
        queues.Nack,
        queues.Extend,
        queues.SetPaused,
        queues.Reschedule,
        queues.Reprioritize,
        queues.DeleteGroup,
        bulk.TxnCommit,
        bulk.TxnAbort,
        s2.PatchBasin,
        s2.DeleteBasin,
        s2.DropBasin,
        s2.PatchStream,
        s2.DeleteStream,
        s2.RevokeToken,
    )
)

#: Commands that are never logged, and `ReleaseHolder`: a lost connection must release its jobs.
UNLOGGED_COMMANDS = frozenset(
    (
        schedules.FindSchedule,
        schedules.ListSchedules,
        commands.ReadBox,
        commands.Follow,
        commands.Scan,
        commands.ReadStream,
        commands.GetRecord,
        commands.GetState,
        commands.GetTail,
        commands.ListBoxes,
        commands.ListSortedBoxes,
        commands.PutSession,
        commands.TakeSession,
        commands.KeepSession,
        forwards.Collect,
        forwards.GetOutbox,
        forwards.ListEndpoints,
        routers.GetRouter,
        routers.ListRouters,
        queues.AwaitMoves,
        queues.GetGroup,
        queues.ListGroups,
        queues.CheckOutput,
        queues.ListJobs,
        queues.RequireQueue,
        queues.ReleaseHolder,
        key_limits.ExchangeUse,
        bulk.Locate,
        bulk.States,
        bulk.TxnList,
        s2.GetStream,
        s2.ListStreams,
        s2.GetStreamTail,
        s2.GetUsage,
        s2.GetBasin,
        s2.ListBasins,
        s2.ListTokens,
        s2.FindToken,
    )
)


class DiskSpace:
    def __init__(self, disk: DiskLike, path: str, *, low_bytes: int = 0, full_bytes: int = 0) -> None:
        """Measure the file system of `path`. A watermark of 0 is computed from its size."""
        self._disk = disk
        self._path = path
        self._low_setting = low_bytes
        self._full_setting = full_bytes
        self.level = Level.OK
        self.free_bytes = 0
        self.low_bytes = low_bytes
        self.full_bytes = full_bytes
        self.refusals = 0
        #: The level by the free space of the file system alone.
        self._space_level = Level.OK
        self._log_room_bytes: Callable[[], int] = lambda: 1
        self._log_room_bytes_min = 0
        self._lacks_next_file = False

    def __repr__(self) -> str:
        return f"<DiskSpace {self.level.name}, {self.free_bytes} B free>"

    @property
    def is_short(self) -> bool:
        """True if space is below a watermark, or not far above one."""
        return self.level != Level.OK or self.free_bytes < 2 * self.low_bytes

    @property
    def may_allocate(self) -> bool:
        """True if the next log file may be allocated. On a full disk it must not take the last bytes."""
        return self._space_level != Level.FULL

    def measure(self) -> None:
        """Read the free space from the file system; this may block. If that fails, keep the last figures: the
        log detects a disk that fails."""
        try:
            free, total = self._disk.space(self._path)
        except OSError as error:
            log.warning("cannot read the free space of the disk", path=self._path, error=str(error))
            return
        self.free_bytes = free
        self.low_bytes = self._low_setting or min(LOW_BYTES, total // LOW_PART)
        self.full_bytes = self._full_setting or min(FULL_BYTES, total // FULL_PART)
        self._space_level = max(
            _level_of(free, self.full_bytes, Level.FULL, self._space_level),
            _level_of(free, self.low_bytes, Level.LOW, self._space_level),
        )

    def update_level(
        self, *, lacks_next_file: bool, waits_for_space: bool, room_bytes: Callable[[], int], file_bytes: int
    ) -> bool:
        """Compute the level from the last measurement and the state of the log. Return True if it has
        changed."""
        self._lacks_next_file = lacks_next_file
        self._log_room_bytes, self._log_room_bytes_min = room_bytes, file_bytes // _LOG_ROOM_PART
        level = self._space_level
        if lacks_next_file:
            level = max(level, Level.LOW)
        if waits_for_space or self._is_log_nearly_full():
            level = Level.FULL
        if level == self.level:
            return False
        self.level = level
        facts = {"free_bytes": self.free_bytes, "low_bytes": self.low_bytes, "full_bytes": self.full_bytes}
        if level == Level.OK:
            log.info("the disk has space again; all commands are served", **facts)
        elif level == Level.LOW:
            log.error("the disk is nearly full: commands that add data are refused; free disk space", **facts)
        else:
            log.error("the disk is full: all commands that write are refused; free disk space", **facts)
        return True

    def _is_log_nearly_full(self) -> bool:
        return self._lacks_next_file and self._log_room_bytes() < self._log_room_bytes_min

    def refusal(self, command: commands.Command, box: Box | None) -> DiskFull | None:
        """Return the error with which a command is refused at this level, or None. Call it for low and
        full."""
        kind = type(command)
        if kind in UNLOGGED_COMMANDS:
            return None
        adds = ADDING_COMMANDS.get(kind)
        if self.level == Level.FULL or self._is_log_nearly_full():
            if kind is commands.Append and not _adds_records(command, box):
                return None  # a memory box logs nothing
            return self.full_refusal()
        if adds is None or not adds(command, box):
            return None
        message = "the disk of the server is nearly full: nothing can be added, reads and deletes go on"
        return self._refuse(f"{message}; delete records or free space, then try again")

    def refusal_for_size(self, size: int) -> DiskFull | None:
        """Return the error if so many more bytes would fill the disk, or None. Small commits are accepted:
        the level bounds them."""
        if size < _MARGIN_BYTES_MAX or self.free_bytes - size >= self.full_bytes:
            return None
        return self._refuse(
            f"this commit needs about {size} bytes of the server's disk, and {self.free_bytes} are free; "
            "free space on it, then try again"
        )

    def full_refusal(self) -> DiskFull:
        """Return the refusal of a command that must be logged, at level full."""
        message = "the disk of the server is full: nothing that must be written is served, reads go on"
        return self._refuse(f"{message}; free space on it, then try again")

    def _refuse(self, message: str) -> DiskFull:
        self.refusals += 1
        return DiskFull(message, free_bytes=self.free_bytes, retry_after_ms=RETRY_AFTER_MS)

    def report(self) -> DiskReport:
        return DiskReport(
            level=int(self.level),
            free_bytes=self.free_bytes,
            low_bytes=self.low_bytes,
            full_bytes=self.full_bytes,
            refused=self.refusals,
        )


def _level_of(free: int, watermark: int, level: Level, before: Level) -> Level:
    """Return this level if free space is below its watermark, plus a margin if the level applied before."""
    enough = watermark + min(watermark // 8, _MARGIN_BYTES_MAX) if before >= level else watermark
    return level if free < enough else Level.OK
