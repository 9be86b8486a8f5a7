# Written by `make twin` from ../_async/__init__.py. Do not edit.
"""The client, for plain code and threads.

client       a server: boxes, queues, routers, status
box, queue   one box; one queue
schedules    records that the server appends when they are due
producer     many records, in batches, in the background
reader       pages in, records out, with a cursor that is kept
watch        boxes as the server pushes them
worker       claims jobs and runs a handler
snapshots    begins with a saved state, then goes live
"""
