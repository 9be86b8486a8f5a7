"""Transactions: rows held until their commit, and commits that are rendered in steps."""
