"""Checks whether a server may start with its settings: keys, host names, and a publicly reachable address."""

from __future__ import annotations

import ipaddress
import re

from streams.config.setting import ConfigError
from streams.config.table import Config
from streams.protocol.access.keys import MalformedKey, entries_of_list, parse_ring


def items_of(text: str) -> list[str]:
    """Split a comma-separated list."""
    return [item.strip() for item in text.split(",") if item.strip()]


def host_name(host: str) -> str:
    """Return the name or address in a `Host` header in lower case, without port, brackets and final dot."""
    name = host.lower()
    if name.startswith("["):
        return name[1:].partition("]")[0]
    if name.count(":") == 1:
        name = name.partition(":")[0]
    return name.removesuffix(".")


_host = re.compile(r"\[[0-9A-Fa-f:.]+\](?::[0-9]+)?|[A-Za-z0-9._-]+(?::[0-9]+)?|[0-9A-Fa-f:.]+").fullmatch
_origin = re.compile(r"https?://(?:\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::[0-9]+)?").fullmatch


def _bad_names(config: Config) -> list[str]:
    bad = [
        f"STREAMS_ALLOWED_HOSTS: {host!r} is not a host name or address"
        for host in items_of(config.allowed_hosts)
        if _host(host) is None
    ]
    bad += [
        f"STREAMS_CORS_ORIGINS: {origin!r} is not an origin in lower case, such as https://app.example.com "
        "or http://localhost:3000"
        for origin in items_of(config.cors_origins)
        if _origin(origin) is None
    ]
    return bad


def is_loopback(address: str) -> bool:
    """Return True if only this machine can reach the address. Other names than localhost count as public."""
    if address.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def check_may_serve(config: Config) -> None:
    """Raise `ConfigError` for malformed keys, conflicting settings, and an open server without keys.

    The keys file is not read here.
    """
    if config.api_keys:
        try:
            parse_ring(entries_of_list(config.api_keys))
        except MalformedKey as error:
            raise ConfigError([f"STREAMS_API_KEYS: {error}"]) from None
    bad_names = _bad_names(config)
    if bad_names:
        raise ConfigError(bad_names)
    if config.shard_host and not config.has_keys:
        raise ConfigError(
            [f"STREAMS_SHARD_HOST is {config.shard_host}, but no API keys are set; set STREAMS_API_KEYS"]
        )
    if config.s2_durability == "object" and not config.cold_dir:
        raise ConfigError(["STREAMS_S2_DURABILITY is object, which needs a cold store; set STREAMS_COLD_DIR"])
    if not config.has_keys and not is_loopback(config.host) and not config.allow_insecure_no_auth:
        raise ConfigError([refusal_to_serve_openly(config.host)])


def refusal_to_serve_openly(address: str) -> str:
    return (
        f"STREAMS_HOST is {address}, which other machines can reach, but no API keys are set. Set "
        "STREAMS_API_KEYS, or bind to 127.0.0.1, or set STREAMS_ALLOW_INSECURE_NO_AUTH=1 to serve everyone "
        "who can connect"
    )
