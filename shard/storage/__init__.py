"""Bytes on disk: files, frames, the write-ahead log, snapshots. Knows positions, never a policy."""
