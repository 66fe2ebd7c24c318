"""Runtimes by what they read."""

from adapters.names import SHARDING_ADAPTERS

CONVERTING = tuple(name for name in SHARDING_ADAPTERS if name != "simulated")
"""Those that read directories of safetensors, and make a graph of their own."""
