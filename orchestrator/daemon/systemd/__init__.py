"""What the daemon and systemd say to each other, and the files that make it a service."""
