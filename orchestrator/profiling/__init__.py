"""What there is to measure, in which process, and what becomes of it. `orchestrator.measuring` takes the figures."""
