"""How workers are started, found again and ended: local processes, and Ray."""
