"""Lets Spark find the format `streams` without registration.

It is installed as the top-level module `pyspark_streams`. When Spark meets an unknown format, it imports
every module called pyspark_* and takes its `DefaultSource`. The import must not raise: an error would disable
every other Python data source of the environment.
"""

try:
    from streams.spark.source import StreamsDataSource as DefaultSource
except ImportError:  # the package without its extra `spark`
    pass
else:
    __all__ = ["DefaultSource"]
