"""The `outrider` command: one command, one file."""
