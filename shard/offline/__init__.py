"""Tools for folders that no shard serves: restore, repair, verify, inspect, reshard."""
