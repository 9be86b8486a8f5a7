"""The sockets of a shard: links of gateways and direct peers, what they may send, and the replies they get.

server          accepts connections, and shares the room for answers among them
connection      reads messages of one connection and hands them to the engine
tickets         where the reply to a command goes
replies         the replies of one connection that are not sent yet
deferred_pages  requests for pages that wait for room
job_holders     streams of one connection that jobs are leased to
peers           the clients over TCP, and what each may do
answer_pool     the memory of answers that are not sent yet
answer_times    from a request to its answer; recent_times of the last seconds
pressure        how hard the shard is pressed
reporting       the metrics of a shard
heartbeat       shows the supervisor that the shard moves
"""
