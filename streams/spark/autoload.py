"""Installed as the top-level module `pyspark_streams`: Spark imports every module called pyspark_* when it
meets a format that it does not know, and takes its `DefaultSource`. It never raises: that would take every
other Python data source of the environment away."""

try:
    from streams.spark.source import StreamsDataSource as DefaultSource
except ImportError:  # the package without its extra `spark`
    pass
else:
    __all__ = ["DefaultSource"]
