"""The S2 API: streams, basins and access tokens.

streams         commands of streams enter here: append, read, put, patch, list, delete
stream          what a stream keeps beside its box: spec, times of appends, trims
basins          the register of basins, on shard 0, and their commands
tokens          the register of access tokens, on shard 0, and their commands

A stream is a box: its log, visibility, sealing and recovery are in `boxes/`.
"""
