"""What the processes of a server report of themselves (`reports`), and how they measure it."""
