"""From an environment and a mapping of flags to a `Config`, or one `ConfigError` that names every bad value.

A flag beats the environment, the environment beats the default. An empty value counts as not given. Nothing
here reads the environment, a file or the clock by itself: the caller passes them in.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from streams.config.child import CHILD_CONFIG_VARIABLE, READY_FD_VARIABLE
from streams.config.setting import PREFIX, ConfigError
from streams.config.table import SETTINGS, Config

#: Which server the command line talks to.
CLIENT_VARIABLES: Final = ("STREAMS_URL", "STREAMS_KEY", "STREAMS_CONTEXT")
_NOT_SETTINGS: Final = frozenset(
    {CHILD_CONFIG_VARIABLE, READY_FD_VARIABLE, "STREAMS_SWEEP", *CLIENT_VARIABLES}
)

Origin = Literal["default", "environment", "flag"]


@dataclass(frozen=True, slots=True)
class Given:
    """One setting as it came: its text and where from."""

    text: str
    origin: Origin


def _given(environ: Mapping[str, str], overrides: Mapping[str, object]) -> dict[str, Given]:
    """What was given, by name, the flag before the variable."""
    strange = overrides.keys() - {setting.name for setting in SETTINGS}
    if strange:
        raise ConfigError(f"there is no setting {name!r}{_nearest(name)}" for name in sorted(strange))
    found: dict[str, Given] = {}
    for setting in SETTINGS:
        override = overrides.get(setting.name)
        if override is not None and str(override) != "":
            found[setting.name] = Given(str(override), "flag")
        elif environ.get(setting.variable, "") != "":
            found[setting.name] = Given(environ[setting.variable], "environment")
    _split_host(found)
    return found


def _split_host(found: dict[str, Given]) -> None:
    """A port inside the host is a port given where the host was given; `[::1]` loses its brackets."""
    host = found.get("host")
    if host is None:
        return
    bracketed = re.fullmatch(r"\[([^\]]*)\](?::(.*))?", host.text)
    if bracketed is not None:
        name, port = bracketed[1], bracketed[2]
    elif host.text.count(":") == 1:
        name, port = host.text.split(":")
    else:
        return
    found["host"] = Given(name or "127.0.0.1", host.origin)
    if port is None:
        return
    rival = found.get("port")
    if rival is not None and rival.origin == host.origin and rival.text != port:
        raise ConfigError(
            [f"STREAMS_HOST={host.text} and STREAMS_PORT={rival.text} name two ports; give the port once"]
        )
    if rival is None or rival.origin == "environment":
        found["port"] = Given(port, host.origin)


def load(environ: Mapping[str, str], overrides: Mapping[str, object] | None = None) -> Config:
    """The settings of a server, or a `ConfigError` naming everything that is wrong with them."""
    given = _given(environ, overrides or {})
    values: dict[str, Any] = {}
    problems: list[str] = []
    for setting in SETTINGS:
        if setting.name not in given:
            continue
        try:
            values[setting.name] = setting.parse(given[setting.name].text)
        except (ValueError, KeyError):
            text = "(hidden)" if setting.kind == "secret" else repr(given[setting.name].text)
            asked = setting.flag if given[setting.name].origin == "flag" else setting.variable
            problems.append(f"{asked} is {text}; it must be {setting.legal()}")
    if problems:
        raise ConfigError(problems)
    return Config(**values)


def origins(environ: Mapping[str, str], overrides: Mapping[str, object] | None = None) -> dict[str, Origin]:
    """Where each setting's value came from, by name."""
    given = _given(environ, overrides or {})
    return {s.name: given[s.name].origin if s.name in given else "default" for s in SETTINGS}


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """A warning for each variable that carries our prefix and means nothing to us: most are typos."""
    known = {setting.variable for setting in SETTINGS} | _NOT_SETTINGS
    strange = sorted(name for name in environ if name.startswith(PREFIX) and name not in known)
    return [f"{name} is not a setting and has no effect{_nearest(name)}" for name in strange]


def _nearest(name: str) -> str:
    names = [s.variable if name.startswith(PREFIX) else s.name for s in SETTINGS]
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else "; `streams config` lists them all"
