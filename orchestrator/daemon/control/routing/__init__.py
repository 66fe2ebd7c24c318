"""Which replica a stream goes to, and what that is decided by."""
