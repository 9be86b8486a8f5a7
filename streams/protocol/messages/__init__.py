"""Commands and replies: what they say, how a request is read, how a reply is written.

commands, queues, routers, forwards, streams, bulk    the commands of each feature, and their replies
requests, query                                       bytes to commands and replies to bytes
queue_requests, stream_requests, bulk_requests        the same for queues, the S2 API and bulk clients
op_access                                             which scopes each op needs
bodies, replies, server_replies                       JSON of `/v0`: one struct for each body and each reply
"""
