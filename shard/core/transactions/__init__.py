"""Transactions: rows held until their commit, and commits that are rendered in steps.

handlers        commands enter here: put, abort, list; what expires
commit_handlers the commit, planned in full and logged as one change
writers         who may use a writer: its key, its query, its attempt
permissions     which callers may see or end a transaction of another key
state           held rows, commits that are not rendered, the mark of each writer; appliers of their changes
validation      whether the rows that a change needs are held, before anything is changed
epochs          one open transaction: its parcels, and what their rows add up to
chunks          one message of held rows: where the log has it, and what a commit must know
commits         a commit that is decided, rendered in steps
unrendered      rows of a commit in a box before they are rendered

The steps are run by `recovery/commit_renderer.py`, as a task of the running engine.
"""
