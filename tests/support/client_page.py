"""Writes `docs/reference/client.md` to standard output, from the docstrings of the client: `make docs`."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any, get_type_hints

import msgspec

import streams
from tests.support.errors_page import classes as error_classes

_HEAD = """# The Python client

<!-- Written by `make docs` from the docstrings of the client. Do not edit. -->

Every public name of `streams`. [Use the Python client](../howto/client.md) shows how they work together;
[errors](errors.md) lists what they raise.

`AsyncClient`, `AsyncBox` and so on have the methods of the class without `Async`: they are coroutines, and
iterators are asynchronous. Names that end in `_ms` are milliseconds; `timeout`, `delay` and names that end in
`_s` are seconds.
"""
#: The order of the page: what a program begins with comes first.
_SECTIONS: dict[str, list[str]] = {
    "Client": ["Client"],
    "Boxes": ["Box", "Group", "Entry", "Record", "Tombstone", "Page"],
    "Reading and watching": ["Reader", "Watch", "BoxWatch", "CaughtUp", "BoxDeleted"],
    "Producing": ["Producer", "Ticket", "ProducerStatistics"],
    "Queues": ["Queue", "Job", "Worker", "Nack", "WorkerStatistics", "JobOutputs"],
    "Snapshots": ["BoxSnapshots", "StoredSnapshots", "Restored", "is_snapshot", "FolderStore", "ObjectStore"],
    "Options": ["BoxSettings", "ReadOptions", "WriteOptions", "Retry"],
    "Without the gateway": ["ShardWriter"],
}
#: Types of which a program gets instances only by a method or attribute of a client.
_INDIRECT = {"Client": [("Schedules", "streams.client._sync.schedules")]}


def _text(thing: object) -> str:
    """The docstring, with indented blocks as code."""
    lines = (inspect.getdoc(thing) or "").splitlines()
    parts: list[str] = []
    code: list[str] = []
    for line in [*lines, ""]:
        if line.startswith("    ") or (code and not line.strip() and line is not lines[-1]):
            code.append(line)
            continue
        if code:
            parts += ["```python", *textwrap.dedent("\n".join(code)).splitlines(), "```"]
            code = []
        parts.append(line.rstrip())
    return "\n".join(parts).strip()


def _shown(annotation: object) -> str:
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    text = re.sub(r"\b(?:replies|server_replies|answers)\.", "", text)
    return re.sub(r"Unpack\[(\w+)\]", r"\1", text)


def _signature(function: Any) -> str:
    signature = inspect.signature(function)
    parameters = [
        each.replace(annotation=each.empty) for name, each in signature.parameters.items() if name != "self"
    ]
    text = str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))
    result = signature.return_annotation
    return text + ("" if result in (inspect.Signature.empty, "None", None) else f" → {_shown(result)}")


def _methods(kind: type) -> Iterator[str]:
    # A private base has no section of its own.
    bases = [base for base in reversed(kind.__mro__) if base is kind or base.__name__.startswith("_")]
    for name, member in {name: member for base in bases for name, member in vars(base).items()}.items():
        if name.startswith("_"):
            continue
        if isinstance(member, property):
            yield f"**`{name}`** {_text(member)}\n".replace("\n\n", "\n")
        elif inspect.isfunction(member):
            text = _text(member)
            yield f"**`{name}{_signature(member)}`**\n" + f"\n{text}\n" * bool(text)


def _fields(kind: type) -> list[str]:
    if not (is_dataclass(kind) or issubclass(kind, (msgspec.Struct, tuple)) or hasattr(kind, "__total__")):
        return []
    hints = (
        get_type_hints(kind, include_extras=False) if not hasattr(kind, "__total__") else kind.__annotations__
    )
    names = [name for name in hints if not name.startswith("_")]
    return [f"`{name}`" for name in names]


def _class(name: str, kind: Any) -> Iterator[str]:
    yield f"### {name}\n"
    if inspect.isfunction(kind):
        yield f"`{name}{_signature(kind)}`\n\n{_text(kind)}\n"
        return
    if (
        inspect.isclass(kind)
        and not hasattr(kind, "__total__")
        and not issubclass(kind, (msgspec.Struct, tuple))
    ):
        yield f"`{name}{_signature(kind.__init__)}`\n"
    if text := _text(kind):
        yield text + "\n"
    if fields := _fields(kind):
        yield f"Fields: {', '.join(fields)}.\n"
    bases = [
        base.__name__
        for base in kind.__mro__[1:]
        if base.__name__ in streams.__all__ and base.__name__ != name
    ]
    if bases and not hasattr(kind, "__total__"):
        yield f"Has all methods of [{bases[0]}](#{bases[0].lower()}).\n"
    yield from _methods(kind)


def page() -> str:
    parts = [_HEAD]
    for title, names in _SECTIONS.items():
        parts.append(f"## {title}\n")
        for name in names:
            parts.extend(_class(name, getattr(streams, name)))
        for name, module in _INDIRECT.get(title, ()):
            parts.extend(_class(name, getattr(__import__(module, fromlist=[name]), name)))
    listed = {name for names in _SECTIONS.values() for name in names}
    errors = {each.__name__ for each in error_classes()} | {"Refused", "Busy", "Uncertain"}
    missing = {
        name
        for name in streams.__all__
        if name not in listed | errors | {"__version__"} and not name.startswith("Async")
    }
    assert not missing, f"give these names a section in {__name__}: {sorted(missing)}"
    return "\n".join(parts)


if __name__ == "__main__":
    print(page(), end="")
