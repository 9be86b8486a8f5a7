"""Metrics, status and checks of a server.

collector       gathers the reports of all processes
report_server   serves the report of this gateway to the other gateways
history         the last 15 minutes by the second
server_reports  the reports of all processes at one moment
metrics         every metric, by subject
exposition      renders the metrics as Prometheus text or JSON
status          the state of the server as one object
checks          problems of the server, and what to do about each
"""
