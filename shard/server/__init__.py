"""Serves the sockets of a shard: links of gateways and direct peers, their requests and their replies.

server            accepts connections, and divides the memory for answers among them
connection        reads the messages of one connection and hands them to the engine
tickets           one for each command: encodes its reply and sends it
outgoing_replies  the unsent replies of one connection
deferred_pages    requests for pages that wait for memory
job_holders       the work streams of one connection, to which jobs are leased
peers             clients over TCP, and the access of each
answer_pool       bounds the memory of unsent answers
answer_times      histograms from request to answer; recent_times has those of the last seconds
pressure          measures the pressure of the shard
reporting         collects the metrics of a shard
heartbeat         proves to the supervisor that the shard makes progress
"""
