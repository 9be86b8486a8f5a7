"""Claims the cold store for a server before any process serves: a cold store belongs to one server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import orjson
import structlog
import trio

from gateway.supervise.child import how_it_ended
from gateway.supervise.data_dir import CannotServe, DataDir
from gateway.supervise.manifest import Manifest

#: How long a start waits for the answer of the cold store.
CLAIM_WAIT_S: Final = 5.0

log: Any = structlog.get_logger()


async def claim_cold_store(
    directory: DataDir, manifest: Manifest, cold_dir: str, *, command: Sequence[str], environ: dict[str, str]
) -> None:
    """Claim the cold store, or raise `CannotServe`. If the store does not answer, the start goes on: a shard
    checks the owner again before it changes anything there."""
    command = [
        *command,
        *("--server", manifest.server),
        *("--data-dir", str(directory.path)),
    ]
    answer: dict[str, str] = {"away": f"no answer within {CLAIM_WAIT_S:.0f} s"}
    with trio.move_on_after(CLAIM_WAIT_S):
        process = await trio.run_process(command, capture_stdout=True, env=environ, check=False)
        if process.returncode != 0:
            raise CannotServe(
                f"the cold store {cold_dir} could not be claimed: the claiming process "
                f"ended with {how_it_ended(process.returncode)}; its message is above"
            )
        answer = orjson.loads(process.stdout)
    if "refused" in answer:
        raise CannotServe(answer["refused"])
    if "away" in answer:
        log.warning(
            "the cold store does not answer; shards check its owner before they change anything there",
            cold_dir=cold_dir,
            error=answer["away"],
        )
