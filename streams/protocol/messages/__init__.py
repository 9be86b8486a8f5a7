"""Commands and replies: what they say, how a request is read, how a reply is written.

commands, queues, routers, forwards, streams, bulk    the commands of each feature, and their replies
requests, *_requests, query                           bytes to commands and replies to bytes
op_access                                             which scopes each op needs
schemas                                               the shapes of `/v0` answers, for OpenAPI
"""
