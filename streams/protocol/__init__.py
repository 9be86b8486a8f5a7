"""What a client, a gateway and a shard agree on. Pure. Each folder imports only those below it.

messages     commands and replies: what they say, how a request is read, how a reply is written
telemetry    what processes report of themselves, and how they measure it
wire         bytes between processes: framing, packed columns, scans, the JSON of an append
access       keys, what they allow, and their limits
model        names, boxes, records and batches
errors       every error, by what the client does about it

Bytes become a command in `messages/requests.py` (`decode_command`), which a shard calls for each message. A
reply becomes bytes there too (`encode_reply`).
"""
