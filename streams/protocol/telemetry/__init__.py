"""Reports of the processes of a server about themselves, and how they measure.

reports     the content of metrics and of the status
histogram   measured times in fixed buckets
pressure    how hard a process is pressed, and what follows from it
top_rows    the largest of many rows
"""
