"""Where snapshots are kept outside of a box: a folder, or an object store by its URL. Plain blocking
calls."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any, Protocol


class Store(Protocol):
    """Named bytes. `put` shows all of a name or nothing, and what it has returned from survives a crash."""

    def put(self, name: str, content: bytes) -> None: ...

    def get(self, name: str) -> bytes | None: ...

    def names(self) -> list[str]: ...

    def drop(self, name: str) -> None: ...


def open_store(place: str | Path) -> Store:
    """`s3://bucket/prefix`, `gs://…`, `az://…`, or a folder, which is made."""
    text = str(place)
    if "://" in text and not text.startswith("file://"):
        return ObjectStore(text)
    return FolderStore(Path(text.removeprefix("file://")))


class FolderStore:
    """Snapshots in a folder. A file appears whole or not at all."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder

    def __repr__(self) -> str:
        return f"<FolderStore {self._folder}>"

    def put(self, name: str, content: bytes) -> None:
        descriptor, temporary = tempfile.mkstemp(dir=self._folder, prefix=".new-")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self._folder / name)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        folder = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(folder)  # the name is as durable as the bytes
        finally:
            os.close(folder)

    def get(self, name: str) -> bytes | None:
        try:
            return (self._folder / name).read_bytes()
        except FileNotFoundError:
            return None

    def names(self) -> list[str]:
        return sorted(path.name for path in self._folder.iterdir() if not path.name.startswith("."))

    def drop(self, name: str) -> None:
        (self._folder / name).unlink(missing_ok=True)


class ObjectStore:
    """Snapshots in an object store; credentials come from the environment."""

    def __init__(self, url: str) -> None:
        from obstore.store import from_url

        self._url = url
        self._store: Any = from_url(url)

    def __repr__(self) -> str:
        return f"<ObjectStore {self._url}>"

    def put(self, name: str, content: bytes) -> None:
        self._store.put(name, content)

    def get(self, name: str) -> bytes | None:
        try:
            return bytes(self._store.get(name).bytes())
        except FileNotFoundError:
            return None

    def names(self) -> list[str]:
        return sorted(str(entry["path"]) for page in self._store.list() for entry in page)

    def drop(self, name: str) -> None:
        self._store.delete(name)
