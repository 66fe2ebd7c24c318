"""The record of answers that a client may resume: in memory, and in a file that outlives the daemon."""
