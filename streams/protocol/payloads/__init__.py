"""Bodies of messages: how records and columns are laid out as bytes.

appends    the JSON of an append, as columns
packed     columns of many boxes in one message
scans      stored records as buffers
"""
