"""Arguments that a supervisor passes to its shards and gateways, and texts that both sides know."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NoReturn

import orjson

from streams.config.setting import ConfigError
from streams.config.table import Config

#: Variables with the prefix STREAMS_ that are not settings: they connect processes and tests of the server.
CHILD_CONFIG_VARIABLE: Final = "STREAMS_CHILD_CONFIG"
READY_FD_VARIABLE: Final = "STREAMS_READY_FD"
#: Log event: the supervisor stopped the server and had to kill a child that did not end in time.
CHILD_KILLED_AT_STOP: Final = "killed: it did not end in time"

#: First words of a shard's error message when it cannot start without its cold store.
COLD_STORE_FAILED: Final = "the cold store cannot be opened"


@dataclass(frozen=True, slots=True)
class ChildArgs:
    """The arguments that a supervisor passes to a shard or gateway process.

    index       number of the shard or gateway
    listen_fds  inherited listening sockets; the first of a shard is its Unix socket, the others are TCP
    parent_fd   read end of a pipe; end of file means that the supervisor is gone and the child must stop
    ready_fd    write end of a pipe for the lines `progress 0.42`, `ready`, `beat` and `error <message>`
    placement   the slot map as JSON
    sockets     socket paths of the shards, by shard number (gateways)
    directory   folder of the shard in the data directory (shards)
    server      permanent id of the data directory (shards)
    addresses   TCP addresses of the shards, by shard number, if they listen on TCP (gateways)
    is_after_failure  True if the previous process ended because a write or a sync failed (shards)
    origins     origin of each setting that is not a default, by name (gateways)
    keys_file   file with the digests of the API keys, if keys are required; read again on SIGHUP
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
    origins: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, argv: Sequence[str], environ: Mapping[str, str]) -> ChildArgs:
        """Parse the arguments. Raises `ConfigError` if a person, not a supervisor, started this process."""
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
        parser.add_argument("--origins", default="{}")
        options = parser.parse_args(list(argv))
        if CHILD_CONFIG_VARIABLE not in environ:
            raise ConfigError(
                [
                    f"{CHILD_CONFIG_VARIABLE} is not set; do not start this process directly, run `streams "
                    "serve`"
                ]
            )
        return cls(
            config=Config.from_json(environ[CHILD_CONFIG_VARIABLE]),
            index=options.index,
            listen_fds=tuple(options.listen_fd),
            parent_fd=options.parent_fd,
            ready_fd=options.ready_fd,
            directory=options.directory,
            server=options.server,
            is_after_failure=options.after_failure,
            placement=options.placement,
            sockets=tuple(orjson.loads(options.sockets)),
            keys_file=options.keys_file,
            addresses=tuple(orjson.loads(options.addresses)),
            origins=orjson.loads(options.origins),
        )


class _ChildParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError([f"{message}; do not start this process directly, run `streams serve`"])
