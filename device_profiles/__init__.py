"""The vocabulary of hardware and workloads: frozen values, no effects."""
