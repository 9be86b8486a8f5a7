"""Attacks on a server, well-behaved clients beside them, and a report of what the clients noticed.

`attacks.py` is one attack in a process of its own. `clients.py` is the well-behaved load. `run.py` starts
both and reads the server's processes meanwhile. `python -m loadtests.abuse` (`make abuse`) prints the report;
`tests/abuse` runs a short version and checks counts only.
"""
