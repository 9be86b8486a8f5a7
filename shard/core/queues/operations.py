"""Handles the commands of operators on a queue: pause and resume (v0 §23)."""

from __future__ import annotations

import msgspec

from shard.core import changes
from shard.core.context import Context
from shard.core.outcome import LogEntries, Outcome, reply_after
from shard.core.queues.jobs import Jobs
from streams.protocol.messages import queues


class QueueOperations:
    def __init__(self, context: Context, jobs: Jobs) -> None:
        self._context = context
        self._jobs = jobs
        context.on_command(queues.SetPaused, self._set_paused)

    def _set_paused(self, command: queues.SetPaused, now_ms: int, entries: LogEntries) -> Outcome:
        """Change `paused` in the config. All waiting claims are looked at: `/work` streams report it."""
        context = self._context
        box, _ = self._jobs.queue_of(command.box, now_ms, entries)
        if box.config.paused != command.paused:
            config = msgspec.structs.replace(box.config, paused=command.paused)
            context.log(changes.BoxConfigured(box.generation, config, 0), entries)
        wait = context.durability.wait_for_config(box.config_lsn, box.config.durability)
        reply = queues.PauseReply(box.name, command.paused)
        return reply_after(wait, entries, reply, (box.name,))
