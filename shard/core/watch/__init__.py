"""Readers that stay: pages of a box for a subscription, and sessions.

watch_pages     the next page from a cursor on, for `Follow`
sessions        where watchers are, kept in memory for the gateways

The commands are handled in `boxes/handlers.py` (`_follow`, `_session`). A `Follow` that finds nothing waits
in `engine/waiting_reads.py`.
"""
