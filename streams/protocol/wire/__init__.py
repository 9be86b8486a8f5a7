"""Bytes between processes.

framing    messages on a connection: header, head, body; the number of each op
appends    the JSON of an append, as columns
packed     columns of many boxes in one message
scans      stored records as buffers
"""
