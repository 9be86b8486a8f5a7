"""Rebuilds a shard's state from its files, through `apply` alone.

recovery          builds the machine from the newest snapshot and the log
commit_renderer   renders the rows of commits: of those that the log left incomplete, and of all later ones
page_cache        detects whether the page cache has survived since the previous run
"""
