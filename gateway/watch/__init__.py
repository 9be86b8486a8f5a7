"""Watching boxes: many readers of one append (v0 §7).

cursors       the text of a cursor over many boxes          pure
plan          the options of a watch request, checked       pure
page          one page of a shard, encoded once             pure
merge         one stream's place in each of its boxes       pure
service       opens streams and sessions, for the handlers; shared by all streams of a gateway
feeds         one live read for each box and encoding, shared by all its watchers
subscription  one watcher: backlog, then live, heartbeats, slow readers
sessions      streams that a client can resume; the shards store them

Requests come in through `gateway/api/watch.py` (server-sent events) and `gateway/api/websockets.py`.
In the shard, `shard/core/watch/watch_pages.py` builds the pages; reads wait in
`shard/engine/waiting_reads.py`.
"""
