"""Alerts: one table, told as Prometheus rules, as a runbook, and by the daemon itself."""
