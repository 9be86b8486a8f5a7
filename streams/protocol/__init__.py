"""The protocol of clients, gateways and shards. Pure. Each folder imports only those below it.

messages     commands and replies: what they say, how a request is read, how a reply is written
telemetry    reports of processes about themselves, and how they measure
wire         messages on a connection: header, head, body; the number of each op
payloads     bodies of messages: the JSON of an append, packed columns, scans
access       keys, what they allow, and their limits
model        names, boxes, records and batches
errors       every error, by what the client does about it

Bytes become a command in `messages/requests.py` (`decode_command`), which a shard calls for each message. A
reply becomes bytes there too (`encode_reply`).
"""
