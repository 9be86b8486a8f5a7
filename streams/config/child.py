"""What a supervisor tells the shards and gateways that it starts, and what they say to each other."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn

import orjson

from streams.config.setting import ConfigError
from streams.config.table import Config

#: Variables with our prefix that are not settings: how our own processes and tests talk to each other.
CHILD_CONFIG_VARIABLE: Final = "STREAMS_CHILD_CONFIG"
READY_FD_VARIABLE: Final = "STREAMS_READY_FD"
#: What a supervisor logs of a process that it had to kill when the server was stopped.
KILLED_AT_THE_END: Final = "killed: it did not end in time"

#: How a shard begins the reason for which it cannot start without its cold store.
COLD_STORE_FAILED: Final = "the cold store cannot be opened"


@dataclass(frozen=True, slots=True)
class ChildArgs:
    """What the supervisor tells a shard or a gateway when it starts one.

    index       which shard or gateway this is
    listen_fds  listening sockets, inherited; of a shard, the first is its Unix socket, the others are TCP
    parent_fd   read end of a pipe; end of file means the supervisor is gone and the child must stop
    ready_fd    write end of a pipe for the lines `progress 0.42`, `ready`, `beat` and `error <message>`
    placement   the slot map as JSON
    sockets     the shards' socket paths by shard number (gateways)
    directory   the folder in the data directory that is the shard's (shards)
    server      names the data directory, for good (shards)
    addresses   the shards' TCP addresses by shard number, if they have some (gateways)
    is_after_failure  its last process ended because a write or a sync failed (shards)
    keys_file   where the keys are, as digests, when keys are asked for; read again on SIGHUP
    """

    config: Config
    index: int
    listen_fds: tuple[int, ...]
    parent_fd: int
    ready_fd: int
    placement: str
    sockets: tuple[str, ...]
    directory: str = ""
    keys_file: str = ""
    addresses: tuple[str, ...] = ()
    server: str = "0"
    is_after_failure: bool = False

    @classmethod
    def parse(cls, argv: Sequence[str], environ: Mapping[str, str]) -> ChildArgs:
        """Raises `ConfigError` when a person, not a supervisor, started this process."""
        parser = _ChildParser(add_help=False, allow_abbrev=False)
        parser.add_argument("--index", type=int, required=True)
        parser.add_argument("--listen-fd", type=int, action="append", required=True)
        parser.add_argument("--parent-fd", type=int, required=True)
        parser.add_argument("--ready-fd", type=int, required=True)
        parser.add_argument("--directory", default="")
        parser.add_argument("--server", default="0")
        parser.add_argument("--after-failure", action="store_true")
        parser.add_argument("--placement", default="")
        parser.add_argument("--sockets", default="[]")
        parser.add_argument("--addresses", default="[]")
        parser.add_argument("--keys-file", default="")
        known = parser.parse_args(list(argv))
        if CHILD_CONFIG_VARIABLE not in environ:
            raise ConfigError(
                [f"{CHILD_CONFIG_VARIABLE} is not set; this process is started by `streams serve`"]
            )
        return cls(
            config=Config.from_json(environ[CHILD_CONFIG_VARIABLE]),
            index=known.index,
            listen_fds=tuple(known.listen_fd),
            parent_fd=known.parent_fd,
            ready_fd=known.ready_fd,
            directory=known.directory,
            server=known.server,
            is_after_failure=known.after_failure,
            placement=known.placement,
            sockets=tuple(orjson.loads(known.sockets)),
            keys_file=known.keys_file,
            addresses=tuple(orjson.loads(known.addresses)),
        )


class _ChildParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError([f"{message}; this process is started by `streams serve`"])
