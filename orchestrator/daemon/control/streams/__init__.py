"""Streams: what was asked, what was delivered, how long each may take, and how one moves."""
