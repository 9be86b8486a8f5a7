"""Brokers for task frameworks: their tasks are jobs of queues here.

    kombu     the transport `streams://` for Celery and everything else that uses Kombu
    dramatiq  a broker for Dramatiq
    taskiq    a broker for Taskiq

    connections    options that all of them share, and the names of their boxes
    task_messages  bytes of a framework as the data of a record, and back
    held_jobs      the jobs of one consumer: claims, leases, acks in batches
    job_readers    threads that wait for jobs and broadcasts, and the inbox they fill
    kombu_channel  a channel of the transport: queues, exchanges, acks
    bindings       the table of exchanges and queues that all processes share

Each plug-in needs its framework, which is an extra of this distribution: `pip install
'streams-server[celery]'`. Importing `streams` imports none of them. They use the client and nothing else of
ours.
"""
