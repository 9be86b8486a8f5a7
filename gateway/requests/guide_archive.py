"""Reads the documentation site from a zip archive (`make site`, `STREAMS_GUIDE`).

A name is looked up in a table that is built when the archive is opened; it is never used as a path. Each
file is decompressed once and kept, so memory is bounded by the size of the whole archive.
"""

from __future__ import annotations

import re
import zlib
from typing import Final
from zipfile import BadZipFile, ZipFile, ZipInfo

FILES_MAX: Final = 5_000
BYTES_MAX: Final = 64 * 1024 * 1024
_INDEX: Final = "index.html"
#: Other files are not served, nor are hidden ones and names that are no plain path.
_KINDS: Final = {
    "html": b"text/html; charset=utf-8",
    "css": b"text/css; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "txt": b"text/plain; charset=utf-8",
    "svg": b"image/svg+xml",
    "png": b"image/png",
}
_match_name = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9._-]*/)*[A-Za-z0-9_][A-Za-z0-9._-]*").fullmatch


class BadGuide(Exception):
    """The archive cannot be served."""


def _is_served(name: str) -> bool:
    return _match_name(name) is not None and name.rpartition(".")[2] in _KINDS


class GuideArchive:
    def __init__(self, path: str) -> None:
        """Open the archive and check its sizes. Raises `BadGuide`."""
        try:
            self._zip = ZipFile(path)
        except OSError as error:
            raise BadGuide(f"STREAMS_GUIDE is {path}, which cannot be read: {error.strerror}") from None
        except BadZipFile:
            raise BadGuide(
                f"STREAMS_GUIDE is {path}, which is no zip archive; write one with `make site`"
            ) from None
        try:
            self._infos = self._check(path)
        except BadGuide:
            self._zip.close()
            raise
        self._contents: dict[str, bytes] = {}

    def __repr__(self) -> str:
        return f"<GuideArchive {self._zip.filename}, {len(self._infos)} files>"

    def _check(self, path: str) -> dict[str, ZipInfo]:
        infos = [info for info in self._zip.infolist() if not info.is_dir()]
        size = sum(info.file_size for info in infos)
        if len(infos) > FILES_MAX or size > BYTES_MAX:
            raise BadGuide(
                f"STREAMS_GUIDE is {path}, which has {len(infos)} files of {size} bytes; at most {FILES_MAX} "
                f"files of {BYTES_MAX} bytes are served"
            )
        names = {info.filename: info for info in infos if _is_served(info.filename)}
        if _INDEX not in names:
            raise BadGuide(f"STREAMS_GUIDE is {path}, which has no {_INDEX}; write it with `make site`")
        return names

    def find(self, name: str) -> str | None:
        """Return the name of the file that is served for a name, or None. An empty name is the first page."""
        name = name or _INDEX
        return name if name in self._infos else None

    def kind(self, name: str) -> bytes:
        return _KINDS[name.rpartition(".")[2]]

    def tag(self, name: str) -> str:
        info = self._infos[name]
        return f'W/"{info.CRC:08x}-{info.file_size:x}"'

    def content(self, name: str) -> bytes | None:
        """Return the contents of a file if they are in memory."""
        return self._contents.get(name)

    def read(self, name: str) -> bytes:
        """Read the contents of a file from the archive. Blocks; any thread may call it."""
        try:
            content = self._zip.read(self._infos[name])
        except (OSError, BadZipFile, zlib.error, RuntimeError, NotImplementedError) as error:
            raise BadGuide(f"{self._zip.filename}: {name} cannot be read: {error}") from None
        return self._contents.setdefault(name, content)

    def close(self) -> None:
        self._zip.close()
