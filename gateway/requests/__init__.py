"""A request and its response, as handlers see them, whichever front they came through.

request, content      a request, its body and its types
errors, s2_errors     from an error to a response of `/v0` or `/v1`
urgency               whether a request is urgent
sse, unread           live answers: their text, and what their clients have not taken yet
queued_sink           where a live answer waits for the task that sends it
"""
