"""Claims the cold store for a server that starts. The supervisor runs it as a process of its own.

It prints one line of JSON and exits with 0:

    {}                        this server owns the store
    {"refused": "…"}          the server must not start: the location is invalid, or another server owns it
    {"away": "…"}             the store does not answer; shards check again before they change it
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time

import msgspec

from shard.storage.cold import ColdConfigError, ColdDamaged, ColdError, open_cold, ownership
from shard.storage.cold.ownership import Owner
from shard.storage.files import Disk
from streams import process
from streams.config import CHILD_CONFIG_VARIABLE, Config


def owner_of(server: str, data_dir: str) -> Owner:
    """Return the owner entry of a data directory on this host."""
    return Owner(server, socket.gethostname(), data_dir, time.time_ns() // 1_000_000)


def claim(location: str, owner: Owner) -> dict[str, str]:
    """Claim the store, and return the line to print."""
    next_step = (
        "Give this server its own location with STREAMS_COLD_DIR. Or, if this data directory was restored "
        "in place of that server, or that server is gone for good: make sure that it is stopped, run "
        f"`streams takeover --data-dir {owner.data_dir} --cold-dir {location}`, and start again"
    )
    try:
        current_owner = ownership.claim(open_cold(location, Disk()), owner)
    except ColdConfigError as error:
        return {"refused": f"{error} It is set by STREAMS_COLD_DIR"}
    except ColdDamaged as error:
        unclear = f"{location}: {error.name} does not name the owner of the cold store: {error.reason}"
        return {"refused": f"{unclear}. {next_step}"}
    except ColdError as error:
        return {"away": str(error)}
    if current_owner.server == owner.server:
        return {}
    return {
        "refused": f"{location} is the cold store of another {current_owner}. Two servers in one place would "
        f"destroy each other's data. {next_step}"
    }


def main() -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--server", required=True)
    parser.add_argument("--data-dir", required=True)
    arguments = parser.parse_args()
    config = Config.from_json(os.environ[CHILD_CONFIG_VARIABLE])
    result = claim(config.cold_dir, owner_of(arguments.server, arguments.data_dir))
    sys.stdout.write(msgspec.json.encode(result).decode() + "\n")
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    process.leave(main())  # threads of obstore abort an interpreter that shuts down normally
