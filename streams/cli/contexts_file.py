"""The file of contexts: one small file in the user's config directory, readable only by the user."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from streams.cli import output

LOCAL = "local"
LOCAL_URL = "http://127.0.0.1:4000"


@dataclass(frozen=True, slots=True)
class ServerContext:
    url: str
    key: str = ""


@dataclass(slots=True)
class Contexts:
    current: str
    by_name: dict[str, ServerContext]


def path() -> Path:
    home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(home) / "streams" / "contexts.json"


def load() -> Contexts:
    """Read the file of contexts. The context `local` always exists."""
    contexts = {LOCAL: ServerContext(LOCAL_URL)}
    try:
        text = path().read_bytes()
    except FileNotFoundError:
        return Contexts(LOCAL, contexts)
    try:
        document = json.loads(text)
        contexts |= {name: ServerContext(**fields) for name, fields in document["contexts"].items()}
        current = str(document["current"])
    except (ValueError, KeyError, TypeError) as error:
        raise output.Refusal(
            f"{path()} is not a valid contexts file ({error}); rename it and add the contexts again"
        ) from error
    return Contexts(current if current in contexts else LOCAL, contexts)


def save(contexts: Contexts) -> None:
    """Replace the file atomically: a command that is killed leaves the old file."""
    import tempfile

    target = path()
    target.parent.mkdir(parents=True, exist_ok=True)
    fields_by_name = {name: asdict(context) for name, context in contexts.by_name.items()}
    descriptor, temporary = tempfile.mkstemp(dir=target.parent)  # mode 0600: it may hold keys
    with os.fdopen(descriptor, "w") as file:
        json.dump({"current": contexts.current, "contexts": fields_by_name}, file, indent=2)
    os.replace(temporary, target)


def find(name: str | None) -> ServerContext:
    contexts = load()
    requested_name = name or contexts.current
    if requested_name not in contexts.by_name:
        raise output.Refusal(
            f"there is no context {requested_name!r}; `streams context ls` lists them, "
            "`streams context add` creates one"
        )
    return contexts.by_name[requested_name]
