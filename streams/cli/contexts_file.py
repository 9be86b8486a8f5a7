"""Servers by name: one small file in the user's own config directory, readable by nobody else."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from streams.cli import output

LOCAL = "local"
LOCAL_URL = "http://127.0.0.1:4000"


@dataclass(frozen=True, slots=True)
class Context:
    url: str
    key: str = ""


@dataclass(slots=True)
class Contexts:
    current: str
    by_name: dict[str, Context]


def path() -> Path:
    home = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(home) / "streams" / "contexts.json"


def load() -> Contexts:
    """What is there; a `local` one is always there."""
    known = {LOCAL: Context(LOCAL_URL)}
    try:
        text = path().read_bytes()
    except FileNotFoundError:
        return Contexts(LOCAL, known)
    try:
        found = json.loads(text)
        known |= {name: Context(**fields) for name, fields in found["contexts"].items()}
        current = str(found["current"])
    except (ValueError, KeyError, TypeError) as error:
        raise output.Refusal(
            f"{path()} is not what `streams context` writes ({error}); move it away"
        ) from error
    return Contexts(current if current in known else LOCAL, known)


def save(contexts: Contexts) -> None:
    """In one step: a command that is killed leaves the old file."""
    target = path()
    target.parent.mkdir(parents=True, exist_ok=True)
    known = {name: asdict(context) for name, context in contexts.by_name.items()}
    descriptor, temporary = tempfile.mkstemp(dir=target.parent)  # mode 0600: it may hold keys
    with os.fdopen(descriptor, "w") as file:
        json.dump({"current": contexts.current, "contexts": known}, file, indent=2)
    os.replace(temporary, target)


def find(name: str | None) -> Context:
    contexts = load()
    wanted = name or contexts.current
    if wanted not in contexts.by_name:
        raise output.Refusal(
            f"there is no context {wanted!r}; `streams context ls` lists them, "
            "`streams context add` makes one"
        )
    return contexts.by_name[wanted]
