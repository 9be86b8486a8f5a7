"""Jobs over boxes: each a function here and a verb of `streams pipeline`.

    archive    boxes -> Parquet, then optionally trim; `read_all` reads both as one, `export_all` -> files;
               `compact` merges its small files, `vacuum` deletes obsolete files
    archive_table   boxes -> an Iceberg table; `read_table` reads both as one
    rollup_table    windows of a table -> a box
    backfill   files -> boxes
    replay     boxes -> boxes, with a filter or a transformation
    rollup     windows of a box -> a box
    snapshot   the newest record of each key, then trim; `read_snapshot` and follow
    audit      check that no record is missing or duplicated

    archive_files, archive_upkeep, files    files of an archive; their upkeep; files of any store
    table_archive, table_merge, table_rollup    all records, or the newest of each tag; windows
    table_files, tables                     data files of a table; table formats
    pipeline                                several jobs in order, from a file
    job_context, steps                      server, frames and ledger of a job; its steps
    spark_errors                            our errors out of Spark's

Each job resumes where it stopped, and writes each record once even if it runs again: it records its plans in
a box (its *ledger*), and writes rows in transactions named after the job.
"""

from streams.spark.jobs.archive import Archive, Export, archive, export_all, read_all
from streams.spark.jobs.archive_upkeep import Compaction, Vacuum, compact, vacuum
from streams.spark.jobs.audit import Audit, audit
from streams.spark.jobs.backfill import Backfill, backfill
from streams.spark.jobs.replay import Replay, replay
from streams.spark.jobs.rollup import Rollup, rollup
from streams.spark.jobs.snapshot import Snapshot, read_snapshot, snapshot
from streams.spark.jobs.table_archive import TableArchive, archive_table, read_table, table_versions
from streams.spark.jobs.table_rollup import TableRollup, rollup_table

__all__ = [
    "Archive",
    "Audit",
    "Backfill",
    "Compaction",
    "Export",
    "Replay",
    "Rollup",
    "Snapshot",
    "TableArchive",
    "TableRollup",
    "Vacuum",
    "archive",
    "archive_table",
    "audit",
    "backfill",
    "compact",
    "export_all",
    "read_all",
    "read_snapshot",
    "read_table",
    "replay",
    "rollup",
    "rollup_table",
    "snapshot",
    "table_versions",
    "vacuum",
]
