"""One setting: its kind, how its text is parsed and how its value is shown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from streams.protocol.model.units import UNITS, parse_number

PREFIX: Final = "STREAMS_"

Kind = Literal["text", "path", "count", "bytes", "ms", "flag", "choice", "secret"]


class ConfigError(ValueError):
    """Invalid settings, reported together. `problems` has one sentence for each."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table of settings: everything except its value."""

    name: str
    kind: Kind
    default: Any
    help: str
    least: int = 0
    most: int = 0
    choices: tuple[str, ...] = ()
    default_shown: str = ""

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    def legal(self) -> str:
        """Describe the legal values, as the end of the sentence "it must be ..."."""
        match self.kind:
            case "count":
                return f"a whole number from {self.least} to {self.most}"
            case "bytes":
                return (
                    f"a size from {self.show(self.least)} to {self.show(self.most)} (bytes, or KiB, MB, GiB)"
                )
            case "ms":
                return f"a time from {self.show(self.least)} to {self.show(self.most)} (ms, or s, m, h)"
            case "flag":
                return "true or false (1 or 0, yes or no, on or off)"
            case "choice":
                return "one of " + ", ".join(self.choices)
            case _:
                return "text without NUL characters"

    def parse(self, text: str) -> Any:
        """Return the value of `text`; raise `ValueError` if it is illegal. `parse(show(value)) == value`."""
        match self.kind:
            case "count" | "bytes" | "ms":
                value = parse_number(text, UNITS[self.kind])
                if not self.least <= value <= self.most:
                    raise ValueError
                return value
            case "flag":
                return _FLAGS[text.lower()]
            case "choice":
                if text.lower() not in self.choices:
                    raise ValueError
                return text.lower()
            case _:
                if "\0" in text:
                    raise ValueError
                return Path(text) if self.kind == "path" else text

    def show(self, value: Any) -> str:
        """Format the value for people, in a form that `parse` accepts. A secret shows only that it is set."""
        match self.kind:
            case "secret":
                return "(set)" if value else ""
            case "flag":
                return "true" if value else "false"
            case "bytes":
                return _in_units(value, ("GiB", "MiB", "KiB"), UNITS["bytes"])
            case "ms":
                return (
                    _in_units(value, ("h", "m", "s"), UNITS["ms"])
                    if value % 1000 == 0 and value
                    else f"{value}ms"
                )
            case _:
                return str(value)

    def shown_default(self) -> str:
        return self.default_shown or self.show(self.default)


_FLAGS: Final = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(
    ("0", "false", "no", "off"), False
)


def _in_units(value: int, names: Sequence[str], units: Mapping[str, int]) -> str:
    for name in names:
        if value and value % units[name.lower()] == 0:
            return f"{value // units[name.lower()]}{name}"
    return str(value)
