"""Claims the cold store for a server before anything serves: a cold store belongs to one server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import orjson
import structlog
import trio

from gateway.supervise.child import how_it_ended
from gateway.supervise.data_dir import CannotServe, DataDir
from gateway.supervise.manifest import Manifest

#: How long a start waits for the cold store to say whose it is.
CLAIM_WAIT_S: Final = 5.0

log: Any = structlog.get_logger()


async def claim_cold_store(
    directory: DataDir, manifest: Manifest, cold_dir: str, *, command: Sequence[str], environ: dict[str, str]
) -> None:
    """Claim the cold store, or raise `CannotServe`. One that does not answer is not waited for: a shard
    looks again before it changes anything there."""
    command = [
        *command,
        *("--server", manifest.server),
        *("--data-dir", str(directory.path)),
    ]
    found: dict[str, str] = {"away": f"no answer within {CLAIM_WAIT_S:.0f} s"}
    with trio.move_on_after(CLAIM_WAIT_S):
        claimed = await trio.run_process(command, capture_stdout=True, env=environ, check=False)
        if claimed.returncode != 0:
            raise CannotServe(
                f"the cold store {cold_dir} could not be claimed: the process that does it "
                f"ended with {how_it_ended(claimed.returncode)}; its message is above"
            )
        found = orjson.loads(claimed.stdout)
    if "refused" in found:
        raise CannotServe(found["refused"])
    if "away" in found:
        log.warning(
            "the cold store does not answer; shards check its owner before they change anything there",
            cold_dir=cold_dir,
            error=found["away"],
        )
