"""What a server says about itself: metrics, status, checks.

collector       gathers the reports of all processes; peers asks the other gateways
server_reports  the reports of all processes at one moment
metrics         every metric, by subject; exposition is how they are sent
status          the state of the server as one object
checks          what is wrong, and what to do about it
"""
