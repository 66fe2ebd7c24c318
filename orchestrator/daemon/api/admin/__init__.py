"""Admin routes, served on a Unix socket that belongs to the daemon's user."""
