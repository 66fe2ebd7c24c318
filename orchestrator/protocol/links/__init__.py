"""Connections between workers: endpoints with a key, and the encryption of what crosses hosts."""
