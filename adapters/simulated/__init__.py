"""A toy model with scripted latency and faults. Ships with the product: the whole daemon runs on it."""
