"""The sockets of a shard: links of gateways and direct peers, what they may send, what they are told.

server        accepts connections, decodes messages, sends answers
peers         who may talk to a shard directly, and what each may do
answers       the memory of answers that are not sent yet
pressure      how hard the shard is pressed
reporting     what a shard tells of itself
heartbeat     tells the supervisor that the shard moves
"""
