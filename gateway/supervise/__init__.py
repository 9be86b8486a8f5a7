"""The supervisor of a server: its data directory, its keys, and its processes.

supervisor    starts the processes, looks after them, and drains them
child         one process: its lives, its restarts, its silence; reports are its lines
listeners     the listening sockets
data_dir      who may use the data directory, and which folders of it are shards; manifest says which
run_dir       sockets and status files of a server that runs
resharding    another number of shards, before anything serves
cold_claim    the cold store belongs to one server
key_file      the keys, read here alone
backup_note   when the last backup was
"""
