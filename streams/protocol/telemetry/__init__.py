"""What the processes of a server report of themselves, and how they measure it.

reports     the content of metrics and of the status
histogram   measured times in fixed buckets
pressure    how hard a process is pressed, and what follows from it
top_rows    the largest of many rows
"""
