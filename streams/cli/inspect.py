"""`streams inspect`: show the contents of data files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import click

from streams.cli import output
from streams.cli.backup import load_config
from streams.cli.verbs import example

_COLUMNS: Final = {
    ".wal": ("offset", "lsn", "bytes", "change", "box", "generation", "problem"),
    ".seg": ("offset", "first_seq", "records", "bytes", "first_ts", "last_ts", "problem"),
    ".stub": ("offset", "first_seq", "records", "bytes", "first_ts", "last_ts", "problem"),
    ".snap": ("box", "generation", "durability", "head_seq", "earliest_seq", "records", "bytes", "problem"),
}
_OF_FOLDER: Final = ("path", "kind", "bytes")
_KINDS: Final = {".wal": "log", ".seg": "segment", ".stub": "stub", ".snap": "snapshot", ".json": "manifest"}


@example("streams inspect", "streams inspect --json | head -1")
@click.command("inspect")
@click.argument("path", required=False, type=click.Path(path_type=Path))
@click.option("--records", is_flag=True, help="Print the records of a segment, one per line.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(path: Path | None, records: bool, as_json: bool) -> int:
    """List the files in the folder PATH (default: the data directory), or show the contents of the file PATH.

    Shows each change of a log, each batch of a segment or stub, each box of a snapshot. Only reads, also
    beside a running server, and continues after damage. Exit code 6 if something is damaged.
    """
    path = path if path is not None else load_config().data_dir
    if path.is_dir():
        if not output.show_rows(_OF_FOLDER, _files(path), as_json=as_json):
            raise output.Nothing(f"{path} has no data files of a server")
        return output.EXIT_DONE
    if not path.exists():
        raise output.Refusal(f"{path} does not exist; name a file or folder of a data directory")
    if path.suffix == ".json":
        return _manifest(path, as_json)
    return _show(path, records, as_json)


def _files(folder: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(folder.rglob("*")):
        kind = _KINDS.get(path.suffix)
        if kind is not None and path.is_file():
            yield {"path": str(path), "kind": kind, "bytes": path.stat().st_size}


def _manifest(path: Path, as_json: bool) -> int:
    from gateway.supervise.manifest import Manifest, ManifestDamaged, ManifestUnknown

    try:
        manifest = Manifest.decode(path.read_bytes())
    except (ManifestDamaged, ManifestUnknown) as error:
        output.show_facts({"problem": str(error)}, as_json=as_json)
        return output.EXIT_DAMAGED
    slots = manifest.placement.slots
    facts = {
        "shards": manifest.shards,
        "directories": list(manifest.directories),
        "slots_of_shard": {str(shard): slots.count(shard) for shard in range(manifest.shards)},
    }
    output.show_facts(facts, as_json=as_json)
    return output.EXIT_DONE


def _show(path: Path, records: bool, as_json: bool) -> int:
    from shard.offline.inspect import UnknownFileKind, inspect
    from shard.storage.files import Disk

    if records and path.suffix != ".seg":
        raise output.Refusal(f"--records works only with segments (.seg); {path.name} is not one")
    has_damage = False

    def rows() -> Iterator[dict[str, Any]]:
        nonlocal has_damage
        for row in inspect(Disk(), str(path.absolute()), records=records):
            has_damage = has_damage or "problem" in row
            yield row

    try:
        if records:
            for row in rows():
                output.print_line(row.get("record", row))
        elif not output.show_rows(_COLUMNS.get(path.suffix, ()), rows(), as_json=as_json):
            raise output.Nothing(f"{path} is empty")
    except UnknownFileKind as error:
        raise output.Refusal(str(error)) from error
    return output.EXIT_DAMAGED if has_damage else output.EXIT_DONE
