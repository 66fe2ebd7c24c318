"""Prometheus metrics: what is counted, under which names. docs/metrics.md gives the formulas."""
