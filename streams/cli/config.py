"""`streams config`: every setting, its value here and where that came from; also the reference page."""

from __future__ import annotations

import os
from typing import Any

import click

from streams.cli import output
from streams.config import SETTINGS, ConfigError, load, origins, unknown_variables


def settings_page() -> str:
    """`docs/reference/settings.md`, whole."""
    lines = [
        "# Settings",
        "",
        "<!-- Written by `make docs` from streams/config.py. Do not edit. -->",
        "",
        "Each setting is an environment variable and a flag of `streams serve`; the flag wins.",
        "`streams config` shows what is in force. A bad value stops the start and says which; a variable",
        "that starts with `STREAMS_` and is not listed here is warned about. An empty value counts as none.",
        "",
        "Sizes are bytes, or carry a unit: `64KiB`, `1.5MiB`, `1GB`. Times are milliseconds, or carry one:",
        "`250ms`, `5s`.",
        "",
        "| variable | flag | default | legal | meaning |",
        "|---|---|---|---|---|",
    ]
    for setting in SETTINGS:
        cells = (
            f"`{setting.variable}`",
            f"`{setting.flag}`",
            f"`{setting.shown_default()}`",
            setting.legal(),
            setting.help,
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


@click.command("config")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.option("--markdown", is_flag=True, help="Print the reference page of all settings instead.")
def command(as_json: bool, markdown: bool) -> None:
    """List every setting, its value, and where that is from."""
    if markdown:
        click.echo(settings_page(), nl=False)
        return
    try:
        config, where = load(os.environ), origins(os.environ)
    except ConfigError as error:
        raise output.Refusal(str(error)) from error
    for warning in unknown_variables(os.environ):
        output.warn(warning)
    rows: list[dict[str, Any]] = [
        {
            "name": setting.name,
            "variable": setting.variable,
            "value": setting.show(getattr(config, setting.name)),
            "default": setting.shown_default(),
            "from": where[setting.name],
            "help": setting.help,
        }
        for setting in SETTINGS
    ]
    if as_json:
        output.print_json(rows)
    else:
        shown = ("variable", "value", "default", "from", "help")
        output.print_table(shown, [[row[column] for column in shown] for row in rows])
