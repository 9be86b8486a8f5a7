"""Queues: leases, jobs, the moves of dead letters, outputs of acked jobs.

jobs            handles the commands: claim, ack, nack, extend, the end of a connection with leased jobs
operations      handles the commands of operators: pause, resume
delivery_rate   how many jobs a queue may deliver now (`rate_per_s`)
job             the entry of one job
job_index       the entries of a queue and the indexes over them
lines           ready jobs with keys and priorities, in the order of claims
backoff         how long a job waits after a failed delivery
new_jobs        the job fields of a write
queue           the jobs of one queue: ready, leased, delayed, moving
planned_outbox  an outbox whose records get their positions in a logged change
move_queue      the moves from one box to another: planned, arrived, and the metadata of a dead letter
output_queue    the outputs of acked jobs on their way to one box, and all of one queue
outputs         acks jobs with outputs
record_moves    moves dead letters to their box and back through outboxes; commands of a requeue

A claim that finds nothing waits in `engine/waiting_claims.py`, not here.
"""
