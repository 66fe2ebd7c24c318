"""Worker processes: the port, the code that runs inside one, and the two ways to start one."""
