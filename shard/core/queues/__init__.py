"""Queues: leases, jobs, and the moves of dead letters."""
