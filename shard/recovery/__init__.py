"""A shard's state out of its files, through `apply` alone.

recovery          snapshot and log become a machine
commit_renderer   the rows of commits that were not carried out when the log ended, and of all later ones
lives             whether the page cache has survived since the last life
"""
