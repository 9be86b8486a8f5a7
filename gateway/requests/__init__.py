"""A request and its response, as handlers see them, independent of the front that received it.

request, content      a request, its body, content types and compression
errors, s2_errors     map an error to a response of `/v0` or `/v1`
urgency               decides whether a request is urgent
sse, unsent_charge    live responses: their text, and the memory of bytes that clients have not read yet
guide_archive         the files of the documentation site
queued_sink           buffers a live response for the task that sends it
"""
