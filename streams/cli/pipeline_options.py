"""Options that the jobs of `streams pipeline` share, and how they are read."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, NamedTuple, TypeVar, cast

import click

from streams.cli import output

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Engine:
    """Which Spark does the work, and how it is set."""

    master: str | None
    remote: str | None
    cores: int | None
    conf: tuple[str, ...]
    packages: tuple[str, ...]

    def settings(self) -> dict[str, str]:
        found = dict(each.split("=", 1) for each in self.conf if "=" in each)
        if len(found) != len(self.conf):
            raise output.Refusal("--conf needs a name and a value: --conf spark.executor.memory=4g")
        if self.packages:
            if self.remote is not None:
                raise output.Refusal("--packages goes without --remote: packages are those of the server")
            known = [found["spark.jars.packages"]] if "spark.jars.packages" in found else []
            found["spark.jars.packages"] = ",".join([*known, *self.packages])
        return found


def spark_options(function: F) -> F:
    """Options that every job has, as one argument `engine`."""
    options = (
        click.option("--master", metavar="URL", help="Spark cluster: spark://…, yarn, k8s://…, local[4]."),
        click.option("--remote", metavar="URL", help="Spark Connect server: sc://host."),
        click.option(
            "--cores", type=click.IntRange(1), help="Cores of this machine to use; all, if not said."
        ),
        click.option("--conf", multiple=True, metavar="NAME=VALUE", help="Setting of Spark."),
        click.option(
            "--packages",
            multiple=True,
            metavar="GROUP:NAME:VERSION",
            help="Package that Spark loads, for example org.apache.hadoop:hadoop-aws:3.5.0 for s3a://.",
        ),
    )

    @wraps(function)
    def gathered(
        *args: Any,
        master: str | None,
        remote: str | None,
        cores: int | None,
        conf: tuple[str, ...],
        packages: tuple[str, ...],
        **more: Any,
    ) -> Any:
        return function(*args, engine=Engine(master, remote, cores, conf, packages), **more)

    found: Any = gathered
    for option in reversed(options):
        found = option(found)
    return cast(F, found)


class Boxes(NamedTuple):
    """The boxes of a job: their names, or a prefix of them."""

    names: tuple[str, ...]
    prefix: str | None


def boxes_option(function: F) -> F:
    """BOXES or a prefix of their names, as one argument `boxes`."""

    @wraps(function)
    def checked(*args: Any, boxes: tuple[str, ...], prefix: str | None, **more: Any) -> Any:
        if bool(boxes) == (prefix is not None):
            raise output.Refusal("give BOXES or --prefix, one of them")
        return function(*args, boxes=Boxes(boxes, prefix), **more)

    found: Any = click.option(
        "--prefix", metavar="TEXT", help="Instead of BOXES: all whose names start with this."
    )(checked)
    return cast(F, click.argument("boxes", nargs=-1)(found))


dry_run_option = click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
name_option = click.option("--name", required=True, help="Of the job; under it, a later run goes on.")
gaps_option = click.option(
    "--skip-gaps", is_flag=True, help="Go on when records are lost; without it, the job refuses."
)


def folder_path(text: str) -> str:
    """From this folder, as a person means it: the JVM may stand in another one."""
    return text if "://" in text else os.path.abspath(text)


def moment(text: str | None, option: str) -> int | None:
    """Milliseconds since 1970, of a time that a person wrote."""
    from streams.spark.option_table import moment_ms

    try:
        return None if text is None else moment_ms(text)
    except ValueError as error:
        raise output.Refusal(f"{option}: {text!r} {error}") from None
