"""Builds a `Config` from an environment and flags, or raises one `ConfigError` that names every bad value.

A flag overrides the environment; the environment overrides the default. An empty value counts as not set.
Nothing here reads the process environment, a file or the clock: the caller passes them in.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from streams.config.child_args import CHILD_CONFIG_VARIABLE, READY_FD_VARIABLE
from streams.config.setting import PREFIX, ConfigError
from streams.config.table import SETTINGS, Config

#: Variables of the command line: the server that it talks to.
CLIENT_VARIABLES: Final = ("STREAMS_URL", "STREAMS_KEY", "STREAMS_CONTEXT")
_NOT_SETTINGS: Final = frozenset(
    {CHILD_CONFIG_VARIABLE, READY_FD_VARIABLE, "STREAMS_SWEEP", *CLIENT_VARIABLES}
)

Origin = Literal["default", "environment", "flag"]


@dataclass(frozen=True, slots=True)
class RawSetting:
    """The text of one setting before parsing, and its origin."""

    text: str
    origin: Origin


def _collect(environ: Mapping[str, str], overrides: Mapping[str, object]) -> dict[str, RawSetting]:
    """Collect the settings that are set, by name. A flag overrides the variable."""
    unknown_names = overrides.keys() - {setting.name for setting in SETTINGS}
    if unknown_names:
        raise ConfigError(f"{name!r} is not a setting{_nearest(name)}" for name in sorted(unknown_names))
    settings: dict[str, RawSetting] = {}
    for setting in SETTINGS:
        override = overrides.get(setting.name)
        if override is not None and str(override) != "":
            settings[setting.name] = RawSetting(str(override), "flag")
        elif environ.get(setting.variable, "") != "":
            settings[setting.name] = RawSetting(environ[setting.variable], "environment")
    _split_host(settings)
    return settings


def _split_host(settings: dict[str, RawSetting]) -> None:
    """Move a port inside the host setting to the port setting, with the same origin. Strip the brackets of
    `[::1]`."""
    host = settings.get("host")
    if host is None:
        return
    match = re.fullmatch(r"\[([^\]]*)\](?::(.*))?", host.text)
    if match is not None:
        name, port = match[1], match[2]
    elif host.text.count(":") == 1:
        name, port = host.text.split(":")
    else:
        return
    settings["host"] = RawSetting(name or "127.0.0.1", host.origin)
    if port is None:
        return
    rival = settings.get("port")
    if rival is not None and rival.origin == host.origin and rival.text != port:
        raise ConfigError(
            [
                f"STREAMS_HOST={host.text} and STREAMS_PORT={rival.text} name different ports; set the port "
                "once"
            ]
        )
    if rival is None or rival.origin == "environment":
        settings["port"] = RawSetting(port, host.origin)


def load(environ: Mapping[str, str], overrides: Mapping[str, object] | None = None) -> Config:
    """Return the settings of a server, or raise a `ConfigError` that names every bad value."""
    settings = _collect(environ, overrides or {})
    values: dict[str, Any] = {}
    problems: list[str] = []
    for setting in SETTINGS:
        if setting.name not in settings:
            continue
        try:
            values[setting.name] = setting.parse(settings[setting.name].text)
        except (ValueError, KeyError):
            text = "(hidden)" if setting.kind == "secret" else repr(settings[setting.name].text)
            source = setting.flag if settings[setting.name].origin == "flag" else setting.variable
            problems.append(f"{source} is {text}; it must be {setting.legal()}")
    if problems:
        raise ConfigError(problems)
    return Config(**values)


def origins(environ: Mapping[str, str], overrides: Mapping[str, object] | None = None) -> dict[str, Origin]:
    """Return the origin of each setting's value, by name."""
    settings = _collect(environ, overrides or {})
    return {s.name: settings[s.name].origin if s.name in settings else "default" for s in SETTINGS}


def describe(config: Config, where: Mapping[str, str]) -> list[dict[str, str]]:
    """Return every setting with its value, its default and the origin of its value. Secrets are hidden."""
    return [
        {
            "name": setting.name,
            "variable": setting.variable,
            "value": setting.show(getattr(config, setting.name)),
            "default": setting.shown_default(),
            "from": where.get(setting.name, "default"),
            "help": setting.help,
        }
        for setting in SETTINGS
    ]


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """Return a warning for each variable with our prefix that is not a setting; most are typos."""
    variables = {setting.variable for setting in SETTINGS} | _NOT_SETTINGS
    unknown_names = sorted(name for name in environ if name.startswith(PREFIX) and name not in variables)
    return [f"{name} is not a setting and has no effect{_nearest(name)}" for name in unknown_names]


def _nearest(name: str) -> str:
    names = [s.variable if name.startswith(PREFIX) else s.name for s in SETTINGS]
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else "; `streams config` lists them all"
