"""`streams serve`: run a server in the foreground. Every setting is a flag."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

import click

from streams import __version__
from streams.cli import output
from streams.cli.verbs import example
from streams.config import SETTINGS, ConfigError, Setting, load, origins, unknown_variables

if TYPE_CHECKING:
    from gateway.supervise.supervisor import Supervisor


def _option(setting: Setting) -> click.Option:
    text = f"{setting.help} [{setting.variable}; default: {setting.shown_default()}]"
    if setting.kind == "flag":
        spelling = f"{setting.flag}/--no-{setting.name.replace('_', '-')}"
        return click.Option([spelling, setting.name], default=None, help=text)
    metavar = "|".join(setting.choices) if setting.choices else setting.kind.upper()
    return click.Option([setting.flag, setting.name], metavar=metavar, help=text)


def _banner(supervisor: Supervisor) -> None:
    """Print the address and data directory at start; with JSON logs, write them as a log line."""
    import structlog

    config = supervisor.config
    facts: dict[str, object] = {
        "url": supervisor.url,
        "console": f"{supervisor.url}/console",
        "docs": f"{supervisor.url}/docs",
        "data_dir": str(config.data_dir),
        "shards": config.shards,
        "version": __version__,
        "pid": os.getpid(),
    }
    if config.log_format == "json":
        structlog.get_logger().info("server is starting", **facts)
        return
    click.echo(
        f"\n  streams {facts['version']}   {facts['url']}\n\n"
        f"    console {facts['console']}\n"
        f"    docs    {facts['docs']}\n"
        f"    data    {facts['data_dir']}\n"
        f"    shards  {facts['shards']}\n"
        f"    pid     {facts['pid']}   (Ctrl-C stops it)\n",
        err=True,
    )


def _serve(as_json: bool, **flags: str | bool | None) -> None:
    if as_json:
        flags["log_format"] = "json"
    try:
        config = load(os.environ, flags)
    except ConfigError as error:
        raise output.Refusal(str(error)) from error
    for warning in unknown_variables(os.environ):
        output.warn(warning)

    import trio

    from gateway.supervise.data_dir import CannotServe
    from gateway.supervise.supervisor import Supervisor
    from streams import logs

    logs.setup(config.log, config.log_format, process="supervisor")
    try:
        where = {name: each for name, each in origins(os.environ, flags).items() if each != "default"}
        trio.run(partial(Supervisor(config, origins=where).run, announce=_banner))
    except (ConfigError, CannotServe) as error:
        raise output.Refusal(str(error)) from error


command = example("streams serve", "streams serve --port 5000 --shards 2 --data-dir ./data")(
    click.Command(
        "serve",
        callback=_serve,
        params=[
            *map(_option, SETTINGS),
            click.Option(["--json", "as_json"], is_flag=True, help="Short for --log-format json."),
        ],
        help="Run a server in the foreground until SIGTERM or Ctrl-C.",
    )
)
