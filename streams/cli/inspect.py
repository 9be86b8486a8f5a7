"""`streams inspect`: what stands in the files of a data directory, for whoever must look under the hood."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import click

from streams.cli import output
from streams.cli.backup import configured
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
@click.option("--records", is_flag=True, help="The records of a segment, one a line.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def command(path: Path | None, records: bool, as_json: bool) -> int:
    """List the files in PATH, a folder (default: the data directory), or what stands in PATH, a file.

    Of a log it shows each change, of a segment or a stub each batch, of a snapshot each box. It only reads,
    running servers do not mind, and it goes on behind what is damaged. Exits with 6 if something is.
    """
    path = path if path is not None else configured().data_dir
    if path.is_dir():
        if not output.show_rows(_OF_FOLDER, _files(path), as_json=as_json):
            raise output.Nothing(f"{path} holds no file of a server")
        return output.EXIT_DONE
    if not path.exists():
        raise output.Refusal(f"{path} is not there; name a file or a folder of a data directory")
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
    from shard.offline.inspect import NotOurs, inspect
    from shard.storage.files import Disk

    if records and path.suffix != ".seg":
        raise output.Refusal(f"--records is for segments (.seg), and {path.name} is none")
    damaged = False

    def rows() -> Iterator[dict[str, Any]]:
        nonlocal damaged
        for row in inspect(Disk(), str(path.absolute()), records=records):
            damaged = damaged or "problem" in row
            yield row

    try:
        if records:
            for row in rows():
                output.print_line(row.get("record", row))
        elif not output.show_rows(_COLUMNS.get(path.suffix, ()), rows(), as_json=as_json):
            raise output.Nothing(f"{path} is empty")
    except NotOurs as error:
        raise output.Refusal(str(error)) from error
    return output.EXIT_DAMAGED if damaged else output.EXIT_DONE
