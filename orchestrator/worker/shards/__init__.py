"""Layers of a target in a process of their own, on this host or another: the link to it, and both of its ends."""
