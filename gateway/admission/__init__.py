"""The limits that a request passes in a gateway, in this order.

limit_table                                every limit of a server, including those of its shards
descriptors, connection_table              how many connections, and which one is closed for a new one
close_counters                             counts and logs the connections that an HTTP server closes
frame_budget                               how many HTTP/2 and WebSocket frames a connection may send
slice_lane                                 one slice of many frames is parsed in each turn of the event loop
request_scheduler, fair_queue, waiter      whose request is served next
inline                                     runs a request without a task while it waits only for its shard
memory                                     bodies, and answers that clients have not read yet
limits                                     open streams and requests in flight of one key
append_limiter                             appends and large pages in flight to a shard
"""
