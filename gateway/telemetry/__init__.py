"""What a server says about itself: metrics, status, checks.

collector     gathers the reports of all processes; peers asks the other gateways
metrics       every metric, as one table; exposition is how they are sent
status        the state of the server as one object
checks        what is wrong, and what to do about it
"""
