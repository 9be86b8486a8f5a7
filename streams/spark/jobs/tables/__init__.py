"""Open table formats: the files of a job become a snapshot of an Iceberg table.

    columns.py      typed columns of a table: inferred from a sample, pinned, extended
    versions.py     properties of a snapshot that describe its boxes; the interface of a format
    catalog.py      the pointer to the newest metadata of an Iceberg table, in a box
    iceberg.py      snapshots of an Iceberg table (pyiceberg)
    delta.py        snapshots of a Delta table (delta-rs)

Spark writes the Parquet files. A library in the driver's process adds them to the table in one commit
(docs/decisions/0012). The commit contains the last seq of each box, so files and progress cannot differ.
"""
