"""The pure state machine of a shard: no clock, no file, no socket, no randomness."""
