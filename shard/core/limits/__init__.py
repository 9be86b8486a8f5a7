"""Limits of a shard and of keys: what they use and whether they may have more."""
