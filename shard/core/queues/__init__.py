"""Queues: leases, jobs, and the moves of dead letters.

jobs            commands enter here: claim, ack, nack, extend, the end of a connection that held jobs
queue           the jobs of one queue: leased, waiting, delayed, on their way out
move_lines      one line of moves: what was planned, what has arrived, and the stamp of a dead letter
record_moves    dead letters to their box and back, over outboxes as routers have; commands of a requeue

A claim that finds nothing waits in `engine/waiting_claims.py`, not here.
"""
