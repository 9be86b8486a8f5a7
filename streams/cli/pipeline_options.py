"""Options that the jobs of `streams pipeline` share."""

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
class SparkOptions:
    """The Spark that runs a job, and its settings."""

    master: str | None
    remote: str | None
    cores: int | None
    conf: tuple[str, ...]
    packages: tuple[str, ...]

    def settings(self) -> dict[str, str]:
        settings = dict(each.split("=", 1) for each in self.conf if "=" in each)
        if len(settings) != len(self.conf):
            raise output.Refusal("--conf needs NAME=VALUE, for example --conf spark.executor.memory=4g")
        if self.packages:
            if self.remote is not None:
                raise output.Refusal(
                    "--packages cannot be used with --remote; install the packages on the Spark Connect "
                    "server"
                )
            packages = [settings["spark.jars.packages"]] if "spark.jars.packages" in settings else []
            settings["spark.jars.packages"] = ",".join([*packages, *self.packages])
        return settings


def spark_options(function: F) -> F:
    """Add the Spark options to a job and pass them as one argument `engine`."""
    options = (
        click.option("--master", metavar="URL", help="Spark cluster: spark://…, yarn, k8s://…, local[4]."),
        click.option("--remote", metavar="URL", help="Spark Connect server: sc://host."),
        click.option("--cores", type=click.IntRange(1), help="Number of local cores to use (default: all)."),
        click.option("--conf", multiple=True, metavar="NAME=VALUE", help="Spark setting; repeatable."),
        click.option(
            "--packages",
            multiple=True,
            metavar="GROUP:NAME:VERSION",
            help="Package for Spark to load, for example org.apache.hadoop:hadoop-aws:3.5.0 for s3a://.",
        ),
    )

    @wraps(function)
    def with_engine(
        *args: Any,
        master: str | None,
        remote: str | None,
        cores: int | None,
        conf: tuple[str, ...],
        packages: tuple[str, ...],
        **more: Any,
    ) -> Any:
        return function(*args, engine=SparkOptions(master, remote, cores, conf, packages), **more)

    command: Any = with_engine
    for option in reversed(options):
        command = option(command)
    return cast(F, command)


class BoxSelection(NamedTuple):
    """The boxes of a job: a list of names, or a name prefix."""

    names: tuple[str, ...]
    prefix: str | None


def boxes_option(function: F) -> F:
    """Add BOXES and `--prefix` to a job and pass them as one argument `boxes`."""

    @wraps(function)
    def with_boxes(*args: Any, boxes: tuple[str, ...], prefix: str | None, **more: Any) -> Any:
        if bool(boxes) == (prefix is not None):
            raise output.Refusal("name the boxes, either as BOXES or with --prefix, not both")
        return function(*args, boxes=BoxSelection(boxes, prefix), **more)

    command: Any = click.option(
        "--prefix", metavar="TEXT", help="Use all boxes whose names start with TEXT, instead of BOXES."
    )(with_boxes)
    return cast(F, click.argument("boxes", nargs=-1)(command))


dry_run_option = click.option("--dry-run", is_flag=True, help="Show what the job would do; change nothing.")
name_option = click.option(
    "--name", required=True, help="Name of the job; a later run with this name resumes it."
)
gaps_option = click.option(
    "--skip-gaps", is_flag=True, help="Continue when records are lost; without it, the job fails."
)


def folder_path(text: str) -> str:
    """Return an absolute path: the JVM may have another working directory. A URL stays as it is."""
    return text if "://" in text else os.path.abspath(text)


def parse_sums(sums: tuple[str, ...]) -> dict[str, str]:
    """Parse aggregates such as `orders=count(*)`."""
    aggregates = dict(each.split("=", 1) for each in sums if "=" in each)
    if len(aggregates) != len(sums):
        raise output.Refusal("--sum needs NAME=SQL, each name once, for example --sum orders='count(*)'")
    return aggregates


def moment(text: str | None, option: str) -> int | None:
    """Parse a time into milliseconds since 1970."""
    from streams.spark.option_table import parse_time_ms

    try:
        return None if text is None else parse_time_ms(text)
    except ValueError as error:
        raise output.Refusal(f"{option}: {text!r} {error}") from None
