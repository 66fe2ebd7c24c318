"""Spans and metrics of OpenTelemetry. Without `tracing` in cluster.yaml nothing but `port` and `names` is imported."""
