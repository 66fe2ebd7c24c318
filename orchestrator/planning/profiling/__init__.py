"""What there is to measure, in which process, and what becomes of it. `worker.measuring` takes the figures."""
