"""Commands and replies: their fields, how a request is decoded, how a reply is encoded.

commands, queues, routers, schedules, forwards, s2, bulk    the commands of each feature, and their replies
requests, query                                  bytes to commands and replies to bytes
queue_requests, s2_requests, bulk_requests       bytes to commands of queues, of S2 and of bulk clients
schedule_requests, session_requests              bytes to commands of schedules and of watch sessions
list_requests                                    bytes to commands that list boxes
op_access                                        the scopes that each op needs
bodies, replies, server_replies, watch_events    JSON of `/v0`: one struct for each body, reply and event
"""
