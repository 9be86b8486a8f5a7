"""Schedules: append a record to a box whenever a cron expression or an interval is due (v0 §22).

cron         parses cron expressions and finds the next local time that matches
due_times    the due times of a schedule as instants, with time zones and daylight saving
schedule     one schedule: its definition, its next due time, and the record that it appends
handlers     the commands and changes of schedules, and the tick that appends due records
"""
