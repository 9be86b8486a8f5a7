"""The supervisor of a server: its data directory, its keys, and its processes.

supervisor         starts, watches and drains the processes
child              one child: its process, restarts and heartbeats
child_reports      the lines that a child sends to the supervisor
listening_sockets  the listening sockets
data_dir           locks the data directory and manages the folders of its shards
manifest           which shard has which slots, and in which folder it is
run_dir            sockets and status files of a running server
resharding         changes the number of shards, before anything serves
cold_claim         claims the cold store for this server
key_file           reads the keys and passes their digests to the children
backup_note        the time of the last backup
"""
