"""Maps the work streams of one connection to lease holders of the shard.

Each gateway numbers its own streams, so a stream gets a holder number of this shard with its first claim.
When the stream or its connection ends, the jobs that are leased to it are released.

Bounds: one entry for each `/work` stream of the connection; gateways bound those.
"""

from __future__ import annotations

import msgspec

from shard.engine.engine import Engine
from shard.engine.replies import Ticket
from shard.server.tickets import DiscardTicket
from streams.protocol.messages.commands import Command
from streams.protocol.messages.queues import Claim, ReleaseHolder


class JobHolders:
    __slots__ = ("_holders",)

    def __init__(self) -> None:
        #: (box, stream of the gateway) -> holder of the shard.
        self._holders: dict[tuple[str, int], int] = {}

    def __repr__(self) -> str:
        return f"<JobHolders {len(self._holders)}>"

    def __len__(self) -> int:
        return len(self._holders)

    def claim_of(self, command: Command, engine: Engine) -> Claim:
        """Return the claim with the holder number of its stream in this shard."""
        assert isinstance(command, Claim)
        key = (command.box, command.holder)
        holder = self._holders.get(key)
        if holder is None:
            holder = self._holders[key] = engine.delivery.claims.new_holder()
        return msgspec.structs.replace(command, holder=holder)

    def release(self, command: Command, engine: Engine, ticket: Ticket) -> None:
        assert isinstance(command, ReleaseHolder)
        holder = self._holders.pop((command.box, command.holder), -1)  # -1 holds nothing
        engine.release(command.box, holder, ticket)

    def release_all(self, engine: Engine) -> None:
        for (box, _), holder in self._holders.items():
            engine.release(box, holder, DiscardTicket())
        self._holders.clear()
