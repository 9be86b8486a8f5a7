"""The table of settings: source of environment variables, flags, `--help`, `streams config` and the docs.

setting     one setting: its kind, how its text is parsed and how its value is shown
table       `Config`: every setting with its default, limits and help
loading     builds a `Config` from an environment and flags
serving     checks whether a server may start with these settings
child_args  arguments that a supervisor passes to its shards and gateways
"""

from streams.config.child_args import (
    CHILD_CONFIG_VARIABLE,
    CHILD_KILLED_AT_STOP,
    COLD_STORE_FAILED,
    READY_FD_VARIABLE,
    ChildArgs,
)
from streams.config.loading import describe, load, origins, unknown_variables
from streams.config.serving import check_may_serve, host_name, is_loopback, items_of, refusal_to_serve_openly
from streams.config.setting import ConfigError, Setting
from streams.config.table import SETTINGS, SHARDS_MAX, Config

__all__ = [
    "CHILD_CONFIG_VARIABLE",
    "CHILD_KILLED_AT_STOP",
    "COLD_STORE_FAILED",
    "READY_FD_VARIABLE",
    "SETTINGS",
    "SHARDS_MAX",
    "ChildArgs",
    "Config",
    "ConfigError",
    "Setting",
    "check_may_serve",
    "describe",
    "host_name",
    "is_loopback",
    "items_of",
    "load",
    "origins",
    "refusal_to_serve_openly",
    "unknown_variables",
]
