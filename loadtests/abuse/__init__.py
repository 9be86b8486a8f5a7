"""Attacks a server beside well-behaved clients, and reports how much the clients suffer.

`attacks.py` runs one attack in a separate process. `clients.py` is the well-behaved load. `run.py` starts
both and measures the server's processes meanwhile. `python -m loadtests.abuse` (`make abuse`) prints the
report; `tests/abuse` runs a short version and checks counts only.
"""
