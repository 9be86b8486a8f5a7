"""Reads the keys of a server and passes them to its children as digests (v0 §11).

Only the supervisor reads the keys. The children share one file in the run directory, which only this user can
open and which is removed with the server. The supervisor writes it before the first child starts, and
replaces it atomically on SIGHUP, so all children see the same keys. No secret leaves this process."""

from __future__ import annotations

import os
from pathlib import Path

import structlog

from gateway.supervise.data_dir import CannotServe
from streams.config import Config
from streams.protocol.access.keys import KeyRing, MalformedKey, entries_of_lines, entries_of_list, parse_ring

log = structlog.get_logger()

#: 1000 keys of the longest kind fit; anything larger is the wrong file.
_FILE_BYTES_MAX = 32 * 1024 * 1024


def read_keys(config: Config) -> KeyRing | None:
    """Return the keys of the settings, or None if there are none. Raises `CannotServe`, without a secret."""
    if not config.has_keys:
        return None
    entries: list[tuple[str, str]] = []
    if config.api_keys:
        entries += [(f"STREAMS_API_KEYS: {at}", entry) for at, entry in entries_of_list(config.api_keys)]
    if config.api_keys_file:
        path = config.api_keys_file
        entries += [(f"{path}: {at}", entry) for at, entry in entries_of_lines(_text_of(path))]
    try:
        ring, warnings = parse_ring(entries, config.key_limits)
    except MalformedKey as error:
        raise CannotServe(str(error)) from None
    if not ring.keys:
        raise CannotServe(
            f"{config.api_keys_file} contains no keys; add one, or unset STREAMS_API_KEYS_FILE: a server on "
            "127.0.0.1 needs none"
        )
    for warning in warnings:
        log.warning("an API key is weak; replace it", where=warning)
    return ring


def _text_of(path: str) -> str:
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_mode & 0o077:
                log.warning("other users can read the key file; chmod 600 it", path=path)
            raw = file.read(_FILE_BYTES_MAX)
        return raw.decode("ascii")
    except OSError as error:
        raise CannotServe(
            f"STREAMS_API_KEYS_FILE is {path}, which cannot be read: {error.strerror}"
        ) from None
    except UnicodeDecodeError as error:
        raise CannotServe(f"{path}: byte {error.start} is not ASCII; keys must be ASCII") from None


class KeyFile:
    def __init__(self, config: Config, ring: KeyRing) -> None:
        self.path = config.run_dir / "keys.json"
        self.version = 1
        #: Why the keys could not be read at the last SIGHUP; empty if they could.
        self._problem = ""
        self._config = config
        self._write(ring)

    def __repr__(self) -> str:
        return f"<KeyFile {self.path} version {self.version}>"

    def reload(self) -> bool:
        """Read the keys again. Returns False if they cannot be read; the previous keys then stay valid."""
        try:
            ring = read_keys(self._config)
            assert ring is not None
            self._write(ring)
        except (CannotServe, OSError) as error:
            self._problem = str(error)
            log.error(
                "keys not reloaded; the previous keys stay valid",
                error=str(error),
                next_step="make the file readable and valid for the server's user, then send SIGHUP again",
            )
            return False
        self._problem = ""
        self.version += 1
        log.info("keys loaded", keys=len(ring.keys))
        return True

    def problem(self) -> str:
        """Return why a reload or restart would fail to read the keys now; empty if it would not. Reads a
        disk."""
        path = self._config.api_keys_file
        if path:
            try:
                with open(path, "rb") as file:
                    file.read(1)
            except OSError as error:
                return f"{path}: {error.strerror}"
        return self._problem

    def _write(self, ring: KeyRing) -> None:
        """Replace the file atomically, never readable by other users. It need not survive a crash: each start
        writes it again."""
        temporary = Path(f"{self.path}.new")
        temporary.unlink(missing_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as file:
            file.write(ring.to_json())
        temporary.rename(self.path)
