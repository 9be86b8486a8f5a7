"""What a client, a gateway and a shard agree on: names, records, commands, errors, the wire. Pure."""
