"""Boxes: their records, positions, retention, groups and upkeep."""
