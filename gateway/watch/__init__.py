"""Watching boxes: many readers of one append (v0 §7).

cursors   the text of a cursor over many boxes          pure
plan      what a watch request may say                  pure
page      one answer of a shard, worded once            pure
merge     one stream's place in each of its boxes       pure
service   what all streams of a gateway share: opens streams and sessions; the handlers call it
feeds     one live read a box and encoding, shared by everyone who watches it
stream    one watcher: backlog, then live, heartbeats, slow readers
sessions  streams that can be found again, kept by the shards

Requests come in through `gateway/api/watch.py` (server-sent events) and `gateway/api/websockets.py`.
In the shard, `shard/core/watch/pages.py` makes the pages and `shard/engine/waiting_reads.py` has reads wait.
"""
