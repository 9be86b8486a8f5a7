"""The limits that a request passes in a gateway, in this order.

limit_table                                every limit of a server, those of its shards too
descriptors, connection_table, close_counters   how many connections, and which are closed for new ones
frame_budget, slice_lane                   how many HTTP/2 and WebSocket frames
request_scheduler, fair_queue, waiter      whose request is served next
memory                                     bodies, and answers that are not taken yet
limits                                     what one key may have at a time
append_limiter                             appends and large pages in flight to a shard
"""
