"""Boxes: their records, positions, retention, groups and upkeep.

Commands enter in four files:

handlers        create, configure, delete a box; append, read, follow, delete records; fence; sessions
listing         lists of boxes, by name or sorted by a number (`box_ordering.py`)
group_handlers  cursors that a box keeps for its readers (`groups.py`)
scanning        reads of bulk clients: scans, states of many boxes, positions of times

A change of a box is applied in `appliers.py`, which calls the box itself:

validation      whether a change of a box can be applied, before anything is changed
appliers        changes of boxes; what they mean for the whole shard
box             one box: config, caps, TTL, idempotency keys, fence, reads
box_positions, holes  its positions: which seqs exist, are live, are visible; which were lost
box_log         changes them
live_runs       walks live records within the limits of a reader
pages           pages of reads and scans
volatile        hints and work under way of a box, lost with the process
idempotency_keys  keys of appends, oldest first
tail, sealed    batches in memory whole; batches whose payload is in a segment
tags, deletion  which records have a tag; a delete by tag, in steps
sized_seqs      seqs of sealed records with their sizes

Beside them:

key_expiry      when idempotency keys lapse
unsealed        boxes with unsealed batches, and which to seal first
upkeep          plans of background work: seal, keep, rewrite, move, compact
priority        whose readers are served first under pressure
box_statistics  counts for metrics, a few boxes at a time
box_rates       records appended a second, by box
offline_edits   what repair and restore do to a log that nobody serves
"""
