"""Hypercorn and Quart, for all that the edge does not speak: HTTP/2, WebSockets, upgrades.

server         serves single connections, with Hypercorn's settings
connection     one connection
adjustments    what is changed of Hypercorn, h2 and wsproto that has no setting
exchanges      the input of each exchange
h2_data        DATA of HTTP/2 in bulk
socket_stream  the socket, with a write deadline
app            the Quart app that calls the handler; incoming is a body that it uses as it arrives
"""
