"""Serves HTTP/2, WebSockets and upgrades, which the edge does not speak, with Hypercorn and Quart.

server         serves single connections, with Hypercorn's settings
connection     one connection
adjustments    changes to Hypercorn, h2 and wsproto that have no setting
exchanges      the input of each exchange
h2_data        DATA of HTTP/2 in bulk
socket_stream  the socket, with a write deadline
app            the Quart app that calls the handler; incoming is a body that it uses as it arrives
"""
