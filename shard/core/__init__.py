"""The pure state machine of a shard: no clock, no file, no socket, no randomness.

kernel        dispatch of commands and changes; begins with the theory of operation
context       what a feature may use: boxes, the log, replies, timers, limits
machine       all features together: start and stop, ticks, recovery, snapshots
changes       the closed list of facts that the log can hold; transaction_changes has those of transactions
queue_changes, schedule_changes    the parts of it for queues and schedules
snapshot_facts  what the changes add up to, as a snapshot has it
features      the interfaces through which features call one another
outcome       the result of a command
durability    when a reply may go, when a record may be seen
capture       a snapshot in small steps
clock         time that never goes back

boxes/  queues/  routers/  transactions/  s2/  objects/  watch/  limits/  schedules/      the features

A command enters at `Machine.handle`, which is `Kernel.handle`. The kernel finds the handler by the command's
type: features register handlers with `on_command`, and appliers of changes with `on_change`. The table of
each folder names the files that do.
"""
